"""Tensors to few bytes, and back."""

from gradwire.codecs import indices, quantizers, selectors, transforms  # noqa: F401 - their names are registered
from gradwire.codecs.codec import Codec, codec

__all__ = ["Codec", "codec"]
