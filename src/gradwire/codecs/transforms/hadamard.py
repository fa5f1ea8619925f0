"""Hadamard: a random rotation that spreads every value over its block.

Paper:    Suresh et al., "Distributed mean estimation with limited communication", ICML 2017.
          https://arxiv.org/abs/1611.00429, section 3
Formula:  R x = H D x / sqrt(b) for each block of b values;  D = diag(random signs),
          H = [[1, 1], [1, -1]] (x) ... (x) [[1, 1], [1, -1]], Walsh-Hadamard;  R' R = I
Wire:     nothing: all ranks draw the same signs from the shared key
          total    0 bytes, but a segment grows to a multiple of its block
Traits:   orthonormal: lengths, inner products and hence unbiasedness and contraction are kept
Differs:  blockwise. A segment shorter than the block uses the next power of two as its own block,
          so that padding stays small. Signs change with the step.
Spec:     hadamard, hadamard(block=256)
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.codecs.stage import Transform
from gradwire.core.arguments import is_count
from gradwire.core.keys import Key
from gradwire.core.registry import register
from gradwire.core.segments import Segments
from gradwire.kernels.groups import spread
from gradwire.kernels.philox import words


@register("hadamard", kind="transform")
@dataclass(frozen=True)
class Hadamard(Transform):
    """A larger ``block`` spreads outliers thinner and costs log2(block) passes."""

    examples: ClassVar[tuple[str, ...]] = ("hadamard", "hadamard(block=256)")
    block: int = 1024

    def __post_init__(self) -> None:
        if not (is_count(self.block) and self.block.bit_count() == 1):
            raise ValueError(
                f"hadamard cannot rotate blocks of {self.block!r} values; choose a power of two, for example 1024"
            )

    def widen(self, segments: Segments) -> Segments:
        sizes = self._sizes(segments)
        padded = (-(-n // b) * b for n, b in zip(segments.lengths, sizes, strict=True))
        return Segments(segments.names, tuple((n,) for n in padded))

    def forward(self, x: Tensor, segments: Segments, key: Key) -> Tensor:
        wide = self.widen(segments)
        padded = x.new_zeros(wide.total)
        padded[_places(segments, wide, x.device)] = x
        return self._turn(padded * _signs(wide, key, x.device), segments, wide)

    def inverse(self, y: Tensor, segments: Segments, key: Key) -> Tensor:
        wide = self.widen(segments)
        padded = self._turn(y, segments, wide) * _signs(wide, key, y.device)  # H is symmetric
        return padded[_places(segments, wide, y.device)]

    def _sizes(self, segments: Segments) -> tuple[int, ...]:
        # The smallest power of two that holds n is 2 ** (n - 1).bit_length(); n = 0 has none.
        return tuple(min(self.block, 1 << max(n - 1, 0).bit_length()) for n in segments.lengths)

    def _turn(self, x: Tensor, segments: Segments, wide: Segments) -> Tensor:
        sizes = self._sizes(segments)
        pieces = list(x.split(wide.lengths))
        for size in sorted(set(sizes)):  # segments of one block size turn together
            members = [i for i, b in enumerate(sizes) if b == size]
            turned = walsh(torch.cat([pieces[i] for i in members]).view(-1, size)).flatten()
            parts = turned.split([wide.lengths[i] for i in members])
            for i, part in zip(members, parts, strict=True):
                pieces[i] = part
        return torch.cat(pieces) if pieces else x


def walsh(rows: Tensor) -> Tensor:
    """Each row times the orthonormal Walsh-Hadamard matrix. [r, b] -> [r, b], b a power of two."""
    r, b = rows.shape
    x = rows / math.sqrt(b)  # before the sums, which could overflow
    half = 1
    while half < b:
        pairs = x.view(r, b // (2 * half), 2, half)
        left, right = pairs.unbind(2)
        x = torch.stack((left + right, left - right), 2)
        half *= 2
    return x.view(r, b)


def _places(segments: Segments, wide: Segments, device: torch.device) -> Tensor:
    """Where each value of the buffer lies in the padded one."""
    shift = (wide.offsets_on(device) - segments.offsets_on(device))[:-1]
    return torch.arange(segments.total, device=device) + spread(shift, segments.lengths_on(device), segments.total)


def _signs(wide: Segments, key: Key, device: torch.device) -> Tensor:
    """One float32 of +-1 per padded value; each random word gives 32 of them."""
    stream = key.shared().fold("hadamard")
    bit = torch.arange(32, device=device)
    drawn = [
        (words(stream, name, (n + 31) // 32, device)[:, None] >> bit & 1).flatten()[:n]
        for name, n in zip(wide.names, wide.lengths, strict=True)
    ]
    return 1.0 - 2.0 * torch.cat(drawn) if drawn else torch.zeros(0, device=device)
