"""Lane: feedback, codec and exchange for one flat buffer. The whole framework is `Lane.run`."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.codecs import Codec, Entries, Memory, StateSpec
from gradwire.core import CommGenerator, CorruptMessageError, Key, Segments
from gradwire.core.layout import Flat, Scattered, takes_scattered
from gradwire.engine.encoders import ComposedEncoder, Encoder, encoder_for
from gradwire.engine.state import LaneMemory, LaneState
from gradwire.engine.views import GradViews
from gradwire.exchanges import Exchange
from gradwire.exchanges.exchange import Aggregate, CommContext, ProductOutput
from gradwire.exchanges.servers import SERVER_ERROR, server_slice
from gradwire.feedback import Feedback, NoFeedback
from gradwire.feedback.feedback import divisor


class LaneResult(NamedTuple):
    """What a step makes of a lane.

    Attributes:
        update: As a flat tensor, where the gradients lie, or as few entries.
        new: The new memories.
        spare: Old memories, as storage for the next step.
    """

    update: Flat | Entries
    new: LaneMemory
    spare: LaneMemory | None = None


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
        refreshes_per_interval: Later, so many steps send gradients again before the interval between them doubles; 0:
            none.
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
        return any(not isinstance(encoder, ComposedEncoder) for _, encoder in self._encoders)

    def run(
        self,
        views: GradViews,
        state: LaneState,
        storage: LaneMemory,
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
            encoder = ComposedEncoder(encoder.feedback, encoder.codec, encoder.exchange)
        kept, place = encoder.feedback.mean_memory, context.update
        # Steps that are composed leave the state as it is, also where fused ones may change it in place.
        in_place = storage is state.current and isinstance(encoder, ComposedEncoder)
        context = _with_storage(context, encoder, state, LaneMemory({}) if in_place else storage)
        message = encoder.encode(views, state, storage, context, nonfinite)
        if encoder.feedback.finalize is not None or not encoder.codec.decoder.is_sparse(context.units, context.world):
            views.free_copy()
        try:
            aggregate = yield from encoder.exchange.run(message, encoder.codec, context)
        except CorruptMessageError as error:
            corrupt.append(error)
            aggregate = Aggregate(torch.zeros(context.units.total, device=views.device), message.memory)
        mean, memory = aggregate.mean, aggregate.memory
        if aggregate.sent is not None:
            assert isinstance(message.content, Tensor)  # what should have been sent
            memory = encoder.feedback.update_memory(message.content, aggregate.sent, memory)
        if kept is not None and aggregate.product is not None and isinstance(mean, Tensor):
            return LaneResult(aggregate.product, LaneMemory({**memory, kept: mean}))
        update, memory = _finalize(encoder.feedback, mean, memory, place)
        return LaneResult(update, LaneMemory(dict(memory)), self._spare(encoder, views, state, memory))

    def _spare(self, encoder: Encoder, views: GradViews, state: LaneState, memory: Memory) -> LaneMemory | None:
        """Old memories that kernels have replaced. On a CPU, fresh pages would cost more than the step itself."""
        if isinstance(encoder, ComposedEncoder) or views.device.type != "cpu" or not views.in_place:
            return None
        old = {name: state.tensors[name] for name in encoder.feedback.written}
        return None if any(memory[name] is x for name, x in old.items()) else LaneMemory(old)

    def context(self, key: Key, world: int, sparse: bool = False, update: Flat | None = None) -> CommContext:
        """The context of a step's exchange.

        Args:
            key: Of this step's random bits.
            world: Number of ranks.
            sparse: The update may be handed back as its entries.
            update: The update may be written there.
        """
        feedback = self._feedback(key.step)
        keeps = feedback.keeps_error, feedback.needs_decoded
        sparse = sparse and (feedback.finalize is None or feedback.finalize_entries is not None)
        out = update if isinstance(update, Tensor) else None
        finalizes = (feedback.finalize, feedback.finalize_into, feedback.mean_memory) != (None, None, None)
        takes = not finalizes and takes_scattered(self.at(key.step)[1])
        scattered = update if isinstance(update, Scattered) and takes else None
        if scattered is not None and scattered.device.type != "cpu":  # kernels of a CPU alone decode to several places
            scattered = None
        return CommContext(
            key, world, self.units, self.tensors, *keeps, sparse, out, update=update, scattered=scattered
        )

    def state_specs(self, world: int) -> dict[str, StateSpec]:
        """All memories that the lane needs at any step of its table."""
        like = self.tensors.lengths
        specs = {name: StateSpec(like, reshard) for name, reshard in self.feedback.memories.items()}
        for start, codec, exchange in self.step_table:
            specs |= {name: StateSpec(like) for name in codec.memories}
            specs |= exchange.state_specs(self.context(Key(0, start, 0), world)) if exchange.state_specs else {}
        return specs

    def pending_error(self, state: LaneState, rank: int, world: int) -> Tensor:
        """What this rank has not sent: the mean over ranks is still to be applied."""
        n, memory = self.units.total, state.tensors
        error = self.feedback.error(memory)
        like = next(iter(memory.values()), torch.zeros(0))
        pending = like.new_zeros(n) if error is None else error.clone()
        if SERVER_ERROR in memory:
            start, stop = server_slice(n, world, rank)
            pending[start:stop] += world * memory[SERVER_ERROR]  # one rank keeps it, for all
        if self.feedback.divides:
            pending *= divisor(memory)
        if state.carried_error is not None:
            pending += state.carried_error
        if "pending" in memory:
            pending += memory["pending"]
        return pending

    @cached_property
    def slices(self) -> dict[str, slice]:
        return self.tensors.slices()


def _with_storage(context: CommContext, encoder: Encoder, state: LaneState, storage: LaneMemory) -> CommContext:
    """The context of an exchange that may write memories to where they go."""
    feedback, place = encoder.feedback, context.update
    context = context._replace(server_error=storage.tensors.get(SERVER_ERROR))
    if feedback.mean_memory is None:
        return context
    mean, product = storage.tensors.get(feedback.mean_memory), None
    if mean is not None and feedback.divides:  # the update goes to where gradients lie, if it may
        denominator = state.tensors["denominator"]
        if isinstance(place, Scattered) and not takes_scattered(encoder.exchange):
            place = None
        product = ProductOutput(denominator, torch.empty_like(denominator) if place is None else place)
    return context._replace(out=mean, product=product)


def _finalize(
    feedback: Feedback, mean: Flat | Entries, memory: Memory, out: Flat | None
) -> tuple[Flat | Entries, Memory]:
    """What the feedback makes of the mean, in ``out`` where it can be written there."""
    if isinstance(mean, Scattered):
        return mean, memory
    if isinstance(mean, Entries):
        if feedback.finalize_entries is None:
            return mean, memory
        if isinstance(out, Scattered) and not takes_scattered(feedback):
            out = None
        return feedback.finalize_entries(mean, memory, torch.empty_like(memory["residual"]) if out is None else out)
    if feedback.finalize_into is not None and isinstance(out, Tensor):
        return feedback.finalize_into(mean, memory, out)
    return (mean, memory) if feedback.finalize is None else feedback.finalize(mean, memory)
