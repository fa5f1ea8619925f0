"""About the k largest entries, by a threshold that is estimated from a sample and then adapted, in plain torch."""

import math
from typing import NamedTuple

from torch import Tensor

from gradwire.core.keys import Key
from gradwire.kernels.philox import words
from gradwire.kernels.select import fair_ties, top


class Adaptation(NamedTuple):
    """How a threshold is adapted until about k candidates pass it.

    Attributes:
        lower: Below this multiple of k the threshold is lowered, by this factor.
        upper: Above this multiple of k the threshold is raised, by this factor.
        iterations: How often it may move.
    """

    lower: float
    upper: float
    iterations: int

    def candidates(self, size: Tensor, edge: Tensor, k: int) -> Tensor:
        """Rising positions of the candidates, from the threshold ``edge`` on."""
        near = (size >= edge).nonzero().flatten()
        for _ in range(self.iterations):
            count = near.numel()
            if self.lower * k <= count <= self.upper * k:
                break
            edge = edge * (self.lower if count < k else self.upper)
            tried = (size >= edge).nonzero().flatten()
            # Too many candidates cost only time, so raising must leave k, and must help.
            if count > k and not k <= tried.numel() < count:
                break
            near = tried
        return near


def sampled_topk(
    size: Tensor, k: int, ratio: float, sample: float, adaptation: Adaptation, key: Key, unit: str
) -> Tensor:
    """Rising positions of at most ``k`` entries of one unit, given their magnitudes; ties are drawn at random."""
    ties = fair_ties(key, unit, size.device)
    if size.numel() <= math.ceil(2 / ratio):
        return top(size, k, ties)
    sampled = _sampled(size, ratio, sample, key, unit)
    edge = sampled.topk(math.ceil(sampled.numel() * ratio), sorted=False).values.min()
    near = adaptation.candidates(size, edge, k)
    return near if near.numel() <= k else near[top(size[near], k, ties)]


def _sampled(size: Tensor, ratio: float, sample: float, key: Key, unit: str) -> Tensor:
    n = size.numel()
    wanted = min(n, max(math.ceil(sample * n), math.ceil(2 / ratio)))
    # Odd strides walk through every column of the matrices whose width is a power of two.
    stride = (n // wanted - 1) // 8 * 8 + 1
    start = int(words(key.fold("sample"), unit, 1, size.device)) % stride
    return size[start::stride]
