"""Top-k: keep the k entries of largest magnitude.

Paper:    Aji and Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017.
          https://arxiv.org/abs/1704.05021
Formula:  C(x)_i = x_i if |x_i| is among the k largest of its segment, else 0;
          k = max(1, round(ratio * n))
Wire:     indices  k per segment, as the index coder packs them
          values   k per segment, as the quantizer packs them
Traits:   contraction, |x - C(x)|^2 <= (1 - k/n) |x|^2; fixed
Differs:  the paper drops by one threshold for all layers or one per layer, which may be sampled;
          here k is exact in every segment, and of entries of equal magnitude the first wins.
Spec:     topk(0.01)
"""

from torch import Tensor

from gradwire.codecs.stage import EncodeInput, Selector
from gradwire.core import Key, Traits, check_fraction, register
from gradwire.kernels.fused import topk
from gradwire.kernels.select import share


@register("topk", kind="selector")
class TopK(Selector):
    """The largest entries of each segment.

    Attributes:
        ratio: The share of a segment's entries that is sent, in (0, 1].
    """

    ratio: float
    traits = Traits(contraction=True)
    exact_topk = True
    examples = ("topk(0.01)", "topk(0.3)", "topk(1)")

    def __post_init__(self) -> None:
        check_fraction(self, "ratio", "topk(0.01)")

    def capacity(self, n: int) -> int:
        return share(self.ratio, n)

    def select(self, signal: EncodeInput, key: Key) -> Tensor:
        lengths = signal.segments.lengths
        return topk(signal.target, lengths, tuple(map(self.capacity, lengths)))
