"""Tensors to few bytes, and back."""

from gradwire.codecs import indices, quantizers, selectors, transforms  # noqa: F401 - their names are registered
from gradwire.codecs.codec import Codec as Codec
from gradwire.codecs.codec import codec as codec
from gradwire.codecs.decoding import Entries as Entries
from gradwire.codecs.stage import Decoded as Decoded
from gradwire.codecs.stage import EncodeInput as EncodeInput
from gradwire.codecs.stage import Memory as Memory
from gradwire.codecs.stage import Quantizer as Quantizer
from gradwire.codecs.stage import Stage as Stage
from gradwire.codecs.stage import StateSpec as StateSpec
