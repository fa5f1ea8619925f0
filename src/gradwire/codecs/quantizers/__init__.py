"""Quantizers: values into bytes, and back."""

from gradwire.codecs.quantizers.cast import BF16 as BF16
from gradwire.codecs.quantizers.cast import FP16 as FP16
from gradwire.codecs.quantizers.cast import FP32 as FP32
from gradwire.codecs.quantizers.fp8 import FP8 as FP8
from gradwire.codecs.quantizers.integer import Int2 as Int2
from gradwire.codecs.quantizers.integer import Int4 as Int4
from gradwire.codecs.quantizers.integer import Int8 as Int8
from gradwire.codecs.quantizers.natural import Natural as Natural
from gradwire.codecs.quantizers.onebit import OneBit as OneBit
from gradwire.codecs.quantizers.qsgd import QSGD as QSGD
from gradwire.codecs.quantizers.sign import Sign as Sign
from gradwire.codecs.quantizers.terngrad import TernGrad as TernGrad
from gradwire.codecs.quantizers.twobit import TwoBit as TwoBit
