"""DCT: the discrete cosine transform of small tiles, in which slow changes are few large entries.

Paper:    Ahmed, Natarajan, Rao, "Discrete cosine transform", IEEE Trans. Computers 1974; for momentum, Peng et al.,
          "DeMo: decoupled momentum optimization", 2024. https://arxiv.org/abs/2411.19870, section 3
Formula:  Y = D_a X D_b'  for each tile X of a rows and b columns
          D_n[k, i] = sqrt(2 / n) cos(pi (i + 1/2) k / n), and 1 / sqrt(n) for k = 0;  D_n D_n' = I
Wire:     nothing
          total    0 bytes: lengths stay, and the entries of a tile lie end to end
Traits:   orthonormal: lengths, inner products and hence unbiasedness and contraction are kept
Differs:  as in the paper: a tile's sides are the largest divisors of the tensor's that are at most `side`. Tensors of
          more dimensions are matrices of their first one by the rest; vectors have tiles of one row
Spec:     dct, dct(side=32)
"""

import math

import torch
from torch import Tensor

from gradwire.codecs.stage import Transform
from gradwire.core import Key, Segments, check_argument, is_count, register
from gradwire.core.graph_refs import cached_on_device
from gradwire.core.segments import matrix_shape


@register("dct", kind="transform")
class DCT(Transform):
    """Cosine transform of tiles, of ``side`` rows and columns; ``chunk_topk(k, chunk=side * side)`` keeps k of each."""

    examples = ("dct", "dct(side=4)")
    side: int = 64

    def __post_init__(self) -> None:
        check_argument(self, "side", is_count(self.side), "a whole number of entries from 1, for example 64")

    def widen(self, segments: Segments) -> Segments:
        return Segments(segments.names, tuple((n,) for n in segments.lengths))

    def forward(self, x: Tensor, segments: Segments, key: Key) -> Tensor:
        parts = zip(x.split(segments.lengths), segments.shapes, strict=True)
        return torch.cat([self._transform(part, shape) for part, shape in parts])

    def inverse(self, y: Tensor, segments: Segments, key: Key) -> Tensor:
        parts = zip(y.split(segments.lengths), segments.shapes, strict=True)
        return torch.cat([self._restore(part, shape) for part, shape in parts])

    def _transform(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        if not x.numel():
            return x
        down, a, across, b = self._tiling(shape)
        tiles = x.double().view(down, a, across, b).transpose(1, 2)
        return (_basis(a, x.device) @ tiles @ _basis(b, x.device).T).float().flatten()

    def _restore(self, y: Tensor, shape: tuple[int, ...]) -> Tensor:
        if not y.numel():
            return y
        down, a, across, b = self._tiling(shape)
        tiles = y.double().view(down, across, a, b)
        return (_basis(a, y.device).T @ tiles @ _basis(b, y.device)).transpose(1, 2).float().flatten()

    def _tiling(self, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
        """How many tiles there are down, their rows, how many across, and their columns."""
        rows, columns = matrix_shape(shape)
        a, b = _divisor(rows, self.side), _divisor(columns, self.side)
        return rows // a, a, columns // b, b


def _divisor(n: int, most: int) -> int:
    """The largest divisor of n that is at most so large."""
    return next(d for d in range(min(n, most), 0, -1) if n % d == 0)


@cached_on_device(64)
def _basis(n: int, device: torch.device) -> Tensor:
    """The orthonormal matrix D_n; cached, so it must not be written into.

    In float64, the order of additions, which differs between machines, does not show after rounding to float32.
    """
    i = torch.arange(n, dtype=torch.float64)
    basis = torch.cos(math.pi / n * (i + 0.5) * i[:, None]) * math.sqrt(2.0 / n)
    basis[0] = 1.0 / math.sqrt(n)
    return basis.to(device)
