"""Methods for unbiased codecs: copies of the neighbors' models, kept as one weighted sum, and no error feedback."""

from dataclasses import dataclass
from typing import ClassVar

from gradwire.codecs.codec import Codec
from gradwire.gossip.broadcast import BroadcastMethod
from gradwire.gossip.requirements import require_static_symmetric, require_unbiased
from gradwire.topology import Graph, Topology


@dataclass(frozen=True)
class UnbiasedMethod(BroadcastMethod):
    """What DCD and ECD have in common.

    Attributes:
        graph: Which ranks exchange messages.
        allow_biased: Whether to run with codecs that the analysis does not cover.
    """

    graph: Graph
    allow_biased: bool = False
    overlaps: ClassVar[bool] = False
    copies_parameters: ClassVar[bool] = True

    def check(self, codec: Codec, topology: Topology) -> None:
        require_unbiased(self, codec, self.allow_biased)
        require_static_symmetric(self, topology)
