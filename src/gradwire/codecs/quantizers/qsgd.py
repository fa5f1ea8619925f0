"""QSGD: stochastic rounding to evenly spaced levels of the l2 norm.

Paper:    Alistarh et al., "QSGD: communication-efficient SGD via gradient quantization and
          encoding", NeurIPS 2017. https://arxiv.org/abs/1610.02132, section 3.1
          Koloskova et al., "Decentralized stochastic optimization and gossip algorithms with
          compressed communication", ICML 2019. https://arxiv.org/abs/1902.00340 (biased)
Formula:  C(x)_i = norm * sign(x_i) * q_i / levels;  q_i = floor(levels * |x_i| / norm + u_i)
          biased: C(x) / (1 + omega);  omega = min(b / levels^2, sqrt(b) / levels), b values
Wire:     norms    float32[buckets]
          codes    ceil(log2(2 * levels + 1)) bits each, sign * q + levels
          total    4 * buckets + ceil(m * bits / 8) bytes
Traits:   unbiased, E|x - C(x)|^2 <= omega |x|^2, so a contraction when bucket < levels^2;
          biased: contraction E|x - C(x)|^2 <= omega / (1 + omega) |x|^2
Differs:  codes have a fixed width instead of Elias coding, so that sizes are known beforehand.
          A norm beyond float32 is clamped to its largest number, which stays unbiased.
Spec:     qsgd, qsgd(levels=7, bucket=None), qsgd(biased=True)
"""

import torch
from torch import Tensor

from gradwire.codecs.stage import Quantizer
from gradwire.core import Key, Traits, check_argument, is_count, register
from gradwire.core.layout import Flat
from gradwire.kernels import quantize
from gradwire.kernels.bits import packed_bytes
from gradwire.kernels.groups import num_blocks

_MOST_LEVELS = 65535  # beyond that, 24 random bits no longer resolve the fraction


@register("qsgd", kind="quantizer")
class QSGD(Quantizer):
    """Random rounding to ``levels`` steps of a norm; a smaller ``bucket`` has more norms and less noise."""

    examples = ("qsgd", "qsgd(levels=7, bucket=None)", "qsgd(biased=True)")
    takes_scattered = True
    levels: int = 127
    bucket: int | None = 512
    biased: bool = False

    def __post_init__(self) -> None:
        countable = is_count(self.levels) and self.levels <= _MOST_LEVELS
        check_argument(self, "levels", countable, f"a whole number from 1 to {_MOST_LEVELS}, for example 127")
        whole = "a whole number from 1, for example 512, or None for whole segments"
        check_argument(self, "bucket", self.bucket is None or is_count(self.bucket), whole)

    @property
    def bits(self) -> int:
        """The width of a code: it has 2 * levels + 1 values."""
        return (2 * self.levels).bit_length()

    def size(self, lengths: tuple[int, ...]) -> int:
        return 4 * num_blocks(lengths, self.bucket) + packed_bytes(sum(lengths), self.bits)

    def encode(self, values: Flat, lengths: Tensor, names: tuple[str, ...], key: Key) -> Tensor:
        return quantize.qsgd_encode(values, lengths, names, key.fold("quantize"), self.levels, self.bucket)

    def decode(self, data: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key) -> Tensor:
        return quantize.qsgd_decode(data, lengths, self.levels, self.bucket, self.biased)

    def decode_into(self, data: Tensor, lengths: Tensor, out: Flat) -> Tensor:
        return quantize.qsgd_decode(data, lengths, self.levels, self.bucket, self.biased, out)

    def has_nonfinite(self, data: Tensor, lengths: tuple[int, ...]) -> Tensor:
        norms = data[: 4 * num_blocks(lengths, self.bucket)].view(torch.float32)  # a message begins where floats may
        return (
            ~torch.isfinite(torch.linalg.vector_norm(norms, torch.inf)) if norms.numel() else norms.new_zeros(()).bool()
        )

    @property
    def traits(self) -> Traits:
        quiet = self.bucket is not None and self.bucket < self.levels**2  # omega < 1
        return Traits(unbiased=not self.biased, contraction=self.biased or quiet)
