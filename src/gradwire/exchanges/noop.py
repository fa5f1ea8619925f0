"""No exchange at all: each rank keeps its own decoded message.

Paper:    none; the head-room analysis of torch's own `noop_hook`
Formula:  mean = decode(encode(x)), on each rank its own
Wire:     nothing
Traits:   not exact; ranks drift apart, so measure with it, never train with it
Differs:  compression still runs, so that what remains is the step without its network
Spec:     noop
"""

from collections.abc import Iterator

from gradwire.codecs import Codec
from gradwire.core import CommGenerator, Payload, Request, Segments, register
from gradwire.exchanges.exchange import Aggregate, CommContext, Exchange, Message


@register("noop", kind="exchange")
class Noop(Exchange):
    """Send nothing."""

    examples = ("noop",)
    local_only = True

    def run(self, message: Message, codec: Codec, context: CommContext) -> CommGenerator[Aggregate]:
        assert isinstance(message.content, Payload)
        no_requests: Iterator[Request] = iter(())
        yield from no_requests
        return Aggregate(codec.decode(message.content, context.units, context.key), message.memory)

    def traffic(self, codec: Codec, units: Segments, world: int) -> float:
        return 0.0
