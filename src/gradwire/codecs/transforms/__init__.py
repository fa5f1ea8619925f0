"""Transforms: changes of basis that all ranks share."""

from gradwire.codecs.transforms.dct import DCT
from gradwire.codecs.transforms.hadamard import Hadamard

__all__ = ["DCT", "Hadamard"]
