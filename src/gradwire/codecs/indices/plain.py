"""Plain integers: every position as it is.

Paper:    none; what most implementations send, and what the other coders are measured against.
Formula:  i_1 < i_2 < ... < i_k, each as one number
Wire:     positions  k little-endian int32 (4k bytes) or int64 (8k bytes)
Traits:   exact; fixed length.
Differs:  no paper to differ from.
Spec:     int32, int64
"""

from typing import ClassVar

import torch
from torch import Tensor

from gradwire.codecs.stage import IndexCoder
from gradwire.core import as_bytes, from_bytes, register
from gradwire.core.payload import first_bytes


class PlainCoder(IndexCoder):
    """Positions as integers of ``dtype``."""

    dtype: ClassVar[torch.dtype]

    def size(self, count: int, n: int) -> int:
        if n - 1 > torch.iinfo(self.dtype).max:
            raise ValueError(f"{self} cannot name all positions of {n} elements; use int64 instead")
        return self.dtype.itemsize * count

    def encode(self, indices: Tensor, n: int) -> Tensor:
        self.size(indices.numel(), n)  # refuses what does not fit
        return as_bytes(indices.to(self.dtype, copy=True))  # the bytes must not alias the positions

    def decode(self, data: Tensor, count: int, n: int) -> tuple[Tensor, int]:
        size = self.size(count, n)
        return from_bytes(first_bytes(data, size, f"the list of {count} positions"), self.dtype).long(), size


@register("int32", kind="indices")
class Int32(PlainCoder):
    """Positions as 32-bit integers; for buffers of 2**31 elements at most."""

    examples = ("int32",)
    dtype = torch.int32


@register("int64", kind="indices")
class Int64(PlainCoder):
    """Positions as 64-bit integers; for buffers of any size."""

    examples = ("int64",)
    dtype = torch.int64
