"""Sign: one bit per value, and one scale for all of them, or for every few.

Paper:    Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression
          schemes", ICML 2019. https://arxiv.org/abs/1901.09847, Algorithm 1
Formula:  C(x)_i = s if x_i >= 0, else -s;  s = |x|_1 / m (mean) or |x|_2 / sqrt(m) (norm)
Wire:     scales   float32[segments], or float32[blocks] with per=
          signs    1 bit each, 1 for x >= 0
          total    4 * segments (or blocks) + ceil(m / 8) bytes
Traits:   biased; contraction for the mean: |x - C(x)|^2 = |x|^2 - |x|_1^2 / m
Differs:  zero has a sign, plus, since one bit cannot say otherwise. The scale "norm", which keeps
          the length of x but may lose more than it says, is an addition. So are blocks: per=64 has one
          scale for every 64 values that are sent, and blocks end where segments end.
Spec:     sign, sign(scale='norm'), sign(per=4096), chunk_topk(64) | sign(per=64)
"""

from torch import Tensor

from gradwire.codecs.stage import FeedbackKernel, Quantizer
from gradwire.core.arguments import check_argument, is_count
from gradwire.core.keys import Key
from gradwire.core.registry import register
from gradwire.core.traits import Traits
from gradwire.kernels import fused, quantize
from gradwire.kernels.bits import packed_bytes
from gradwire.kernels.groups import block_lengths, blocks_of, num_blocks


@register("sign", kind="quantizer")
class Sign(Quantizer):
    """Signs times one magnitude per segment: the ``mean``, or the one that keeps the ``norm``.

    Attributes:
        scale: Which of the two.
        per: How many values share a scale; None: all of a segment.
    """

    examples = ("sign", "sign(scale='norm')", "sign(per=16)")
    scale: str = "mean"
    per: int | None = None

    def __post_init__(self) -> None:
        check_argument(self, "scale", self.scale in ("mean", "norm"), "'mean' or 'norm'")
        check_argument(
            self, "per", self.per is None or is_count(self.per), "a positive whole number, as in sign(per=64)"
        )

    @property
    def feedback_kernel(self) -> FeedbackKernel:  # type: ignore[override]
        return self._keep_error

    def _keep_error(
        self, grad: Tensor, residual: Tensor, decay: float, lengths: tuple[int, ...], before: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        cut = block_lengths(lengths, self.per)
        return fused.feedback_sign_(grad, residual, decay, cut, self.scale == "norm", before=before)

    def size(self, lengths: tuple[int, ...]) -> int:
        return 4 * num_blocks(lengths, self.per) + packed_bytes(sum(lengths), 1)

    def encode(self, values: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key) -> Tensor:
        return quantize.sign_encode(values, blocks_of(lengths, self.per), self.scale == "norm")

    def decode(self, data: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key) -> Tensor:
        return quantize.sign_decode(data, blocks_of(lengths, self.per))

    def decode_into(self, data: Tensor, lengths: Tensor, out: Tensor) -> Tensor:
        return quantize.sign_decode(data, blocks_of(lengths, self.per), out)

    def merge(self, shards: Tensor, error: Tensor | None, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        return fused.merge_sign(shards, error, block_lengths(lengths, self.per), self.scale == "norm")

    @property
    def traits(self) -> Traits:
        return Traits(contraction=self.scale == "mean")
