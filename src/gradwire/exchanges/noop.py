"""No exchange at all: each rank keeps its own decoded message.

Paper:    none; the head-room analysis of torch's own `noop_hook`
Formula:  mean = decode(encode(x)), on each rank its own
Wire:     nothing
Traits:   not exact; ranks drift apart, so measure with it, never train with it
Differs:  compression still runs, so that what remains is the step without its network
Spec:     noop
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from gradwire.codecs.codec import Codec
from gradwire.core.payload import Payload
from gradwire.core.registry import register
from gradwire.core.requests import CommGenerator, Request
from gradwire.core.segments import Segments
from gradwire.exchanges.exchange import Aggregate, CommContext, Exchange, Message


@register("noop", kind="exchange")
@dataclass(frozen=True)
class Noop(Exchange):
    """Talk to nobody."""

    examples: ClassVar[tuple[str, ...]] = ("noop",)
    silent: ClassVar[bool] = True

    def talk(self, said: Message, codec: Codec, around: CommContext) -> CommGenerator[Aggregate]:
        assert isinstance(said.message, Payload)
        silence: Iterator[Request] = iter(())
        yield from silence
        return Aggregate(codec.decode(said.message, around.units, around.key), said.memory)

    def traffic(self, codec: Codec, units: Segments, world: int) -> float:
        return 0.0
