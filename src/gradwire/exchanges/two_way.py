"""Two-way: compressed up and compressed down, each rank the server of one shard.

Paper:    Tang et al., "DoubleSqueeze: parallel stochastic gradient descent with double-pass error-compensated
          compression", ICML 2019. https://arxiv.org/abs/1905.05957, Algorithm 1, with the server spread over the ranks
Formula:  leg 1:  rank p hears C(x_r[p]) of every rank r;  m = sum_r C(x_r[p]) / N + d
          leg 2:  all hear C(m);  d = m - C(m)
Wire:     2 (N-1)/N payloads sent by each rank, whatever N
Traits:   exact; codecs of fixed length; error feedback on both legs where the lane has feedback
Differs:  shards begin at multiples of eight entries; segments that straddle two are cut, each part with its own scale
          and budget
Spec:     two_way
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.codecs.codec import Codec
from gradwire.codecs.stage import Decoded, EncodeInput, Memory, StateSpec
from gradwire.core.decode_cache import memoized
from gradwire.core.keys import owned
from gradwire.core.registry import register
from gradwire.core.requests import CommGenerator, Gather, Request, SendRecv
from gradwire.core.segments import Segments
from gradwire.exchanges.batch import RankBatch, Simulated, blank, mean_of, stacked, starts_of
from gradwire.exchanges.exchange import Aggregate, CommContext, EncodeShard, Exchange, Message

_EIGHT = 8  # codes of any width are whole bytes then, so that kernels serve a shard as it lies


def shard(n: int, world: int, rank: int) -> tuple[int, int]:
    """The stretch of an n-element buffer that a rank serves; the last ones may be short or empty."""
    each = -(-n // (world * _EIGHT)) * _EIGHT
    return min(rank * each, n), min((rank + 1) * each, n)


@register("two_way", kind="exchange")
@dataclass(frozen=True)
class TwoWay(Exchange):
    """All-to-all of encoded shards, sum in float32, encode again, all-gather."""

    examples: ClassVar[tuple[str, ...]] = ("two_way",)
    exact: ClassVar[bool] = True
    cuts = serves = simulates = True

    def check(self, codec: Codec) -> None:
        if not codec.traits.fixed:
            raise ValueError(
                f"two_way needs messages of known length, but those of {codec} vary; "
                "use int32 or bitmap indices and a selector of fixed count, or exchange='allgather'"
            )
        if codec.memories:
            raise ValueError(f"two_way encodes twice, but {codec} remembers what it sent; use allgather")

    def slots(self, around: CommContext) -> dict[str, StateSpec]:
        return {"served": StateSpec(around.tensors.lengths, "shard")} if around.indebted else {}

    def collect(self, say: EncodeShard, around: CommContext) -> Message:
        parts = [say(*shard(around.units.total, around.world, rank)) for rank in range(around.world)]
        message = {rank: part.payload for rank, part in enumerate(parts)}
        return Message(message, _join([part.sent for part in parts], around), parts[-1].memory)

    def talk(self, said: Message, codec: Codec, around: CommContext) -> CommGenerator[Aggregate]:
        assert isinstance(said.message, Mapping)
        n, world, me = around.units.total, around.world, around.key.rank
        windows = [around.units.window(*shard(n, world, rank)) for rank in range(world)]
        sizes = [codec.size(window) for window in windows]

        # Leg 1: hear everybody's version of my shard.
        heard = yield SendRecv(said.message, {rank: sizes[me] for rank in range(world)})
        keys = [around.key.of(rank) for rank in range(world)]
        debt = said.memory["served"] if around.indebted else None

        # Leg 2: tell everybody the outcome.
        second = around.key.fold("leg2")
        verdict, debt = codec.merge([heard[rank] for rank in range(world)], debt, windows[me], keys, second)
        memory = said.memory if debt is None else {**said.memory, "served": debt}
        told = yield Gather(verdict, max(sizes))

        def decode() -> Tensor:
            places = enumerate(zip(told, windows, strict=True))
            return torch.cat([codec.decode(payload, window, second.of(rank)) for rank, (payload, window) in places])

        return Aggregate(
            memoized([payload.data for payload in told], (codec, around.units, second.step), decode), memory
        )

    def simulate(self, sent: Decoded, memory: Memory, codec: Codec, batch: RankBatch) -> Simulated:
        """All shards at once: end to end they are the buffer."""
        n, world, units = batch.units.total, batch.world, batch.units
        cuts = tuple(shard(n, world, rank) for rank in range(world))
        meant = mean_of(sent, starts_of(codec, sent, stacked(units, world, cuts)), n, world)
        served = memory.get("served")
        if served is not None:
            meant = meant + served
        outcome = codec.echo(EncodeInput(meant, meant, {}, _by_owner(units, cuts)), batch.key.fold("leg2"))
        if served is not None:
            memory = {**memory, "served": outcome.off(meant)}
        sizes = [codec.size(units.window(*cut)) for cut in cuts]
        out = {rank: blank(size) for rank, size in enumerate(sizes)}
        first: list[Request] = [SendRecv(out, dict.fromkeys(range(world), size)) for size in sizes]
        second: list[Request] = [Gather(blank(size), max(sizes)) for size in sizes]
        return outcome.onto(meant.new_zeros(n)), memory, [first, second]

    def traffic(self, codec: Codec, units: Segments, world: int) -> float:
        return 2 * (world - 1) / world * codec.size(units)


def _by_owner(units: Segments, cuts: tuple[tuple[int, int], ...]) -> Segments:
    """The units of one buffer, cut into shards, each named after the rank that serves it."""
    tables = [units.window(*cut) for cut in cuts]
    names = [owned(name, rank) for rank, table in enumerate(tables) for name in table.names]
    return Segments(tuple(names), tuple(shape for table in tables for shape in table.shapes))


def _join(parts: list[Decoded | None], around: CommContext) -> Decoded | None:
    """What the parts say together."""
    values, indices = [], []
    for rank, part in enumerate(parts):
        if part is None:
            return None
        values.append(part.values)
        if part.indices is not None:
            indices.append(part.indices + shard(around.units.total, around.world, rank)[0])
    return Decoded(torch.cat(indices) if indices else None, torch.cat(values))
