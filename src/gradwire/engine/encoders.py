"""Encoders: how a lane adds its error, encodes, and keeps the new error.

There are four. Which one serves a lane is decided when the plan is built, from what the stages declare:

    FusedTopK    feedback with an `accumulation`, a selector that is `exact_topk`: one pass over gradient and memories;
                 with an `averaging`, one more before it
    FusedDense   feedback with an `accumulation` and one memory, or with an `averaging`; a quantizer with a
                 `feedback_kernel`, no selector
    FusedSum     feedback with an `accumulation`; float32, for an exchange that adds payloads
    Composed     everything else: feedback, codec and feedback again, as they are written

The law: a fused encoder makes the same messages and memories as the composed one, bit for bit.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from gradwire.codecs.addends import max_addend
from gradwire.codecs.codec import Codec
from gradwire.codecs.encoding import Encoded, encode_selected
from gradwire.codecs.quantizers import FP32
from gradwire.codecs.stage import Decoded, EncodeInput
from gradwire.core.payload import Payload, as_bytes
from gradwire.core.segments import Segments
from gradwire.engine.kernel_memories import enter_momentum, kernel_outputs
from gradwire.engine.kernel_memories import pair_of as _pair
from gradwire.engine.state import Generation, LaneState
from gradwire.engine.views import ContiguousRun, GradViews, zero_nonfinite
from gradwire.exchanges.exchange import CommContext, Exchange, Message
from gradwire.exchanges.servers import SERVER_ERROR, server_slice
from gradwire.feedback import Feedback
from gradwire.feedback.feedback import divisor
from gradwire.kernels import fused
from gradwire.kernels.dispatch import accelerated


class EncodedLane(NamedTuple):
    """A lane's message, and what else the step needs of it.

    Attributes:
        message: Whose memory is the new generation, as far as it is known.
        target: What should have been sent, for exchanges that compress in their protocol.
    """

    message: Message
    target: Tensor | None = None


@dataclass(frozen=True)
class Encoder(ABC):
    """Adds the error, encodes and keeps the new error, for one feedback, codec and exchange."""

    feedback: Feedback
    codec: Codec
    exchange: Exchange
    reuses_memories: ClassVar[bool] = False  # on a CPU, the old memories' storage is worth keeping for the next step

    @abstractmethod
    def encode(
        self, views: GradViews, state: LaneState, storage: Generation, context: CommContext, nonfinite: list[Tensor]
    ) -> EncodedLane:
        """Encode the gradients.

        Args:
            views: The gradients.
            state: Is only read.
            storage: Storage for new memories. It may lack some, and it may be the state's own.
            context: Of the exchange.
            nonfinite: Gets bools on the device: whether a gradient was not finite.
        """


class Composed(Encoder):
    """The definition."""

    def encode(
        self, views: GradViews, state: LaneState, storage: Generation, context: CommContext, nonfinite: list[Tensor]
    ) -> EncodedLane:
        flat, on_cpu = views.flat(), views.device.type == "cpu"
        if self._only_compensates and not on_cpu and state.carried_error is None and SERVER_ERROR not in state.tensors:
            return self._compensate(flat, state, storage, nonfinite)
        check = None if on_cpu or context.simulated else self._check_of_message
        if check is None:
            flat, flag = zero_nonfinite(flat, context.world if context.simulated else 1)
            nonfinite.append(flag)
        encoded = self._encode_finite(flat, state, context)
        if check is not None:  # what was encoded of values that are not finite will be dropped
            assert isinstance(encoded.message.content, Payload)
            nonfinite.append(check(encoded.message.content.data, context.units.lengths))
        return encoded

    @property
    def _check_of_message(self) -> Callable[[Tensor, tuple[int, ...]], Tensor] | None:
        """Finds values that are not finite in the message, where nothing else is made of them."""
        codec, exchange = self.codec, self.exchange
        splits = codec.selector or codec.transform or exchange.compresses_in_protocol or exchange.cuts
        return None if splits or self.feedback.memories else codec.quantizer.has_nonfinite

    @property
    def _only_compensates(self) -> bool:
        """Whether the exchange takes off what it sends, and all that is left is to add the error."""
        subtracts = self.exchange.subtracts_sent and tuple(self.feedback.memories) == ("residual",)
        return subtracts and self.feedback.accumulation is not None and accelerated()

    def _compensate(self, flat: Tensor, state: LaneState, storage: Generation, nonfinite: list[Tensor]) -> EncodedLane:
        """Add the error in one pass. The sum lies where the exchange leaves the new error."""
        rule, old = self.feedback.accumulation, state.tensors["residual"]
        assert rule is not None
        target = storage.tensors.get("residual")
        target = torch.empty_like(old) if target is None or target is old else target
        nonfinite.append(fused.accumulate_(flat, target, None, rule, old))
        return EncodedLane(Message(target, None, {**state.tensors, "residual": target}), target)

    def _encode_finite(self, grad: Tensor, state: LaneState, context: CommContext) -> EncodedLane:
        """The same of a finite gradient."""
        memory = self.codec.absorb(grad, state.tensors, state.observed)
        target, memory = self.feedback.compensate(grad, memory)
        target, memory = self._add_carried(target, dict(memory), state, context)
        message = self.exchange.encode(EncodeInput(grad, target, memory, context.units), self.codec, context)
        if message.sent is None:
            return EncodedLane(message, target)
        return EncodedLane(message._replace(memory=self.feedback.update_memory(target, message.sent, message.memory)))

    def _add_carried(
        self, target: Tensor, memory: dict[str, Tensor], state: LaneState, context: CommContext
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Add errors that an earlier spec or exchange left behind."""
        if state.carried_error is not None:  # in units of updates
            target = target + (state.carried_error / divisor(memory) if self.feedback.divides else state.carried_error)
        if SERVER_ERROR in memory and self.feedback.keeps_error and not self.exchange.keeps_server_error:
            start, stop = server_slice(context.units.total, context.world, context.key.rank)
            target = target.clone()
            target[start:stop] += context.world * memory[SERVER_ERROR]
            memory[SERVER_ERROR] = torch.zeros_like(memory[SERVER_ERROR])
        return target, memory


