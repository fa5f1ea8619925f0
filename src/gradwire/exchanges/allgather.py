"""All-gather: every rank receives all payloads and adds them up.

Paper:    the exchange of Lin et al. (DGC, ICLR 2018) and of most sparse methods
Formula:  mean = sum over ranks of decode(payload_r) / N, added in rank order
          mean='senders': an entry's sum is divided by how many ranks sent it, not by N
Wire:     N-1 payloads sent and received by each rank: grows with N
Traits:   exact; any codec; all ranks hold the same bits
Differs:  as in the paper; the mean over senders is that of SparseLoCo (Sarfi et al. 2025, arXiv 2508.15706). What
          was sent plus what is owed is still what was put in, rank by rank, but the mean of errors is no longer the
          pending update
Spec:     allgather, allgather(mean='senders')
"""

from torch import Tensor

from gradwire.codecs import Codec, Decoded, Entries, Memory
from gradwire.core import CommGenerator, Gather, Payload, Segments, check_argument, register
from gradwire.core.decode_cache import memoized, shares_decoded
from gradwire.exchanges.batch import RankBatch, Simulated, blank, sizes_of, stacked, starts_of
from gradwire.exchanges.exchange import Aggregate, CommContext, Exchange, Message
from gradwire.kernels.rank_mean import rank_mean, senders_mean


@register("allgather", kind="exchange")
class AllGather(Exchange):
    """Gather payloads, decode all, take the mean.

    Attributes:
        mean: Over ``all`` ranks, or over the ``senders`` of each entry.
    """

    mean: str = "all"
    examples = ("allgather", "allgather(mean='senders')")
    exact = True
    takes_scattered = True

    def __post_init__(self) -> None:
        check_argument(self, "mean", self.mean in ("all", "senders"), "'all' or 'senders'")

    def auto_may_choose(self, codec: Codec) -> bool:
        return True

    def check(self, codec: Codec) -> None:
        if self.mean == "senders" and codec.selector is not None and codec.transform is not None:
            raise ValueError(f"after {codec.transform} every rank sends all entries; leave it out, or use mean='all'")

    def run(self, message: Message, codec: Codec, context: CommContext) -> CommGenerator[Aggregate]:
        assert isinstance(message.content, Payload)
        answer = yield Gather(message.content, codec.fixed_size(context.units))
        payloads = [payload for payload in answer if payload is not None]
        keys = [context.key.of(rank) for rank, payload in enumerate(answer) if payload is not None]
        senders = self.mean == "senders" and codec.selector is not None
        sparse = not senders and context.allow_sparse_result and codec.decoder.is_sparse(context.units, context.world)
        facts = codec, context.units, context.key.step, sparse, senders
        out = None if shares_decoded() else context.out
        if context.scattered is not None and len(payloads) == 1 and not (sparse or senders or shares_decoded()):
            codec.decoder.write(payloads[0], context.units, keys[0], context.scattered)
            return Aggregate(context.scattered, message.memory)

        def decode() -> Tensor | Entries:
            if senders:
                return codec.decoder.entries(payloads, context.units, keys).mean_of_senders(context.units.total)
            if sparse:
                return codec.decoder.entries(payloads, context.units, keys)
            return codec.decoder.mean(payloads, context.units, keys, out)

        mean = memoized([x.data for x in payloads], facts, decode)
        return Aggregate(mean, message.memory)

    def simulate(self, sent: Decoded, memory: Memory, codec: Codec, batch: RankBatch) -> Simulated:
        starts = starts_of(codec, sent, stacked(batch.units, batch.world))
        if self.mean == "senders" and sent.indices is not None:
            mean = senders_mean(sent.values, sent.indices, starts, batch.units.total, batch.world)
        else:
            mean = rank_mean(sent.values, sent.indices, starts, batch.units.total, batch.world)
        if not codec.traits.fixed:
            return mean, memory, sizes_of(codec, sent, starts, batch)
        n = codec.size(batch.units)
        return mean, memory, [[Gather(blank(n), n)] * batch.world]

    def traffic(self, codec: Codec, units: Segments, world: int) -> float:
        return (world - 1) * codec.size(units)
