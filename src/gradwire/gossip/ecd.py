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

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.codecs.codec import Codec
from gradwire.codecs.stage import Memory, StateSpec
from gradwire.core.registry import register
from gradwire.gossip.broadcast import BroadcastMethod, Heard
from gradwire.gossip.dcd import need_unbiased
from gradwire.gossip.gossip import GossipContext, MixResult, need_symmetric
from gradwire.topology import Graph, Topology


@register("ecd", kind="gossip")
@dataclass(frozen=True)
class ECD(BroadcastMethod):
    """Extrapolation compression.

    Attributes:
        graph: Who talks to whom.
        allow_biased: Whether to run with codecs that the analysis does not cover.
    """

    graph: Graph
    allow_biased: bool = False
    examples: ClassVar[tuple[str, ...]] = ("ecd(ring)", "ecd(ring, allow_biased=True)")
    overlaps: ClassVar[bool] = False

    def check(self, codec: Codec, topology: Topology) -> None:
        need_unbiased(self, codec, self.allow_biased)
        need_symmetric(self, topology)

    def slots(self, around: GossipContext) -> dict[str, StateSpec]:
        like = StateSpec(around.tensors.lengths)
        return {"before": like, "mixed": like}

    def begin(self, common: Tensor, codec: Codec, around: GossipContext) -> dict[str, Tensor]:
        return {name: common.clone() for name in self.slots(around)}

    def words(self, x: Tensor, memory: Memory, step: int) -> Tensor:
        t = step + 1
        return (1 - t / 2) * memory["before"] + (t / 2) * _after(x, memory)

    def learn(self, x: Tensor, memory: Memory, heard: Heard, step: int) -> MixResult:
        t, after = step + 1, _after(x, memory)
        mixed = (1 - 2 / t) * memory["mixed"] + (2 / t) * heard.onto(torch.zeros_like(x))
        return MixResult(after, {**memory, "before": after, "mixed": mixed})


def _after(x: Tensor, memory: Memory) -> Tensor:
    return memory["mixed"] + (x - memory["before"])