class FusedTopK(Encoder):
    """Exact top-k, where the gradients lie."""

    reuses_memories: ClassVar[bool] = True

    def encode(
        self, views: GradViews, state: LaneState, storage: Generation, context: CommContext, nonfinite: list[Tensor]
    ) -> EncodedLane:
        memory = {**state.tensors, **kernel_outputs(self.feedback.written, state, storage)}
        by_layer = context.units == context.tensors and not self.exchange.cuts and views.device.type == "cpu"
        runs = views.runs() if by_layer and views.common_dtype == torch.float32 else _one_run(views)

        def encode_slice(start: int, stop: int) -> Message:
            window = _window(context.units, start, stop)
            cut = runs if len(runs) > 1 else [ContiguousRun(start, runs[0].flat[start:stop], window.lengths)]
            selected = [self._select(run, state, memory, nonfinite) for run in cut]
            encoded = encode_selected(self.codec, *_together(selected, cut), window, context.key, memory)
            self._subtract_sent_(memory, encoded, start)
            return Message.of(encoded, memory, context)

        return EncodedLane(self.exchange.encode_slices(encode_slice, context))

    def _select(
        self, run: ContiguousRun, state: LaneState, memory: dict[str, Tensor], nonfinite: list[Tensor]
    ) -> fused.Selected:
        """Add a run's gradients to the old memories, which makes the new ones, and select."""
        rule = self.feedback.residual_rule
        assert rule is not None and self.codec.selector is not None
        part = slice(run.start, run.start + run.flat.numel())
        signal, flag = enter_momentum(self.feedback, run.flat, part, state, memory)
        after = _pair(memory, part, flag is None)
        before = after if memory["residual"] is state.tensors["residual"] else _pair(state.tensors, part, flag is None)
        budget = rule, run.lengths, tuple(map(self.codec.selector.capacity, run.lengths))
        if self.codec.is_identity_on_selected:
            selected = fused.send_topk_(signal, before, after, self.feedback.masks, *budget)
            if self.feedback.masks and flag is not None:
                memory["momentum"][part].index_fill_(0, selected.indices, 0.0)
        else:
            selected = fused.carry_topk_(signal, before, after, *budget)
        nonfinite.append(selected.nonfinite if flag is None else flag)
        return selected

    def _subtract_sent_(self, memory: dict[str, Tensor], encoded: Encoded, start: int) -> None:
        """Take what was sent off the error, unless the kernel has done so."""
        if not self.codec.is_identity_on_selected:
            indices, values = encoded.sent
            assert indices is not None
            momentum = memory["momentum"][start:] if self.feedback.masks else None
            fused.subtract_sent_(memory["residual"][start:], momentum, indices, values)


