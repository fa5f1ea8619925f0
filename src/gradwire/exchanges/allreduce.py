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
from torch import Tensor

from gradwire.codecs.codec import Codec
from gradwire.codecs.stage import Decoded, EncodeInput, Memory
from gradwire.core.payload import Payload
from gradwire.core.registry import register
from gradwire.core.requests import CommGenerator, Request, Sum
from gradwire.core.segments import Segments
from gradwire.exchanges.batch import META, RankBatch, Simulated
from gradwire.exchanges.exchange import Aggregate, CommContext, Exchange, Message
from gradwire.kernels.groups import over, over_
from gradwire.kernels.quantize import cast_decode


@register("allreduce", kind="exchange")
@dataclass(frozen=True)
class AllReduce(Exchange):
    """Sum linear payloads."""

    examples: ClassVar[tuple[str, ...]] = ("allreduce",)
    exact: ClassVar[bool] = True
    simulates = True

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

    def clipped(self, sent: Decoded, codec: Codec, world: int) -> Decoded:
        return sent._replace(values=_addends(codec, sent, world).float())

    def simulate(self, sent: Decoded, memory: Memory, codec: Codec, batch: RankBatch) -> Simulated:
        rows = _addends(codec, sent, batch.world).view(batch.world, -1)
        total = rows[0].clone()
        for row in rows[1:]:
            total = total + row
        mean = codec.expand(over(total.float(), batch.world), batch.units, batch.key.of(0))
        addend: Request = Sum(torch.empty_like(rows[0], device=META))
        return mean, memory, [[addend] * batch.world]

    def traffic(self, codec: Codec, units: Segments, world: int) -> float:
        return 2 * (world - 1) / world * codec.size(units)


def _addends(codec: Codec, sent: Decoded, world: int) -> Tensor:
    """What ranks add up: the values in the format that they are sent in, limited."""
    dtype: torch.dtype = codec.quantizer.dtype  # type: ignore[attr-defined]
    limit = max_addend(dtype, world)
    return sent.values.to(dtype).clamp(-limit, limit)


def max_addend(dtype: torch.dtype, world: int) -> float:
    """The largest magnitude of which ``world`` may be added in ``dtype``, in any order, without overflow."""
    info = torch.finfo(dtype)
    # Each addition rounds up by eps/2 at most; and as soon as that matters more than the summand, sums cease to grow.
    growth = min(2.0, (1 + info.eps) ** world)
    return info.max / world / growth
