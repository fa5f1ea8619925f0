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
from gradwire.exchanges.exchange import Aggregate, CommContext, Product
from gradwire.exchanges.servers import SERVER_ERROR, server_slice
from gradwire.feedback import Feedback, NoFeedback
from gradwire.feedback.feedback import divisor


class LaneResult(NamedTuple):
    """What a step makes of a lane.

    Attributes:
        update: As a flat tensor, or as few entries.
        new: The new memories.
        spare: Old memories, as storage for the next step.
    """

    update: Tensor | Entries
    new: Generation
    spare: Generation | None = None


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
        step_table: Codec and exchange from a step on.
        gradient_steps: For so many steps gradients are sent without feedback.
        refreshes_per_interval: Later steps that send gradients as the last of those do: so many, before the interval
            between them doubles; 0: none.
    """

    label: str
    tensors: Segments
    units: Segments
    feedback: Feedback
    step_table: tuple[tuple[int, Codec, Exchange], ...]
    gradient_steps: int = 0
    refreshes_per_interval: int = 0

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
        # Steps that send gradients keep no error, and leave none to others.
        exchanges = [exchange for start, _, exchange in self.step_table if self._feedback(start).keeps_error]
        return tuple(
            (start, encoder_for(self._feedback(start), codec, exchange, exchanges))
            for start, codec, exchange in self.step_table
        )

    def _feedback(self, step: int) -> Feedback:
        return NoFeedback() if self._sends_gradients(step) else self.feedback

    def _sends_gradients(self, step: int) -> bool:
        return step < self.gradient_steps or self.refreshes(step)

    def refreshes(self, step: int) -> bool:
        """Whether a step after the first ones sends gradients again."""
        return (
            step > self.gradient_steps
            and self.refreshes_per_interval > 0
            and is_refresh(step, self.refreshes_per_interval)
        )

    @cached_property
    def fused(self) -> bool:
        """Whether a fused kernel serves at any step: then memories can be changed in place."""
        return any(not isinstance(encoder, Composed) for _, encoder in self._encoders)

    def with_fixed_length(self) -> "Lane":
        """The same lane with messages of known length, if it can have them."""
        return replace(
            self,
            step_table=tuple(
                (start, codec.with_fixed_length(), exchange) for start, codec, exchange in self.step_table
            ),
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
            views: The gradients. They are read before the first request; the update may be written over them after it.
            state: Is only read.
            storage: Storage for new memories. It may lack some, and it may be the state's own.
            context: Of the exchange.
            nonfinite: Gets bools on the device: whether a gradient was not finite.
            corrupt: Gets the errors of messages that cannot be decoded; the mean is zero then.
        """
        encoder = self.encoder(context.key.step)
        if state.carried_error is not None:
            encoder = Composed(encoder.feedback, encoder.codec, encoder.exchange)
        kept, place = encoder.feedback.keeps_mean, context.out
        # Steps that are composed leave the state as it is, also where fused ones may change it in place.
        in_place = storage is state.current and isinstance(encoder, Composed)
        context = _with_storage(context, encoder.feedback, state, Generation({}) if in_place else storage)
        message, target = encoder.encode(views, state, storage, context, nonfinite)
        if encoder.feedback.finalize is not None or not encoder.codec.decoder.is_sparse(context.units, context.world):
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
        if kept is not None and aggregate.product is not None and isinstance(mean, Tensor):
            return LaneResult(aggregate.product, Generation({**memory, kept: mean}))
        update, memory = _finalize(encoder.feedback, mean, memory, place)
        return LaneResult(update, Generation(dict(memory)), self._spare(encoder, views, state, memory))

    def _spare(self, encoder: Encoder, views: GradViews, state: LaneState, memory: Memory) -> Generation | None:
        """Old memories that kernels have replaced. On a CPU, fresh pages would cost more than the step itself."""
        if not encoder.reuses_memories or views.device.type != "cpu" or not views.in_place:
            return None
        old = {name: state.tensors[name] for name in encoder.feedback.written}
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
        sparse = sparse and (feedback.finalize is None or feedback.finalize_entries is not None)
        return CommContext(key, world, self.units, self.tensors, *keeps, sparse, out)

    def state_specs(self, world: int) -> dict[str, StateSpec]:
        """All memories that the lane needs at any step of its table."""
        like = self.tensors.lengths
        specs = {name: StateSpec(like, reshard) for name, reshard in self.feedback.memories.items()}
        for start, codec, exchange in self.step_table:
            specs |= {name: StateSpec(like) for name in codec.memories}
            specs |= exchange.state_specs(self.context(Key(0, start, 0), world)) if exchange.state_specs else {}
        return specs

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


def _with_storage(context: CommContext, feedback: Feedback, state: LaneState, storage: Generation) -> CommContext:
    """The context of an exchange that may write memories to where they go."""
    context = context._replace(server_error=storage.tensors.get(SERVER_ERROR))
    if feedback.keeps_mean is None:
        return context
    mean, product = storage.tensors.get(feedback.keeps_mean), None
    if mean is not None and feedback.divides:  # the update goes to where gradients lie, if they lie end to end
        denominator = state.tensors["denominator"]
        product = Product(denominator, torch.empty_like(denominator) if context.out is None else context.out)
    return context._replace(out=mean, product=product)


def _finalize(
    feedback: Feedback, mean: Tensor | Entries, memory: Memory, out: Tensor | None
) -> tuple[Tensor | Entries, Memory]:
    """What the feedback makes of the mean, in ``out`` where it can be written there."""
    if isinstance(mean, Entries):
        if feedback.finalize_entries is None:
            return mean, memory
        return feedback.finalize_entries(mean, memory, torch.empty_like(memory["residual"]) if out is None else out)
    if feedback.finalize_into is not None and out is not None:
        return feedback.finalize_into(mean, memory, out)
    return (mean, memory) if feedback.finalize is None else feedback.finalize(mean, memory)
