"""Auto: the exchange that fits the codec and sends least at this world size.

Paper:    none; a choice, not a method
Formula:  allreduce where payloads can be added; else, of allgather and two_way, the one that sends least, two_way only
          for codecs of fixed length that select nothing
Wire:     as the exchange chosen
Traits:   as the exchange chosen
Differs:  no paper to differ from
Spec:     auto
"""

from gradwire.codecs.codec import Codec
from gradwire.core.registry import register
from gradwire.core.requests import CommGenerator
from gradwire.core.segments import Segments
from gradwire.exchanges.allgather import AllGather
from gradwire.exchanges.allreduce import AllReduce
from gradwire.exchanges.exchange import Aggregate, CommContext, Exchange, Message
from gradwire.exchanges.two_way import TwoWay


def choose(codec: Codec, units: Segments, world: int) -> Exchange:
    """Add where payloads can be added; else gather, unless the two legs of `two_way` are shorter.

    Selected entries are never sent the second leg: the union of N selections is not sparse as one is, so cutting it
    again would lose what DGC and methods like it rely upon.
    """
    if codec.traits.linear:
        return AllReduce()
    if codec.selector is None and codec.traits.fixed:
        return min((AllGather(), TwoWay()), key=lambda exchange: exchange.traffic(codec, units, world))
    return AllGather()


@register("auto", kind="exchange")
class Auto(Exchange):
    """A request to `choose`; a plan replaces it before it runs."""

    examples = ("auto",)

    def run(self, message: Message, codec: Codec, context: CommContext) -> CommGenerator[Aggregate]:
        raise AssertionError("a plan resolves auto before it runs")

    def traffic(self, codec: Codec, units: Segments, world: int) -> float:
        return choose(codec, units, world).traffic(codec, units, world)
