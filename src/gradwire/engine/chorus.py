"""Chorus: the ranks of a lockstep in unison.

Ranks that live in one process do the same thing to buffers of the same shape. Laid end to end these are one buffer, in
which each rank's units have names of their own, so that a step takes as many kernels for all ranks as for one. Nothing
is written that nobody reads: the bytes of messages are counted, not made, wherever their number is known beforehand.
The outcome is that of `lockstep`, bit for bit: updates, memories and account. What a chorus cannot sing, it declines.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.codecs.codec import Codec
from gradwire.codecs.stage import Decoded, EncodeInput, IndexCoder, Memory
from gradwire.core.keys import PER_RANK, Key, owned
from gradwire.core.requests import Gather, Request, Sum
from gradwire.core.segments import Segments
from gradwire.engine.lane import OBSERVED, OWED, Lane, absorb
from gradwire.engine.lockstep import Lockstep
from gradwire.engine.lowering import FusedSpeaker, lowers
from gradwire.engine.session import Grads, Session, Verdict, censored, joined, nbytes
from gradwire.engine.tally import META, Agreed, blank, costs, two_rounds
from gradwire.exchanges import AllGather, AllReduce, Exchange, TwoWay
from gradwire.exchanges.allreduce import max_addend
from gradwire.exchanges.two_way import shard
from gradwire.feedback import Feedback
from gradwire.kernels.groups import over

SERVED = "served"


class Sizes(NamedTuple):
    """How long each rank's message is: bytes that are known, and those of its positions, which the device knows."""

    known: list[int]
    positions: Tensor | None  # int64[ranks]


class Sung(NamedTuple):
    """What became of one lane: its update, the memories of all ranks, and what each rank said in each round."""

    update: Tensor
    memory: Memory
    asks: list[list[Request]] | Sizes  # by round, then by rank; tensors without content. Sizes: of one gather


