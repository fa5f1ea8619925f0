"""All-gather: every rank receives all payloads and adds them up.

Paper:    the exchange of Lin et al. (DGC, ICLR 2018) and of most sparse methods
Formula:  mean = sum over ranks of decode(payload_r) / N, added in rank order
Wire:     N-1 payloads sent and received by each rank: grows with N
Traits:   exact; any codec; all ranks hold the same bits
Differs:  as in the paper
Spec:     allgather
"""

from dataclasses import dataclass
from typing import ClassVar

from gradwire.codecs.codec import Codec
from gradwire.codecs.stage import Decoded, Memory
from gradwire.core.decode_cache import memoized
from gradwire.core.payload import Payload
from gradwire.core.registry import register
from gradwire.core.requests import CommGenerator, Gather
from gradwire.core.segments import Segments
from gradwire.exchanges.batch import RankBatch, Simulated, blank, mean_of, sizes_of, stacked, starts_of
from gradwire.exchanges.exchange import Aggregate, CommContext, Exchange, Message


@register("allgather", kind="exchange")
@dataclass(frozen=True)
class AllGather(Exchange):
    """Gather payloads, decode all, take the mean."""

    examples: ClassVar[tuple[str, ...]] = ("allgather",)
    exact: ClassVar[bool] = True

    def run(self, message: Message, codec: Codec, context: CommContext) -> CommGenerator[Aggregate]:
        assert isinstance(message.content, Payload)
        size = codec.size(context.units) if codec.traits.fixed else None
        payloads = yield Gather(message.content, size)
        keys = [context.key.of(rank) for rank in range(context.world)]
        sparse = context.allow_sparse_result and codec.decoder.is_sparse(context.units, context.world)
        decode = codec.decoder.entries if sparse else codec.decoder.mean
        facts = codec, context.units, context.key.step, sparse
        mean = memoized([x.data for x in payloads], facts, lambda: decode(payloads, context.units, keys))
        return Aggregate(mean, message.memory)

    def simulate(self, sent: Decoded, memory: Memory, codec: Codec, batch: RankBatch) -> Simulated:
        starts = starts_of(codec, sent, stacked(batch.units, batch.world))
        mean = mean_of(sent, starts, batch.units.total, batch.world)
        if not codec.traits.fixed:
            return mean, memory, sizes_of(codec, sent, starts, batch)
        n = codec.size(batch.units)
        return mean, memory, [[Gather(blank(n), n)] * batch.world]

    def traffic(self, codec: Codec, units: Segments, world: int) -> float:
        return (world - 1) * codec.size(units)
