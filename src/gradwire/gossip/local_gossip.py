"""Local gossip: steps by oneself, then a round of any gossip method.

Paper:    Koloskova et al., "A unified theory of decentralized SGD with changing topology and local updates", ICML 2020.
          https://arxiv.org/abs/2003.10422
Formula:  x_i = H local steps from x_i;  x_i = a round of the method
Wire:     as the method, once in H steps
Traits:   as the method's; H - 1 of H steps send nothing
Differs:  graphs that change do so from round to round, not from step to step; random bits follow rounds, too
Spec:     local_gossip(choco(ring), H=15), local_gossip(dpsgd(one_peer_exponential), H=5)
"""

from dataclasses import field, replace

import torch
from torch import Tensor

from gradwire.codecs import Codec, Memory, StateSpec
from gradwire.core import CommGenerator, check_argument, is_count, register
from gradwire.gossip.gossip import GossipMethod, MixResult, gossip_method
from gradwire.gossip.message import GossipContext
from gradwire.topology import Graph, Topology

_OF_METHOD = ("compresses", "overlaps", "all_reduces", "iterations")
NONFINITE_MEMORY = "nonfinite"  # is there if parameters have not been finite since the last round


@register("local_gossip", kind="gossip")
class LocalGossip(GossipMethod):
    """A round of another method every ``H`` steps.

    Attributes:
        method: The other one.
        H: Local steps of a round.
    """

    graph: Graph = field(init=False, compare=False)
    method: GossipMethod
    H: int = 15
    examples = ("local_gossip(choco(ring), H=15)", "local_gossip(dpsgd(ring), H=5)")

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", gossip_method(self.method))
        object.__setattr__(self, "graph", self.method.graph)
        check_argument(self, "H", is_count(self.H), "a whole number of steps from 1")
        for name in _OF_METHOD:
            object.__setattr__(self, name, getattr(self.method, name))

    def __str__(self) -> str:
        return f"{self.name}({self.method}, H={self.H})"

    def check(self, codec: Codec, topology: Topology) -> None:
        self.method.check(codec, topology)

    def mix(self, x: Tensor, memory: Memory, codec: Codec, context: GossipContext) -> CommGenerator[MixResult]:
        if (context.key.step + 1) % self.H:
            if context.nonfinite:  # the round will report it to all ranks at once
                memory = {**memory, NONFINITE_MEMORY: torch.ones(1)}
            return MixResult(x, memory)
        nonfinite = context.nonfinite or NONFINITE_MEMORY in memory
        return (yield from self.method.mix(x, memory, codec, self._round(context)._replace(nonfinite=nonfinite)))

    def _round(self, context: GossipContext) -> GossipContext:
        """The context of the round that a step belongs to."""
        return context._replace(key=replace(context.key, step=context.key.step // self.H))

    def state_specs(self, context: GossipContext) -> dict[str, StateSpec]:
        return self.method.state_specs(self._round(context))

    def initial_memory(self, common: Tensor, codec: Codec, context: GossipContext) -> dict[str, Tensor]:
        return self.method.initial_memory(common, codec, self._round(context))
