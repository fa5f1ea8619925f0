"""Transforms: changes of basis that all ranks share."""

from gradwire.codecs.transforms.hadamard import Hadamard

__all__ = ["Hadamard"]
