"""All-gather: every rank receives all payloads and adds them up.

Paper:    the exchange of Lin et al. (DGC, ICLR 2018) and of most sparse methods
Formula:  mean = sum over ranks of decode(payload_r) / N, added in rank order
Wire:     N-1 payloads sent and received by each rank: grows with N
Traits:   exact; any codec; all ranks hold the same bits
Differs:  as in the paper
Spec:     allgather
"""

from torch import Tensor

from gradwire.codecs.codec import Codec
from gradwire.codecs.decoding import Entries
from gradwire.codecs.stage import Decoded, Memory
from gradwire.core.decode_cache import memoized, shares_decoded
from gradwire.core.payload import Payload
from gradwire.core.registry import register
from gradwire.core.requests import CommGenerator, Gather
from gradwire.core.segments import Segments
from gradwire.exchanges.batch import RankBatch, Simulated, blank, sizes_of, stacked, starts_of
from gradwire.exchanges.exchange import Aggregate, CommContext, Exchange, Message
from gradwire.kernels.rank_mean import rank_mean


@register("allgather", kind="exchange")
class AllGather(Exchange):
    """Gather payloads, decode all, take the mean."""

    examples = ("allgather",)
    exact = True

    def run(self, message: Message, codec: Codec, context: CommContext) -> CommGenerator[Aggregate]:
        assert isinstance(message.content, Payload)
        size = codec.size(context.units) if codec.traits.fixed else None
        payloads = yield Gather(message.content, size)
        keys = [context.key.of(rank) for rank in range(context.world)]
        sparse = context.allow_sparse_result and codec.decoder.is_sparse(context.units, context.world)
        facts = codec, context.units, context.key.step, sparse
        out = None if shares_decoded() else context.out

        def decode() -> Tensor | Entries:
            if sparse:
                return codec.decoder.entries(payloads, context.units, keys)
            return codec.decoder.mean(payloads, context.units, keys, out)

        mean = memoized([x.data for x in payloads], facts, decode)
        return Aggregate(mean, message.memory)

    def simulate(self, sent: Decoded, memory: Memory, codec: Codec, batch: RankBatch) -> Simulated:
        starts = starts_of(codec, sent, stacked(batch.units, batch.world))
        mean = rank_mean(sent.values, sent.indices, starts, batch.units.total, batch.world)
        if not codec.traits.fixed:
            return mean, memory, sizes_of(codec, sent, starts, batch)
        n = codec.size(batch.units)
        return mean, memory, [[Gather(blank(n), n)] * batch.world]

    def traffic(self, codec: Codec, units: Segments, world: int) -> float:
        return (world - 1) * codec.size(units)
