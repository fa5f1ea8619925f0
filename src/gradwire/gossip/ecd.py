"""ECD-PSGD: neighbors extrapolate each other's models from compressed messages of ever more weight.

Paper:    Tang et al., "Communication compression for decentralized training", NeurIPS 2018.
          https://arxiv.org/abs/1803.06443, Algorithm 2
Formula:  x' = sum_j w_ij xhat_j + (y_i - x_i), y_i: x_i after the optimizer's step;  z_i = (1 - t/2) x_i + (t/2) x';
          xhat_i = (1 - 2/t) xhat_i + (2/t) C(z_i);  x_i = x';  t = 1, 2, ...
Wire:     one message of the codec to each neighbor
Traits:   unbiased codecs; others by allow_biased=True. Static symmetric graphs; two more vectors. Errors of the codec
          are relative to z, which grows with t, so it needs codecs of little noise
Differs:  sum_j w_ij xhat_j is kept as one vector, not one by one; all entries follow the formula, also those that a
          selector left out
Spec:     ecd(ring), ecd(ring, allow_biased=True)
"""

from typing import ClassVar

import torch
from torch import Tensor

from gradwire.codecs.stage import Memory
from gradwire.core.registry import register
from gradwire.gossip.broadcast import NeighborMessages
from gradwire.gossip.gossip import MixResult
from gradwire.gossip.unbiased import UnbiasedMethod


@register("ecd", kind="gossip")
class ECD(UnbiasedMethod):
    """Extrapolation compression."""

    examples: ClassVar[tuple[str, ...]] = ("ecd(ring)", "ecd(ring, allow_biased=True)")
    memories: ClassVar[tuple[str, ...]] = ("before", "mixed")

    def message(self, x: Tensor, memory: Memory, step: int) -> Tensor:
        t = step + 1
        return (1 - t / 2) * memory["before"] + (t / 2) * _after(x, memory)

    def update(self, x: Tensor, memory: Memory, messages: NeighborMessages, step: int) -> MixResult:
        t, after = step + 1, _after(x, memory)
        mixed = (1 - 2 / t) * memory["mixed"] + (2 / t) * messages.added_to(torch.zeros_like(x))
        return MixResult(after, {**memory, "before": after, "mixed": mixed})


def _after(x: Tensor, memory: Memory) -> Tensor:
    return memory["mixed"] + (x - memory["before"])