@dataclass
class Chorus:
    """Steps of all sessions of a lockstep together."""

    sessions: Sequence[Session]
    group: Lockstep

    def __post_init__(self) -> None:
        self._stacked: list[dict[str, Tensor]] = []
        self._rows: list[list[dict[str, Tensor]]] = []  # as the sessions were left with them, by lane and rank
        # By lane: each rank's first gradient, and all gradients, where they lie end to end.
        self._lies: dict[int, tuple[list[Tensor], Tensor]] = {}

    @property
    def world(self) -> int:
        return len(self.sessions)

    def knows(self, grads: Sequence[Grads]) -> bool:
        """Whether this step can be sung."""
        first = self.sessions[0]
        plain = all(type(session) is Session and session.step == first.step for session in self.sessions)
        whole = all(x is not None and x.layout == torch.strided for own in grads for x in own.values())
        lanes = zip(first.plan.lanes, first.memories, strict=True)
        return plain and whole and not first.clips and self._alike and all(self._sings(*pair) for pair in lanes)

    @property
    def _alike(self) -> bool:
        """Whether something was observed on all ranks or on none."""
        held = [[OBSERVED in memory for memory in session.memories] for session in self.sessions]
        return all(each == held[0] for each in held)

    def _sings(self, lane: Lane, memory: Memory) -> bool:
        codec, exchange = lane.at(self.sessions[0].step)
        return (
            sings(lane.feedback, codec, exchange)
            and OWED not in memory
            and (SERVED in memory) == (isinstance(exchange, TwoWay) and lane.feedback.indebted)
        )

    def step(self, grads: Sequence[Grads], unscale: float = 1.0) -> Verdict:
        """What all ranks agree on.

        One look at the device, at the end: whether any gradient was not finite, and how long messages are. (Selectors
        whose numbers of entries vary look once before.)
        """
        first = self.sessions[0]
        first.look_back()
        held, broken, sung = self._memories(), list[Tensor](), list[Sung]()
        for i, (lane, memory) in enumerate(zip(first.plan.lanes, held, strict=True)):
            began = time.perf_counter()
            flat = self._flat(i, lane, grads, unscale)
            sung.append(self._sing(lane, flat, memory, Key(first.seed, first.step, PER_RANK), broken))
            first.spent[lane.label].encode += time.perf_counter() - began  # in unison, decoding is no work apart
        unfit, said = _look(broken, [one.asks for one in sung])
        self._count(said)
        if unfit:
            first.forgive()
            for session in self.sessions:
                session.skip()
            return Verdict(first.split([torch.zeros_like(one.update) for one in sung]), True)
        self._commit([dict(one.memory) for one in sung])
        return Verdict(first.split([one.update for one in sung]), False)

    # -- one lane --------------------------------------------------------------------------------------------------

    def _flat(self, i: int, lane: Lane, grads: Sequence[Grads], unscale: float) -> Tensor:
        """All ranks' gradients of a lane end to end. Where they lie so already, they do in the next step, too."""
        heads = [x for own in grads if (x := own[lane.tensors.names[0]]) is not None]
        known = self._lies.get(i)
        if known is not None and unscale == 1.0 and all(a is b for a, b in zip(known[0], heads, strict=True)):
            return known[1]
        flat = joined([session.flat(lane, own, unscale) for session, own in zip(self.sessions, grads, strict=True)])
        if flat.data_ptr() == heads[0].data_ptr():
            self._lies[i] = heads, flat
        return flat

    def _sing(self, lane: Lane, flat: Tensor, memory: Memory, key: Key, broken: list[Tensor]) -> Sung:
        codec, exchange = lane.at(key.step)
        table = choir(lane.units, self.world, isinstance(exchange, TwoWay))
        served = memory.get(SERVED)
        own: Memory = {name: x for name, x in memory.items() if name != SERVED}
        room = {} if self.sessions[0].rollback else own
        signal = EncodeInput(flat, flat, own, table)
        sent, own = _speak(lane.feedback, codec, exchange, signal, key, self.world, broken, room)
        if isinstance(exchange, AllReduce):
            return Sung(*self._add(lane, codec, sent, own, key))
        if isinstance(exchange, AllGather):
            starts = _starts(codec, sent, table)
            mean = _mean(sent, starts, lane.units.total, self.world)
            return Sung(mean, own, self._gathers(codec, sent, starts, lane.units))
        return self._two_ways(lane, codec, sent, own, served, key)

    def _add(
        self, lane: Lane, codec: Codec, sent: Decoded, memory: Memory, key: Key
    ) -> tuple[Tensor, Memory, list[list[Request]]]:
        """As `AllReduce.talk` does, where a summand is what was heard, in the format that it was said in."""
        rows = summands(codec, sent, self.world).view(self.world, -1)
        total = rows[0].clone()
        for row in rows[1:]:
            total = total + row
        mean = codec.expand(over(total.float(), self.world), lane.units, key.of(0))
        summand: Request = Sum(torch.empty_like(rows[0], device=META))
        return mean, memory, [[summand] * self.world]

    def _two_ways(
        self, lane: Lane, codec: Codec, sent: Decoded, memory: Memory, served: Tensor | None, key: Key
    ) -> Sung:
        """As `TwoWay.talk` does, all shards at once: end to end they are the buffer."""
        n, world = lane.units.total, self.world
        meant = _mean(sent, _starts(codec, sent, choir(lane.units, world, True)), n, world)
        if served is not None:
            meant = meant + served
        table = shards(lane.units, world)
        verdict = codec.echo(EncodeInput(meant, meant, {}, table), key.fold("leg2"))
        if served is not None:
            memory = {**memory, SERVED: verdict.off(meant)}
        asks = two_rounds([codec.size(window) for window in _windows(lane.units, world)])
        return Sung(_dense(verdict, n), memory, asks)

    def _gathers(
        self, codec: Codec, sent: Decoded, starts: Sequence[int], units: Segments
    ) -> list[list[Request]] | Sizes:
        if not codec.traits.fixed:
            return _sizes(codec, sent, starts, units, self.world)
        n = codec.size(units)
        return [[Gather(blank(n), n)] * self.world]

    # -- memories --------------------------------------------------------------------------------------------------

    def _memories(self) -> list[dict[str, Tensor]]:
        """All ranks' memories end to end, by lane; those of the last step, unless a session got others since."""
        ours = self._rows and all(
            session.memories[i] is rows[rank]
            for i, rows in enumerate(self._rows)
            for rank, session in enumerate(self.sessions)
        )
        if not ours:
            every = range(len(self.sessions[0].memories))
            self._stacked = [_stack([session.memories[i] for session in self.sessions]) for i in every]
        return [memory | self._observed(i) for i, memory in enumerate(self._stacked)]

    def _observed(self, i: int) -> dict[str, Tensor]:
        """What loops have measured in a lane since the last step: it came into memories that are ours already."""
        if OBSERVED not in self.sessions[0].memories[i]:
            return {}
        return {OBSERVED: torch.cat([session.memories[i][OBSERVED] for session in self.sessions])}

    def _commit(self, memories: list[dict[str, Tensor]]) -> None:
        self._stacked = memories
        self._rows = []
        for i, (lane, memory) in enumerate(zip(self.sessions[0].plan.lanes, memories, strict=True)):
            kept = set(self.sessions[0].memories[i])
            rows = _unstack({name: x for name, x in memory.items() if name in kept}, lane.units.total, self.world)
            self._rows.append(rows)
            for session, row in zip(self.sessions, rows, strict=True):
                session.memories[i] = row
        for session in self.sessions:
            session.step += 1

    # -- the account -----------------------------------------------------------------------------------------------

    def _count(self, said: Sequence[list[list[Request]]]) -> None:
        """Put on every rank's account what its messages would have cost."""
        plan = self.sessions[0].plan
        for lane, asks in zip(plan.lanes, said, strict=True):
            for rank, session in enumerate(self.sessions):
                session.meant[lane.label] += 4 * lane.units.total
                session.said[lane.label] += sum(nbytes(each[rank]) for each in asks)
        at = 0
        for launch in plan.launches:
            lanes, at = said[at : at + len(launch)], at + len(launch)
            for i in range(max(map(len, lanes))):
                rounds = [asks[i] for asks in lanes if i < len(asks)]
                for rank, price in enumerate(costs(rounds, self.world, first=i == 0)):
                    self.group.traffic[rank] += price


