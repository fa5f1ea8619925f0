"""Centralized: the mean of all models after every step, the twin that gossip is measured against.

Paper:    none; for an optimizer that is linear in the gradient, as SGD with momentum is, it is all-reduce SGD
Formula:  x_i = sum_j x_j / n
Wire:     2 (n-1)/n models, float32 or cast to 16 bits, in one all-reduce
Traits:   casts; no graph; no memory; all ranks hold the same bits
Differs:  averages models where all-reduce SGD averages gradients
Spec:     centralized
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradwire.codecs.codec import Codec
from gradwire.codecs.stage import Memory
from gradwire.core.registry import register
from gradwire.core.requests import CommGenerator, Sum
from gradwire.gossip.gossip import Gossip, GossipContext, MixResult, need_cast, say
from gradwire.gossip.message import Diverged
from gradwire.topology import Graph, Topology
from gradwire.topology.graphs import Complete


@register("centralized", kind="gossip")
@dataclass(frozen=True)
class Centralized(Gossip):
    """All-reduce SGD."""

    graph: Graph = Complete()  # noqa: RUF009 - a frozen value
    examples: ClassVar[tuple[str, ...]] = ("centralized",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.graph != Complete():
            raise ValueError(f"centralized takes the mean of all ranks, and no graph like {self.graph}; use dpsgd")

    def check(self, codec: Codec, topology: Topology) -> None:
        need_cast(self, codec)

    def uncompressed(self, elements: int, degree: int, world: int) -> float:
        del degree
        return 4.0 * elements * 2 * (world - 1) / world

    def talk(self, x: Tensor, memory: Memory, codec: Codec, around: GossipContext) -> CommGenerator[MixResult]:
        said = codec.summand(say(x, codec, around).payload)
        total = yield Sum(said * float("nan") if around.broken else said)  # all ranks hear of a broken one in the sum
        mean = codec.expand(total, around.units, around.key).float() / around.topology.size
        if not bool(mean.isfinite().all()):
            raise Diverged(
                f"the mean of all parameters is not finite at step {around.key.step}; lower the learning rate"
            )
        return MixResult(mean, memory)
