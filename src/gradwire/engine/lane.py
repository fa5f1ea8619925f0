"""Lane: feedback, codec and exchange for one flat buffer. The whole framework is `Lane.talk`."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.codecs.codec import Codec, Entries
from gradwire.codecs.selectors import Variance
from gradwire.codecs.stage import EncodeInput, Memory, StateSpec
from gradwire.core.keys import Key
from gradwire.core.requests import CommGenerator
from gradwire.core.segments import Segments
from gradwire.engine.lowering import FusedSpeaker, lowers
from gradwire.exchanges import CommContext, Exchange
from gradwire.exchanges.two_way import shard
from gradwire.feedback import Feedback

OWED = "owed"  # a debt without a home: left by a memory that the current spec has no use for
OBSERVED = "observed"  # second moments that the loop measured since the last step


class Released(NamedTuple):
    """What a lane hands back; the update as a flat tensor, or laid out where the gradients were, or as few entries."""

    update: Any
    memory: Memory


@dataclass(frozen=True)
class Lane:
    """One rule's parameters, laid end to end, and what is done with them."""

    label: str
    tensors: Segments
    units: Segments
    feedback: Feedback
    table: tuple[tuple[int, Codec, Exchange], ...]

    def at(self, step: int) -> tuple[Codec, Exchange]:
        """The codec and exchange of a step."""
        entries = [(codec, exchange) for start, codec, exchange in self.table if start <= step]
        return entries[-1]

    def steady(self) -> "Lane":
        """The same lane with messages of known length, if there are such."""
        return replace(self, table=tuple((start, codec.steady(), exchange) for start, codec, exchange in self.table))

    def talk(self, grad: Tensor, memory: Memory, key: Key, world: int, apart: bool = False) -> CommGenerator[Released]:
        """Compensate, encode, settle, exchange, release; ``apart``: the update may be handed back as its entries."""
        codec, exchange = self.at(key.step)
        around = self._around(key, world, apart)
        memory = absorb(codec, grad, memory)
        target, memory = self.feedback.compensate(grad, memory)
        target, memory = self._collect(target, memory, exchange, around)
        said = exchange.encode(EncodeInput(grad, target, memory, self.units), codec, around)
        if said.sent is not None:
            said = said._replace(memory=self.feedback.settle(target, said.sent, said.memory))
        agreed = yield from exchange.talk(said, codec, around)
        memory = agreed.memory
        if agreed.sent is not None:
            memory = self.feedback.settle(target, agreed.sent, memory)
        return self._released(agreed.mean, memory)

    def lowered(self, memory: Memory, key: Key, world: int) -> bool:
        """Whether `talk_fused` may serve in place of `talk` at this step."""
        codec, exchange = self.at(key.step)
        left = OWED in memory or ("served" in memory and "served" not in exchange.slots(self._around(key, world)))
        return not left and lowers(self.feedback, codec, exchange)

    @cached_property
    def fused(self) -> bool:
        """Whether `talk_fused` may serve at any step: then memories can be changed in place."""
        return any(lowers(self.feedback, codec, exchange) for _, codec, exchange in self.table)

    def talk_fused(
        self,
        grad: Tensor,
        memory: Memory,
        key: Key,
        world: int,
        broken: list[Tensor],
        room: Memory | None = None,
        apart: bool = False,
    ) -> CommGenerator[Released]:
        """The same by a fused kernel; ``broken`` gets what it finds of the gradient, ``room`` is for new memories."""
        codec, exchange = self.at(key.step)
        around = self._around(key, world, apart)
        speaker = FusedSpeaker(grad, memory, self.units, codec, self.feedback, key, room or {})
        said = exchange.collect(speaker.say, around)
        broken.extend(speaker.broken)
        agreed = yield from exchange.talk(said, codec, around)
        return self._released(agreed.mean, agreed.memory)

    def _released(self, mean: Tensor | Entries, memory: Memory) -> Released:
        return Released(mean, memory) if isinstance(mean, Entries) else Released(*self.feedback.release(mean, memory))

    def slots(self, world: int) -> dict[str, StateSpec]:
        """All memories that the lane needs at any step of its table."""
        like = self.tensors.lengths
        slots = {name: StateSpec(like, reshard) for name, reshard in self.feedback.memories.items()}
        for _, codec, exchange in self.table:
            slots |= {name: StateSpec(like) for name in codec.memories}
            slots |= exchange.slots(self._around(Key(0, 0, 0), world))
        return slots

    def debt(self, memory: Memory, rank: int, world: int) -> Tensor:
        """This rank's share of the pending update: the mean of debts over ranks is still to be applied."""
        n = self.units.total
        owed = self.feedback.debt(memory)
        somewhere = next(iter(memory.values()), torch.zeros(0))
        debt = somewhere.new_zeros(n) if owed is None else owed.clone()
        if OWED in memory:
            debt += memory[OWED]
        if "served" in memory:
            start, stop = shard(n, world, rank)
            debt[start:stop] += world * memory["served"]  # held by one rank, meant for all
        if "pending" in memory:
            debt += memory["pending"]
        return debt

    @cached_property
    def slices(self) -> dict[str, slice]:
        return self.tensors.slices()

    def _around(self, key: Key, world: int, apart: bool = False) -> CommContext:
        as_it_is = type(self.feedback).release is Feedback.release  # else the mean is not yet the update
        about = self.feedback.indebted, self.feedback.listens
        return CommContext(key, world, self.units, self.tensors, *about, apart and as_it_is)

    def _collect(
        self, target: Tensor, memory: Memory, exchange: Exchange, around: CommContext
    ) -> tuple[Tensor, Memory]:
        """Add debts left behind by a spec that served before this one."""
        kept = dict(memory)
        if OWED in kept:
            target = target + kept.pop(OWED)
        if "served" in kept and "served" not in exchange.slots(around):
            start, stop = shard(self.units.total, around.world, around.key.rank)
            served = kept["served"]
            target = target.clone()
            target[start:stop] += around.world * served
            kept["served"] = torch.zeros_like(served)
        return target, kept


def absorb(codec: Codec, grad: Tensor, memory: Memory) -> Memory:
    """Feed a variance test: with what the loop observed, else with the batch as if it were one sample."""
    if not isinstance(codec.selector, Variance):
        return memory
    if OBSERVED in memory:
        kept = dict(memory)
        seen = kept.pop(OBSERVED)
        return {**kept, "second_moment": kept["second_moment"] + seen}
    return codec.selector.absorb(grad, memory)
