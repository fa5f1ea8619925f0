"""Plain integers: every position as it is.

Paper:    none; what most implementations send, and what the other coders are measured against.
Formula:  i_1 < i_2 < ... < i_k, each as one number
Wire:     positions  k little-endian int32 (4k bytes) or int64 (8k bytes)
Traits:   exact; fixed length.
Differs:  no paper to differ from.
Spec:     int32, int64
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.codecs.stage import IndexCoder
from gradwire.core.payload import CorruptMessageError, as_bytes, from_bytes
from gradwire.core.registry import register


@register("int32", kind="indices")
@dataclass(frozen=True)
class Int32(IndexCoder):
    """Positions as 32-bit integers; for buffers of 2**31 elements at most."""

    examples: ClassVar[tuple[str, ...]] = ("int32",)

    def size(self, count: int, n: int) -> int:
        if n > 2**31:
            raise ValueError(f"int32 cannot name all positions of {n} elements; use int64 instead")
        return 4 * count

    def encode(self, indices: Tensor, n: int) -> Tensor:
        self.size(indices.numel(), n)  # refuses what does not fit
        return as_bytes(indices.to(torch.int32))

    def decode(self, data: Tensor, count: int, n: int) -> tuple[Tensor, int]:
        return _read(data, self.size(count, n), torch.int32)


@register("int64", kind="indices")
@dataclass(frozen=True)
class Int64(IndexCoder):
    """Positions as 64-bit integers; for buffers of any size."""

    examples: ClassVar[tuple[str, ...]] = ("int64",)

    def size(self, count: int, n: int) -> int:
        del n
        return 8 * count

    def encode(self, indices: Tensor, n: int) -> Tensor:
        del n
        return as_bytes(indices.clone())  # the bytes must not alias the positions

    def decode(self, data: Tensor, count: int, n: int) -> tuple[Tensor, int]:
        return _read(data, self.size(count, n), torch.int64)


def _read(data: Tensor, size: int, dtype: torch.dtype) -> tuple[Tensor, int]:
    if data.numel() < size:
        raise CorruptMessageError(
            f"the positions take {size} bytes but only {data.numel()} are left; the message was cut short"
        )
    return from_bytes(data[:size], dtype).long(), size
