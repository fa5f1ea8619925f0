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

from torch import Tensor

from gradwire.codecs.stage import Transform
from gradwire.core import Key, Segments, check_argument, is_count, register
from gradwire.kernels.hadamard import random_signs, rotate, widened_places


@register("hadamard", kind="transform")
class Hadamard(Transform):
    """Random rotation of blocks; a larger ``block`` spreads outliers more, and costs log2(block) passes."""

    examples = ("hadamard", "hadamard(block=256)")
    block: int = 1024

    def __post_init__(self) -> None:
        valid = is_count(self.block) and self.block.bit_count() == 1
        check_argument(self, "block", valid, "a power of two, for example 1024")

    def widen(self, segments: Segments) -> Segments:
        padded = (-(-n // b) * b for n, b in zip(segments.lengths, self._sizes(segments), strict=True))
        return Segments(segments.names, tuple((n,) for n in padded))

    def forward(self, x: Tensor, segments: Segments, key: Key) -> Tensor:
        wide = self.widen(segments)
        padded = x.new_zeros(wide.total)
        padded[widened_places(segments, wide, x.device)] = x
        signs = random_signs(wide, key.shared().fold("hadamard"), x.device)
        return rotate(padded * signs, wide.lengths, self._sizes(segments))

    def inverse(self, y: Tensor, segments: Segments, key: Key) -> Tensor:
        wide = self.widen(segments)
        signs = random_signs(wide, key.shared().fold("hadamard"), y.device)
        padded = rotate(y, wide.lengths, self._sizes(segments)) * signs  # H is symmetric
        return padded[widened_places(segments, wide, y.device)]

    def _sizes(self, segments: Segments) -> tuple[int, ...]:
        # The smallest power of two that holds n is 2 ** (n - 1).bit_length(); n = 0 has none.
        return tuple(min(self.block, 1 << max(n - 1, 0).bit_length()) for n in segments.lengths)
