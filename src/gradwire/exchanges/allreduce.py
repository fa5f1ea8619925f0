"""All-reduce: add payloads on the way.

Paper:    Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009
Formula:  mean = decode(sum over ranks of encode(x_r)) / N
Wire:     2 (N-1)/N payloads sent by each rank, whatever N
Traits:   exact; linear codecs only
Differs:  summands are limited to 1/N of their format's range, less what sums may gain by rounding, so that the sum
          stays finite; the excess is debt
Spec:     allreduce
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from gradwire.codecs.codec import Codec
from gradwire.codecs.stage import EncodeInput
from gradwire.core.payload import Payload
from gradwire.core.registry import register
from gradwire.core.requests import CommGenerator, Sum
from gradwire.core.segments import Segments
from gradwire.exchanges.exchange import Aggregate, CommContext, Exchange, Message
from gradwire.kernels.groups import over_
from gradwire.kernels.quantize import cast_decode


@register("allreduce", kind="exchange")
@dataclass(frozen=True)
class AllReduce(Exchange):
    """Sum linear payloads."""

    examples: ClassVar[tuple[str, ...]] = ("allreduce",)
    exact: ClassVar[bool] = True

    def check(self, codec: Codec) -> None:
        if not codec.traits.linear:
            raise ValueError(
                f"allreduce adds payloads, but those of {codec} cannot be added; "
                "use exchange='allgather', 'two_way' or 'auto'"
            )

    def encode(self, signal: EncodeInput, codec: Codec, around: CommContext) -> Message:
        limit = max_addend(codec.quantizer.dtype, around.world)  # type: ignore[attr-defined]
        if around.listens:
            return Message(*codec.bound(codec.encode(signal, around.key), limit, around.units, around.key))
        payload, memory = codec.message(signal, around.key)
        return Message(codec.clamped(payload, limit), None, memory)

    def talk(self, said: Message, codec: Codec, around: CommContext) -> CommGenerator[Aggregate]:
        assert isinstance(said.message, Payload)
        total = yield Sum(codec.summand(said.message))
        mean = over_(cast_decode(total), around.world)
        return Aggregate(codec.expand(mean, around.units, around.key), said.memory)

    def traffic(self, codec: Codec, units: Segments, world: int) -> float:
        return 2 * (world - 1) / world * codec.size(units)


def max_addend(dtype: torch.dtype, world: int) -> float:
    """The largest magnitude of which ``world`` may be added in ``dtype``, in any order, without overflow."""
    info = torch.finfo(dtype)
    # Each addition rounds up by eps/2 at most; and as soon as that matters more than the summand, sums cease to grow.
    growth = min(2.0, (1 + info.eps) ** world)
    return info.max / world / growth
