"""Transforms: changes of basis that all ranks share."""

from gradwire.codecs.transforms.dct import DCT as DCT
from gradwire.codecs.transforms.hadamard import Hadamard as Hadamard
