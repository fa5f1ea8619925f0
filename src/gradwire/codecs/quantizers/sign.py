"""Sign: one bit per value, and one scale for all of them, or for every few.

Paper:    Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression
          schemes", ICML 2019. https://arxiv.org/abs/1901.09847, Algorithm 1
Formula:  C(x)_i = s if x_i >= 0, else -s;  s = |x|_1 / m (mean) or |x|_2 / sqrt(m) (norm)
Wire:     scales   float32[segments], or float32[blocks] with per=; bfloat16 with scales='bf16'
          signs    1 bit each, 1 for x >= 0
          total    4 (or 2) * segments (or blocks) + ceil(m / 8) bytes
Traits:   biased; contraction for the mean: |x - C(x)|^2 = |x|^2 - |x|_1^2 / m; rounding scales to bfloat16 adds at
          most 2^-16 |x|_1^2 / m
Differs:  zero has a sign, plus, since one bit cannot say otherwise. The scale "norm", which keeps
          the length of x but may lose more than it says, is an addition. So are blocks: per=64 has one
          scale for every 64 values that are sent, and blocks end where segments end.
Spec:     sign, sign(scale='norm'), sign(per=4096), chunk_topk(64) | sign(per=64, scales='bf16')
"""

import torch
from torch import Tensor

from gradwire.codecs.stage import Quantizer
from gradwire.core import Key, Traits, as_bytes, check_argument, from_bytes, is_count, register
from gradwire.core.layout import Flat
from gradwire.kernels import fused, quantize
from gradwire.kernels.bits import packed_bytes
from gradwire.kernels.groups import block_lengths, blocks_of, num_blocks
from gradwire.kernels.momentum import Momentum, momentum_sign_, sign_decode_times_

_LARGEST = torch.finfo(torch.bfloat16).max


@register("sign", kind="quantizer")
class Sign(Quantizer):
    """Signs times one magnitude per segment; it is the ``mean``, or keeps the ``norm``.

    Attributes:
        scale: Which of the two.
        per: How many values share a scale; None: all of a segment.
        scales: The format of scales in messages, ``fp32`` or ``bf16``.
    """

    examples = ("sign", "sign(scale='norm')", "sign(per=16)", "sign(per=16, scales='bf16')")
    takes_scattered = True
    scale: str = "mean"
    per: int | None = None
    scales: str = "fp32"

    def __post_init__(self) -> None:
        check_argument(self, "scale", self.scale in ("mean", "norm"), "'mean' or 'norm'")
        check_argument(self, "scales", self.scales in ("fp32", "bf16"), "'fp32' or 'bf16'")
        check_argument(
            self, "per", self.per is None or is_count(self.per), "a positive whole number, as in sign(per=64)"
        )

    def feedback_kernel(
        self, grad: Flat, residual: Tensor, decay: float, lengths: tuple[int, ...], before: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        cut = block_lengths(lengths, self.per)
        return fused.feedback_sign_(grad, residual, decay, cut, self.scale == "norm", before=before)

    def momentum_kernel(
        self,
        grad: Flat,
        residual: Tensor,
        momentum: Momentum,
        decay: float,
        lengths: tuple[int, ...],
        before: Tensor | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        cut = block_lengths(lengths, self.per)
        return momentum_sign_(grad, residual, momentum, decay, cut, self.scale == "norm", before, out)

    @property
    def fuses(self) -> bool:  # type: ignore[override]
        """Kernels that encode and keep the error have float32 scales."""
        return self.scales == "fp32"

    def size(self, lengths: tuple[int, ...]) -> int:
        return (4 if self.fuses else 2) * num_blocks(lengths, self.per) + packed_bytes(sum(lengths), 1)

    def encode(self, values: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key) -> Tensor:
        blocks = blocks_of(lengths, self.per)
        data = quantize.sign_encode(values, blocks, self.scale == "norm")
        if self.fuses or not len(blocks):
            return data
        scales, signs = from_bytes(data[: 4 * len(blocks)], torch.float32), data[4 * len(blocks) :]
        finite = torch.where(scales.isinf(), scales, scales.clamp(max=_LARGEST))  # rounding makes none infinite
        return torch.cat((as_bytes(finite.bfloat16()), signs))

    def decode(self, data: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key) -> Tensor:
        blocks = blocks_of(lengths, self.per)
        return quantize.sign_decode(self._widened(data, len(blocks)), blocks)

    def decode_into(self, data: Tensor, lengths: Tensor, out: Flat) -> Tensor:
        blocks = blocks_of(lengths, self.per)
        return quantize.sign_decode(self._widened(data, len(blocks)), blocks, out)

    def decode_times(self, data: Tensor, lengths: Tensor, out: Tensor, factor: Tensor, product: Flat) -> None:
        blocks = blocks_of(lengths, self.per)
        sign_decode_times_(self._widened(data, len(blocks)), blocks, out, factor, product)

    def _widened(self, data: Tensor, blocks: int) -> Tensor:
        """The same message with float32 scales."""
        if self.fuses or not blocks:
            return data
        scales = from_bytes(data[: 2 * blocks], torch.bfloat16).float()
        return torch.cat((as_bytes(scales), data[2 * blocks :]))

    def merge(self, messages: Tensor, error: Tensor | None, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        return fused.merge_sign(messages, error, block_lengths(lengths, self.per), self.scale == "norm")

    def merge_into(self, messages: Tensor, error: Tensor, lengths: tuple[int, ...], out: Tensor) -> Tensor:
        return fused.merge_sign(messages, error, block_lengths(lengths, self.per), self.scale == "norm", out)[0]

    @property
    def traits(self) -> Traits:
        return Traits(contraction=self.scale == "mean")
