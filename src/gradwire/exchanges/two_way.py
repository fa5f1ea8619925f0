"""Two-way: compressed up and compressed down, each rank the server of one slice.

Paper:    Tang et al., "DoubleSqueeze: parallel stochastic gradient descent with double-pass error-compensated
          compression", ICML 2019. https://arxiv.org/abs/1905.05957, Algorithm 1, with the server spread over the ranks
Formula:  leg 1:  rank p receives C(x_r[p]) of every rank r;  m = sum_r C(x_r[p]) / N + d
          leg 2:  all receive C(m);  d = m - C(m)
Wire:     2 (N-1)/N payloads sent by each rank, whatever N
Traits:   exact; codecs of fixed length; error feedback on both legs where the lane has feedback
Differs:  slices begin at multiples of eight entries; segments that straddle two are cut, each part with its own scale
          and budget
Spec:     two_way
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradwire.codecs import Codec, Decoded, EncodeInput, Memory, StateSpec
from gradwire.core import (
    CommGenerator,
    CorruptMessageError,
    Gather,
    Key,
    Payload,
    Request,
    Segments,
    SendRecv,
    by_rank,
    register,
)
from gradwire.core.decode_cache import memoized, shares_decoded
from gradwire.core.layout import Flat
from gradwire.exchanges.batch import RankBatch, Simulated, blank, stacked, starts_of
from gradwire.exchanges.exchange import Aggregate, CommContext, Exchange, Message, ProductOutput
from gradwire.exchanges.servers import SERVER_ERROR, server_slice
from gradwire.kernels.rank_mean import rank_mean


@register("two_way", kind="exchange")
class TwoWay(Exchange):
    """All-to-all of encoded slices, sum in float32, encode again, all-gather."""

    examples = ("two_way",)
    exact = True
    sends_slices = keeps_server_error = True
    takes_scattered = True

    def auto_may_choose(self, codec: Codec) -> bool:
        """Selected entries are never sent the second leg.

        The union of N selections is not sparse as one is, so cutting it again would lose what DGC and methods like it
        rely upon.
        """
        return codec.selector is None and codec.traits.fixed

    def check(self, codec: Codec) -> None:
        if not codec.traits.fixed:
            raise ValueError(
                f"two_way needs messages of known length, but those of {codec} vary; "
                "use int32 or bitmap indices and a selector of fixed count, or exchange='allgather'"
            )
        if codec.memories:
            raise ValueError(f"two_way encodes twice, but {codec} remembers what it sent; use allgather")

    def state_specs(self, context: CommContext) -> dict[str, StateSpec]:
        return {SERVER_ERROR: StateSpec(context.tensors.lengths, "shard")} if context.keeps_error else {}

    def run(self, message: Message, codec: Codec, context: CommContext) -> CommGenerator[Aggregate]:
        assert isinstance(message.content, Mapping)
        n, world, me = context.units.total, context.world, context.key.rank
        windows = [context.units.window(*server_slice(n, world, rank)) for rank in range(world)]
        sizes = [codec.size(window) for window in windows]

        # Leg 1: receive this rank's slice of all ranks.
        received = yield SendRecv(message.content, {rank: sizes[me] for rank in range(world)})
        keys = [context.key.of(rank) for rank in range(world)]
        error = message.memory[SERVER_ERROR] if context.keeps_error else None

        # Leg 2: send the mean to all ranks.
        second = context.key.fold("leg2")
        corrupt: CorruptMessageError | None = None
        try:
            payload, error = codec.decoder.merge(
                [received[rank] for rank in range(world)], error, windows[me], keys, second, context.server_error
            )
        except CorruptMessageError as failure:  # other ranks still wait for the second leg
            payload, corrupt = Payload(received[me].data.new_zeros(sizes[me])), failure
        memory = message.memory if error is None else {**message.memory, SERVER_ERROR: error}
        means = yield Gather(payload, max(sizes))
        if corrupt is not None:
            raise corrupt

        seconds = [second.of(rank) for rank in range(world)]
        out = context.scattered if context.out is None else context.out
        if out is not None and not shares_decoded():
            return self._decode_into(out, means, windows, seconds, codec, context.product, memory)

        def decode() -> Tensor:
            return torch.cat([codec.decode(*each) for each in zip(means, windows, seconds, strict=True)])

        return Aggregate(
            memoized([payload.data for payload in means], (codec, context.units, second.step), decode), memory
        )

    def _decode_into(
        self,
        out: Flat,
        means: Sequence[Payload],
        windows: Sequence[Segments],
        keys: Sequence[Key],
        codec: Codec,
        product: ProductOutput | None,
        memory: Memory,
    ) -> Aggregate:
        """Write all slices to where the mean may lie, and their product, if it is wanted, to where that may."""
        start = 0
        for payload, window, key in zip(means, windows, keys, strict=True):
            part = slice(start, start + window.total)
            start += window.total
            if product is not None:
                assert isinstance(out, Tensor)
                factor, times = product.factor[part], product.out[part]
                codec.decoder.decode_times(payload, window, key, out[part], factor, times)
            else:
                codec.decoder.write(payload, window, key, out[part])
        return Aggregate(out, memory, product=None if product is None else product.out)

    def simulate(self, sent: Decoded, memory: Memory, codec: Codec, batch: RankBatch) -> Simulated:
        """All slices at once: end to end they are the buffer."""
        n, world, units = batch.units.total, batch.world, batch.units
        cuts = tuple(server_slice(n, world, rank) for rank in range(world))
        starts = starts_of(codec, sent, stacked(units, world, cuts))
        target = rank_mean(sent.values, sent.indices, starts, n, world)
        error = memory.get(SERVER_ERROR) if batch.keeps_error else None
        if error is not None:
            target = target + error
        owned = by_rank([[units.window(*cut)] for cut in cuts])  # each slice named after the rank that serves it
        outcome = codec.encode(EncodeInput(target, target, {}, owned), batch.key.fold("leg2")).sent
        if error is not None:
            memory = {**memory, SERVER_ERROR: outcome.residual_of(target)}
        sizes = [codec.size(units.window(*cut)) for cut in cuts]
        out = {rank: blank(size) for rank, size in enumerate(sizes)}
        first: list[Request] = [SendRecv(out, dict.fromkeys(range(world), size)) for size in sizes]
        second: list[Request] = [Gather(blank(size), max(sizes)) for size in sizes]
        return outcome.add_to(target.new_zeros(n)), memory, [first, second]

    def traffic(self, codec: Codec, units: Segments, world: int) -> float:
        return 2 * (world - 1) / world * codec.size(units)
