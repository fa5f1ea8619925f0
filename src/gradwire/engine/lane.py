"""Lane: feedback, codec and exchange for one flat buffer. The whole framework is `Lane.run`."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.codecs.codec import Codec
from gradwire.codecs.decoding import Entries
from gradwire.codecs.stage import Memory, StateSpec
from gradwire.core.keys import Key
from gradwire.core.payload import CorruptMessageError
from gradwire.core.requests import CommGenerator
from gradwire.core.segments import Segments
from gradwire.engine.encoders import Composed, Encoder, encoder_for
from gradwire.engine.state import Generation, LaneState
from gradwire.engine.views import GradViews
from gradwire.exchanges import Exchange
from gradwire.exchanges.exchange import Aggregate, CommContext
from gradwire.exchanges.servers import SERVER_ERROR, server_slice
from gradwire.feedback import Feedback, NoFeedback
from gradwire.feedback.feedback import divisor


class LaneResult(NamedTuple):
    """What a step makes of a lane.

    Attributes:
        update: As a flat tensor, or as few entries.
        new: The new memories.
        back: Old memories, as storage for the next step.
    """

    update: Tensor | Entries
    new: Generation
    back: Generation | None = None


def is_refresh(step: int, times: int) -> bool:
    """Whether a step is among 0, 1, 2, ..., of which so many are one step apart, as many two, as many four, and so on.

    These are the steps k_j of 0/1 Adam, with k_{j+1} = k_j + 2^floor(j / times).
    """
    interval = 1 << ((step // times + 1).bit_length() - 1)
    return (step - times * (interval - 1)) % interval == 0


@dataclass(frozen=True)
class Lane:
    """One rule's parameters, laid end to end, and how they are compressed.

    Attributes:
        label: The rule's.
        tensors: The parameters.
        units: What the codec treats as one vector each.
        feedback: Of all steps after the first `gradient_steps`.
        table: Codec and exchange from a step on.
        gradient_steps: For so many steps gradients are sent without feedback.
        refresh: Later steps that send gradients as the last of those do: so many, before their interval doubles.
    """

    label: str
    tensors: Segments
    units: Segments
    feedback: Feedback
    table: tuple[tuple[int, Codec, Exchange], ...]
    gradient_steps: int = 0
    refresh: int = 0

    def at(self, step: int) -> tuple[Codec, Exchange]:
        """The codec and exchange of a step."""
        encoder = self.encoder(step)
        return encoder.codec, encoder.exchange

    def encoder(self, step: int) -> Encoder:
        """The encoder of a step."""
        if self._sends_gradients(step):
            step = min(step, self.gradient_steps - 1)
        return [encoder for start, encoder in self._encoders if start <= step][-1]

    @cached_property
    def _encoders(self) -> tuple[tuple[int, Encoder], ...]:
        exchanges = [exchange for _, _, exchange in self.table]
        return tuple(
            (start, encoder_for(self._feedback(start), codec, exchange, exchanges))
            for start, codec, exchange in self.table
        )

    def _feedback(self, step: int) -> Feedback:
        return NoFeedback() if self._sends_gradients(step) else self.feedback

    def _sends_gradients(self, step: int) -> bool:
        return step < self.gradient_steps or self.refreshes(step)

    def refreshes(self, step: int) -> bool:
        """Whether a step after the first ones sends gradients again."""
        return step > self.gradient_steps and self.refresh > 0 and is_refresh(step, self.refresh)

    @cached_property
    def fused(self) -> bool:
        """Whether a fused kernel serves at any step: then memories can be changed in place."""
        return any(not isinstance(encoder, Composed) for _, encoder in self._encoders)

    def with_fixed_length(self) -> "Lane":
        """The same lane with messages of known length, if it can have them."""
        return replace(
            self, table=tuple((start, codec.with_fixed_length(), exchange) for start, codec, exchange in self.table)
        )

    def run(
        self,
        views: GradViews,
        state: LaneState,
        storage: Generation,
        context: CommContext,
        nonfinite: list[Tensor],
        corrupt: list[CorruptMessageError],
    ) -> CommGenerator[LaneResult]:
        """Add the error, encode, keep the new error, exchange, and make the update.

        Args:
            views: The gradients. They are only read.
            state: Is only read.
            storage: Storage for new memories. It may lack some, and it may be the state's own.
            context: Of the exchange.
            nonfinite: Gets bools on the device: whether a gradient was not finite.
            corrupt: Gets the errors of messages that cannot be decoded; the mean is zero then.
        """
        encoder = self.encoder(context.key.step)
        if state.carried_error is not None:
            encoder = Composed(encoder.feedback, encoder.codec, encoder.exchange)
        message, target = encoder.encode(views, state, storage, context, nonfinite)
        if not encoder.codec.decoder.is_sparse(context.units, context.world):
            views.free_copy()
        try:
            aggregate = yield from encoder.exchange.run(message, encoder.codec, context)
        except CorruptMessageError as error:
            corrupt.append(error)
            aggregate = Aggregate(torch.zeros(context.units.total, device=views.device), message.memory)
        mean, memory = aggregate.mean, aggregate.memory
        if aggregate.sent is not None:
            assert target is not None
            memory = encoder.feedback.update_memory(target, aggregate.sent, memory)
        if encoder.feedback.finalize is not None and not isinstance(mean, Entries):
            mean, memory = encoder.feedback.finalize(mean, memory)
        return LaneResult(mean, Generation(dict(memory)), self._back(encoder, views, state, memory))

    def _back(self, encoder: Encoder, views: GradViews, state: LaneState, memory: Memory) -> Generation | None:
        """Old memories that kernels have replaced. On a CPU, fresh pages would cost more than the step itself."""
        if not encoder.reuses_memories or views.device.type != "cpu" or not views.in_place:
            return None
        old = {name: state.tensors[name] for name in encoder.feedback.memories}
        return None if any(memory[name] is x for name, x in old.items()) else Generation(old)

    def context(self, key: Key, world: int, sparse: bool = False, out: Tensor | None = None) -> CommContext:
        """The context of a step's exchange.

        Args:
            key: Of this step's random bits.
            world: Number of ranks.
            sparse: The update may be handed back as its entries.
            out: The update may be written there.
        """
        feedback = self._feedback(key.step)
        keeps = feedback.keeps_error, feedback.needs_decoded
        sparse = sparse and feedback.finalize is None
        return CommContext(key, world, self.units, self.tensors, *keeps, sparse, out)

    def slots(self, world: int) -> dict[str, StateSpec]:
        """All memories that the lane needs at any step of its table."""
        like = self.tensors.lengths
        slots = {name: StateSpec(like, reshard) for name, reshard in self.feedback.memories.items()}
        for start, codec, exchange in self.table:
            slots |= {name: StateSpec(like) for name in codec.memories}
            slots |= exchange.slots(self.context(Key(0, start, 0), world)) if exchange.slots else {}
        return slots

    def debt(self, state: LaneState, rank: int, world: int) -> Tensor:
        """This rank's debt: the mean of these over ranks is still to be applied."""
        n, memory = self.units.total, state.tensors
        error = self.feedback.error(memory)
        like = next(iter(memory.values()), torch.zeros(0))
        debt = like.new_zeros(n) if error is None else error.clone()
        if SERVER_ERROR in memory:
            start, stop = server_slice(n, world, rank)
            debt[start:stop] += world * memory[SERVER_ERROR]  # one rank keeps it, for all
        if self.feedback.divides:
            debt *= divisor(memory)
        if state.carried_error is not None:
            debt += state.carried_error
        if "pending" in memory:
            debt += memory["pending"]
        return debt

    @cached_property
    def slices(self) -> dict[str, slice]:
        return self.tensors.slices()
