"""Sampled top-k: a threshold guessed from a sample of the entries, then adapted.

Paper:    Lin et al., "Deep gradient compression: reducing the communication bandwidth for
          distributed training", ICLR 2018. https://arxiv.org/abs/1712.01887
Formula:  t = the (ratio * s)-th largest of s sampled |x_i|;  candidates = {i : |x_i| >= t};
          t *= lower while candidates < lower * k;  t *= upper while candidates > upper * k;
          C(x) keeps the k largest candidates;  k = max(1, round(ratio * n))
Wire:     count    of the entries sent, since only their maximum is known beforehand
          indices  at most k per segment, as the index coder packs them
          values   as many, as the quantizer packs them
Traits:   contraction; not fixed
Differs:  when more than k pass, the k largest are sent, ties drawn at random; the authors' code
          sends the first k in memory order, which favors low positions. A threshold is raised only
          as long as k candidates remain.
Spec:     sampled_topk(0.001)
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradwire.codecs.stage import EncodeInput, Selector
from gradwire.core.arguments import is_count, is_fraction, is_number
from gradwire.core.keys import Key
from gradwire.core.registry import register
from gradwire.core.traits import Traits
from gradwire.kernels.philox import words
from gradwire.kernels.select import each, fair_ties, share, top


@register("sampled_topk", kind="selector")
@dataclass(frozen=True)
class SampledTopK(Selector):
    """About the largest entries of each segment, without sorting the segment.

    Attributes:
        ratio: The share of a segment's entries that is sent at most, in (0, 1].
        sample: The share that is sampled, at least; segments of up to 2 / ratio are read whole.
        lower: Below this multiple of k candidates the threshold is lowered, by this factor.
        upper: Above this multiple of k candidates the threshold is raised, by this factor.
        iterations: How often the threshold may move.
    """

    ratio: float
    sample: float = 0.01
    lower: float = 0.8
    upper: float = 1.3
    iterations: int = 10

    fixed = False
    examples: ClassVar[tuple[str, ...]] = ("sampled_topk(0.01)", "sampled_topk(0.1, sample=0.2)")

    def __post_init__(self) -> None:
        for name, value in (("ratio", self.ratio), ("sample", self.sample)):
            if not is_fraction(value):
                raise ValueError(
                    f"sampled_topk got {name}={value!r}, which must be in (0, 1]; "
                    "write sampled_topk(0.001, sample=0.01) for a thousandth from a percent"
                )
        if not (is_number(self.lower) and is_number(self.upper) and 0 < self.lower < 1 < self.upper):
            raise ValueError(
                f"sampled_topk got lower={self.lower!r}, upper={self.upper!r}, which must lie on "
                "either side of 1; write lower=0.8, upper=1.3"
            )
        if not is_count(self.iterations, least=0):
            raise ValueError(
                f"sampled_topk got iterations={self.iterations!r}, which must be a whole number "
                "from 0; write iterations=10"
            )

    def capacity(self, n: int) -> int:
        return share(self.ratio, n)

    def select(self, signal: EncodeInput, key: Key) -> Tensor:
        size, table = signal.target.abs(), signal.segments
        return each(size, table, lambda piece, unit: self._pick(piece, unit, key))

    def _pick(self, size: Tensor, unit: str, key: Key) -> Tensor:
        k, ties = self.capacity(size.numel()), fair_ties(key, unit, size.device)
        if size.numel() <= math.ceil(2 / self.ratio):
            return top(size, k, ties)
        sampled = self._sampled(size, unit, key)
        edge = sampled.topk(math.ceil(sampled.numel() * self.ratio), sorted=False).values.min()
        near = self._adapt(size, edge, k)
        return near if near.numel() <= k else near[top(size[near], k, ties)]

    def _sampled(self, size: Tensor, unit: str, key: Key) -> Tensor:
        n = size.numel()
        wanted = min(n, max(math.ceil(self.sample * n), math.ceil(2 / self.ratio)))
        # Odd strides walk through every column of the matrices whose width is a power of two.
        stride = (n // wanted - 1) // 8 * 8 + 1
        start = int(words(key.fold("sample"), unit, 1, size.device)) % stride
        return size[start::stride]

    def _adapt(self, size: Tensor, edge: Tensor, k: int) -> Tensor:
        """Rising positions of the candidates."""
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

    @property
    def traits(self) -> Traits:
        return Traits(contraction=True, fixed=False)