def sings(feedback: Feedback, codec: Codec, exchange: Exchange) -> bool:
    """Whether ranks of one process may speak in unison: whatever they do must be done unit by unit."""
    known = type(exchange) in (AllGather, AllReduce, TwoWay)
    fits = codec.indices is None or type(codec.indices).fit is IndexCoder.fit
    same = type(feedback).release is Feedback.release
    return known and fits and same and codec.transform is None


@lru_cache(maxsize=64)
def choir(units: Segments, world: int, cut: bool) -> Segments:
    """The units of all ranks, one rank after the other; ``cut`` where shards are said apart."""
    names, shapes = list[str](), list[tuple[int, ...]]()
    for rank in range(world):
        for table in _windows(units, world) if cut else [units]:
            names += [owned(name, rank) for name in table.names]
            shapes += table.shapes
    return Segments(tuple(names), tuple(shapes))


@lru_cache(maxsize=64)
def shards(units: Segments, world: int) -> Segments:
    """The units of one buffer, cut into shards, each in the name of the rank that serves it."""
    tables = _windows(units, world)
    names = [owned(name, rank) for rank, table in enumerate(tables) for name in table.names]
    return Segments(tuple(names), tuple(shape for table in tables for shape in table.shapes))


def _windows(units: Segments, world: int) -> list[Segments]:
    return [units.window(*shard(units.total, world, rank)) for rank in range(world)]


def _speak(
    feedback: Feedback,
    codec: Codec,
    exchange: Exchange,
    signal: EncodeInput,
    key: Key,
    world: int,
    broken: list[Tensor],
    room: Memory,
) -> tuple[Decoded, Memory]:
    """Compensate, encode and settle, for all ranks; `broken` gets what is found of the gradients."""
    if lowers(feedback, codec, exchange):
        speaker = FusedSpeaker(signal.grad, signal.memory, signal.segments, codec, feedback, key, room)
        sent = speaker.hear()
        broken.extend(speaker.broken)
        return sent, speaker.memory_after
    grad, unfit = censored(signal.grad, world)
    broken.append(unfit)
    memory = absorb(codec, grad, signal.memory)
    target, memory = feedback.compensate(grad, memory)
    signal = EncodeInput(grad, target, memory, signal.segments)
    if codec.memories:
        _, sent, memory = codec.encode(signal, key)
    else:
        sent = codec.echo(signal, key)
    if isinstance(exchange, AllReduce):
        sent = sent._replace(values=summands(codec, sent, world).float())
    return sent, feedback.settle(target, sent, memory)


