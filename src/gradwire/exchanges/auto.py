"""Auto: the exchange that fits the codec and sends least at this world size.

Paper:    none; a choice, not a method
Formula:  of all exchanges that suit the codec, the one that sends least: allreduce where payloads can be added; two_way
          for codecs of fixed length that select nothing; allgather for any
Wire:     as the exchange chosen
Traits:   as the exchange chosen
Differs:  no paper to differ from
Spec:     auto
"""

from gradwire.codecs import Codec
from gradwire.core import CommGenerator, Segments, register, registered
from gradwire.exchanges.exchange import Aggregate, CommContext, Exchange, Message


def choose(codec: Codec, units: Segments, world: int) -> Exchange:
    """Of all exchanges that suit the codec, the one that sends least; among equals one that adds, then one leg."""
    every = [made() for made in registered("exchange").values() if getattr(made, "auto_may_choose", None) is not None]
    suited = [
        x for x in every if isinstance(x, Exchange) and x.auto_may_choose is not None and x.auto_may_choose(codec)
    ]
    return min(suited, key=lambda x: (x.traffic(codec, units, world), not x.adds_payloads, x.sends_slices, x.name))


@register("auto", kind="exchange")
class Auto(Exchange):
    """The exchange that sends least; a plan replaces this by what `choose` returns."""

    examples = ("auto",)

    def run(self, message: Message, codec: Codec, context: CommContext) -> CommGenerator[Aggregate]:
        raise AssertionError("a plan resolves auto before it runs")

    def traffic(self, codec: Codec, units: Segments, world: int) -> float:
        return choose(codec, units, world).traffic(codec, units, world)
