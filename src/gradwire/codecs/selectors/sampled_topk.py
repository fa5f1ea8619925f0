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

from torch import Tensor

from gradwire.codecs.stage import EncodeInput, Selector
from gradwire.core import Key, Traits, check_argument, check_fraction, is_count, is_number, register
from gradwire.kernels.sampled import Adaptation, sampled_topk
from gradwire.kernels.select import each, share


@register("sampled_topk", kind="selector")
class SampledTopK(Selector):
    """About the largest entries of each segment, by a threshold that a sample gives.

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
    traits = Traits(contraction=True, fixed=False)
    examples = ("sampled_topk(0.01)", "sampled_topk(0.1, sample=0.2)")

    def __post_init__(self) -> None:
        check_fraction(self, "ratio", "sampled_topk(0.001)")
        check_fraction(self, "sample", "0.01")
        check_argument(self, "lower", is_number(self.lower) and 0 < self.lower < 1, "between 0 and 1, for example 0.8")
        check_argument(self, "upper", is_number(self.upper) and self.upper > 1, "a number above 1, for example 1.3")
        check_argument(self, "iterations", is_count(self.iterations, least=0), "a whole number from 0, for example 10")

    def capacity(self, n: int) -> int:
        return share(self.ratio, n)

    def select(self, signal: EncodeInput, key: Key) -> Tensor:
        adaptation = Adaptation(self.lower, self.upper, self.iterations)

        def choose(size: Tensor, unit: str) -> Tensor:
            return sampled_topk(size, self.capacity(size.numel()), self.ratio, self.sample, adaptation, key, unit)

        return each(signal.target.abs(), signal.segments, choose)