class FusedDense(Encoder):
    """Every entry, by a quantizer that keeps the error as it encodes."""

    def encode(
        self, views: GradViews, state: LaneState, storage: Generation, context: CommContext, nonfinite: list[Tensor]
    ) -> EncodedLane:
        memory = {**state.tensors, **kernel_outputs(self.feedback.written, state, storage)}
        flat = _one_run(views)[0].flat

        def encode_slice(start: int, stop: int) -> Message:
            window, part = _window(context.units, start, stop), slice(start, stop)
            data, flag = self._keep_error(flat[part], part, window.lengths, state, memory)
            nonfinite.append(flag)
            encoded = Encoded(self.codec, context.key, window, None, window.lengths, data, memory)
            return Message.of(encoded, memory, context)

        return EncodedLane(self.exchange.encode_slices(encode_slice, context))

    def _keep_error(
        self, grad: Tensor, part: slice, lengths: tuple[int, ...], state: LaneState, memory: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The message of a stretch, and whether its gradients were nonfinite."""
        quantizer, rule, averaging = self.codec.quantizer, self.feedback.residual_rule, self.feedback.averaging
        after, old = memory["residual"], state.tensors["residual"]
        before = None if after is old else old[part]
        assert quantizer.feedback_kernel is not None and rule is not None
        if averaging is not None and quantizer.momentum_kernel is not None:
            momentum, out = (
                averaging.momentum(state.tensors, part),
                memory["momentum"][part] if averaging.keeps else None,
            )
            return quantizer.momentum_kernel(grad, after[part], momentum, rule.decay, lengths, before, out)
        signal, flag = enter_momentum(self.feedback, grad, part, state, memory)
        data, nonfinite = quantizer.feedback_kernel(signal, after[part], rule.decay, lengths, before=before)
        return data, nonfinite if flag is None else flag


class FusedSum(Encoder):
    """Every entry as it is, to be added up."""

    reuses_memories: ClassVar[bool] = True

    def encode(
        self, views: GradViews, state: LaneState, storage: Generation, context: CommContext, nonfinite: list[Tensor]
    ) -> EncodedLane:
        rule, everything = self.feedback.accumulation, slice(None)
        assert rule is not None
        memory = {**state.tensors, **kernel_outputs(self.feedback.written, state, storage)}
        after = _pair(memory, everything)
        before = after if memory["residual"] is state.tensors["residual"] else _pair(state.tensors, everything)
        limit = max_addend(torch.float32, context.world)
        sent, flag = fused.feedback_sum_(views.flat(), before, after, rule, limit)
        nonfinite.append(flag)
        if context.simulated:
            return EncodedLane(Message(None, Decoded(None, sent), memory))
        return EncodedLane(Message(Payload(as_bytes(sent)), None, memory))


def encoder_for(feedback: Feedback, codec: Codec, exchange: Exchange, others: Sequence[Exchange] = ()) -> Encoder:
    """The encoder that serves a lane; ``others`` are the exchanges of the lane's other steps."""
    # An exchange with an error of its own may leave it to another, which then has to add it.
    leaves = any(other.keeps_server_error for other in others) and not exchange.keeps_server_error
    rule = feedback.accumulation
    as_it_is = isinstance(codec.quantizer, FP32) and codec.traits.lossless and exchange.adds_payloads
    if accelerated() and not leaves and rule is not None and as_it_is:
        return FusedSum(feedback, codec, exchange)
    composes = exchange.compresses_in_protocol or codec.transform is not None or codec.traits.linear or leaves
    if not accelerated() or composes:
        return Composed(feedback, codec, exchange)
    averages = feedback.averaging is not None
    if (rule is not None or averages) and codec.selector is not None and codec.selector.exact_topk:
        return FusedTopK(feedback, codec, exchange)
    one_memory = rule is not None and tuple(feedback.memories) == ("residual",)
    if codec.selector is None and codec.quantizer.feedback_kernel and (one_memory or averages):
        return FusedDense(feedback, codec, exchange)
    return Composed(feedback, codec, exchange)


def _one_run(views: GradViews) -> list[ContiguousRun]:
    """The gradients end to end. Kernels of a CPU widen 16-bit ones as they go."""
    flat = views.flat(views.common_dtype if views.device.type == "cpu" else torch.float32)
    return [ContiguousRun(0, flat, tuple(x.numel() for x in views.grads))]


def _together(selected: Sequence[fused.Selected], runs: Sequence[ContiguousRun]) -> tuple[Tensor, Tensor]:
    """The positions and values that several runs selected."""
    if len(selected) == 1:
        return selected[0].indices, selected[0].values
    indices = [one.indices + run.start for one, run in zip(selected, runs, strict=True)]
    return torch.cat(indices), torch.cat([one.values for one in selected])


def _window(units: Segments, start: int, stop: int) -> Segments:
    return units if (start, stop) == (0, units.total) else units.window(start, stop)
