"""Quantizers: values into bytes, and back."""

from gradwire.codecs.quantizers.cast import BF16, FP16, FP32
from gradwire.codecs.quantizers.integer import Int2, Int4, Int8
from gradwire.codecs.quantizers.natural import Natural
from gradwire.codecs.quantizers.onebit import OneBit
from gradwire.codecs.quantizers.qsgd import QSGD
from gradwire.codecs.quantizers.sign import Sign
from gradwire.codecs.quantizers.terngrad import TernGrad

__all__ = [
    "BF16",
    "FP16",
    "FP32",
    "QSGD",
    "Int2",
    "Int4",
    "Int8",
    "Natural",
    "OneBit",
    "Sign",
    "TernGrad",
]
