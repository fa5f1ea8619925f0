"""Sign: one bit per value, and one scale for all of them.

Paper:    Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression
          schemes", ICML 2019. https://arxiv.org/abs/1901.09847, Algorithm 1
Formula:  C(x)_i = s if x_i >= 0, else -s;  s = |x|_1 / m (mean) or |x|_2 / sqrt(m) (norm)
Wire:     scales   float32[segments]
          signs    1 bit each, 1 for x >= 0
          total    4 * segments + ceil(m / 8) bytes
Traits:   biased; contraction for the mean: |x - C(x)|^2 = |x|^2 - |x|_1^2 / m
Differs:  zero has a sign, plus, since one bit cannot say otherwise. The scale "norm", which keeps
          the length of x but may lose more than it says, is an addition.
Spec:     sign, sign(scale='norm')
"""

from functools import partial

from torch import Tensor

from gradwire.codecs.stage import FeedbackKernel, Quantizer
from gradwire.core.arguments import check_argument
from gradwire.core.keys import Key
from gradwire.core.registry import register
from gradwire.core.traits import Traits
from gradwire.kernels import fused, quantize
from gradwire.kernels.bits import packed_bytes


@register("sign", kind="quantizer")
class Sign(Quantizer):
    """Signs times one magnitude per segment: the ``mean``, or the one that keeps the ``norm``."""

    examples = ("sign", "sign(scale='norm')")
    scale: str = "mean"

    def __post_init__(self) -> None:
        check_argument(self, "scale", self.scale in ("mean", "norm"), "'mean' or 'norm'")

    @property
    def feedback_kernel(self) -> FeedbackKernel:  # type: ignore[override]
        return partial(fused.feedback_sign_, norm=self.scale == "norm")

    def size(self, lengths: tuple[int, ...]) -> int:
        return 4 * len(lengths) + packed_bytes(sum(lengths), 1)

    def encode(self, values: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key) -> Tensor:
        return quantize.sign_encode(values, lengths, self.scale == "norm")

    def decode(self, data: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key) -> Tensor:
        return quantize.sign_decode(data, lengths)

    def decode_into(self, data: Tensor, lengths: Tensor, out: Tensor) -> Tensor:
        return quantize.sign_decode(data, lengths, out)

    def merge(self, shards: Tensor, error: Tensor | None, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        return fused.merge_sign(shards, error, lengths, self.scale == "norm")

    @property
    def traits(self) -> Traits:
        return Traits(contraction=self.scale == "mean")
