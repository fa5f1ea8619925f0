"""Centralized: the mean of all models after every step, the baseline of gossip.

Paper:    none; for an optimizer that is linear in the gradient, as SGD with momentum is, it is all-reduce SGD
Formula:  x_i = sum_j x_j / n
Wire:     2 (n-1)/n models, float32 or cast to 16 bits, in one all-reduce
Traits:   casts; no graph; no memory; all ranks hold the same bits
Differs:  averages models where all-reduce SGD averages gradients
Spec:     centralized
"""

from torch import Tensor

from gradwire.codecs import Codec, Memory
from gradwire.codecs.addends import as_addend
from gradwire.core import CommGenerator, Sum, register
from gradwire.gossip.gossip import MixResult, VectorMemory, encode_message
from gradwire.gossip.message import Diverged, GossipContext
from gradwire.gossip.requirements import require_cast
from gradwire.topology import Graph, Topology
from gradwire.topology.graphs import Complete


@register("centralized", kind="gossip")
class Centralized(VectorMemory):
    """All-reduce SGD."""

    graph: Graph = Complete()
    examples = ("centralized",)
    all_reduces = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.graph != Complete():
            raise ValueError(f"centralized takes the mean of all ranks, and no graph like {self.graph}; use dpsgd")

    def check(self, codec: Codec, topology: Topology) -> None:
        require_cast(self, codec)

    def mix(self, x: Tensor, memory: Memory, codec: Codec, context: GossipContext) -> CommGenerator[MixResult]:
        addend = as_addend(codec, encode_message(x, codec, context).payload)
        total = yield Sum(addend * float("nan") if context.nonfinite else addend)  # so that all ranks see it
        mean = codec.decoder.expand(total, context.units, context.key).float() / context.topology.size
        if not bool(mean.isfinite().all()):
            raise Diverged(
                f"the mean of all parameters is not finite at step {context.key.step}; lower the learning rate"
            )
        return MixResult(mean, memory)