def summands(codec: Codec, sent: Decoded, world: int) -> Tensor:
    """What ranks would add up: the values as they were said, limited as `AllReduce` does."""
    dtype: torch.dtype = codec.quantizer.dtype  # type: ignore[attr-defined]
    limit = max_addend(dtype, world)
    return sent.values.to(dtype).clamp(-limit, limit)


def _look(
    broken: Sequence[Tensor], asked: Sequence[list[list[Request]] | Sizes]
) -> tuple[bool, list[list[list[Request]]]]:
    """Whether anything is broken, and what was said in each lane, now that all lengths are known."""
    waiting = [each.positions for each in asked if isinstance(each, Sizes) and each.positions is not None]
    unfit, *told = torch.cat([torch.stack(list(broken)).any().long()[None], *waiting]).tolist()
    numbers, said = iter(told), []
    for each in asked:
        if isinstance(each, Sizes):
            sizes = each.known if each.positions is None else [n + next(numbers) for n in each.known]
            each = [[Agreed(blank(n), max(sizes)) for n in sizes]]
        said.append(each)
    return bool(unfit), said


def _starts(codec: Codec, sent: Decoded, table: Segments) -> Sequence[int]:
    """Where the entries of each unit of all ranks begin, and where the last ones end; nothing for dense messages.

    Mostly every rank says all that it may: then nobody has to look.
    """
    if sent.indices is None:
        return ()
    if sent.indices.numel() == codec.most(table):
        return (0, *accumulate(codec.capacities(table)))
    found: list[int] = torch.searchsorted(sent.indices, table.offsets_on(sent.indices.device)).tolist()
    return found


def _mean(sent: Decoded, starts: Sequence[int], n: int, world: int) -> Tensor:
    """The mean over ranks of what all of them said, added in their order as `Codec.total` does."""
    values, total = sent.values, sent.values.new_zeros(n)
    if sent.indices is not None and sent.indices.numel() <= n:
        places, each = sent.indices % n, (len(starts) - 1) // world  # units of a rank
        for start, stop in pairwise(starts[::each]):
            total.index_add_(0, places[start:stop], values[start:stop])  # distinct within a rank
        return over(total, world)
    if sent.indices is not None:  # together longer than the vector: zeros in between are the lesser evil
        values = values.new_zeros(world * n).index_copy_(0, sent.indices, values)
    for row in values.view(world, n):
        total += row
    return over(total, world)


def _dense(sent: Decoded, n: int) -> Tensor:
    out = sent.values.new_zeros(n)
    return out + sent.values if sent.indices is None else out.index_add_(0, sent.indices, sent.values)


def _sizes(codec: Codec, sent: Decoded, starts: Sequence[int], units: Segments, world: int) -> Sizes:
    """How long each rank's message would be, where that depends on what it says."""
    assert sent.indices is not None and codec.indices is not None
    n, known, positions = units.total, list[int](), list[Tensor]()
    for rank in range(world):
        mine = starts[rank * len(units) : (rank + 1) * len(units) + 1]
        bytes_, more = codec.length(
            sent.indices[mine[0] : mine[-1]] - rank * n, tuple(stop - start for start, stop in pairwise(mine)), units
        )
        known.append(bytes_)
        positions += [] if more is None else [more]
    return Sizes(known, torch.stack(positions) if positions else None)


def _stack(memories: Sequence[Memory]) -> dict[str, Tensor]:
    return {name: torch.cat([memory[name] for memory in memories]) for name in memories[0] if _is_slot(name)}


def _is_slot(name: str) -> bool:
    return not name.startswith("edge ")  # a hint of a selection: another buffer has another one


def _unstack(memory: Memory, n: int, world: int) -> list[dict[str, Tensor]]:
    """Each rank's part of every memory; of shards, its own."""
    rows: list[dict[str, Tensor]] = [{} for _ in range(world)]
    for name, x in memory.items():
        for rank in range(world):
            start, stop = shard(n, world, rank) if name == SERVED else (rank * n, (rank + 1) * n)
            rows[rank][name] = x[start:stop]
    return rows
