"""Encoders: how a lane adds its error, encodes, and keeps the new error.

There are four. Which one serves a lane is decided when the plan is built, from what the stages declare:

    FusedTopKEncoder    feedback with an `accumulation` or an `averaging`, a selector that is `exact_topk`: one pass
                        over gradient and memories; with an `averaging`, on a CPU, one more before it
    FusedDenseEncoder   feedback with an `accumulation` and one memory, or with an `averaging`; a quantizer with a
                        `feedback_kernel`, no selector
    FusedSumEncoder     feedback with an `accumulation`; float32, for an exchange that adds payloads
    ComposedEncoder     everything else: feedback, codec and feedback again, as they are written

The law: a fused encoder makes the same messages and memories as the composed one, bit for bit.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.codecs import Codec, Decoded, EncodeInput
from gradwire.codecs.addends import max_addend
from gradwire.codecs.encoding import Encoded, encode_selected
from gradwire.codecs.quantizers import FP32
from gradwire.core import Payload, as_bytes, on
from gradwire.core.layout import Flat, takes_scattered
from gradwire.engine.state import LaneMemory, LaneState
from gradwire.engine.views import GradViews, zero_nonfinite
from gradwire.exchanges.exchange import CommContext, Exchange, Message
from gradwire.exchanges.servers import SERVER_ERROR, server_slice
from gradwire.feedback import Feedback
from gradwire.feedback.feedback import divisor
from gradwire.kernels import fused
from gradwire.kernels.dispatch import accelerated
from gradwire.kernels.momentum import momentum_topk_, next_momentum_


@dataclass(frozen=True)
class Encoder(ABC):
    """Adds the error, encodes and keeps the new error, for one feedback, codec and exchange."""

    feedback: Feedback
    codec: Codec
    exchange: Exchange

    @abstractmethod
    def encode(
        self, views: GradViews, state: LaneState, storage: LaneMemory, context: CommContext, nonfinite: list[Tensor]
    ) -> Message:
        """The message, whose memory is the new generation, as far as it is known before the exchange.

        Args:
            views: The gradients.
            state: Is only read.
            storage: Storage for new memories. It may lack some, and it may be the state's own.
            context: Of the exchange.
            nonfinite: Gets bools on the device: whether a gradient was not finite.
        """


class ComposedEncoder(Encoder):
    """The definition."""

    def encode(
        self, views: GradViews, state: LaneState, storage: LaneMemory, context: CommContext, nonfinite: list[Tensor]
    ) -> Message:
        if self._check_of_message is not None and not context.simulated and state.carried_error is None:
            return self._encode_unchecked(views, state, context, nonfinite)
        flat, on_cpu = views.flat(), views.device.type == "cpu"
        if self._only_compensates and not on_cpu and state.carried_error is None and SERVER_ERROR not in state.tensors:
            return self._compensate(flat, state, storage, nonfinite)
        flat, flag = zero_nonfinite(flat)
        nonfinite.append(flag)
        return self._encode_finite(flat, state, context)

    def _encode_unchecked(
        self, views: GradViews, state: LaneState, context: CommContext, nonfinite: list[Tensor]
    ) -> Message:
        """Encode gradients without memories. What is made of values that are not finite will be dropped."""
        quantizer, units = self.codec.quantizer, context.units
        assert quantizer.has_nonfinite is not None
        grads: Any = views.vector(widened=True) if takes_scattered(quantizer) else views.flat()
        data = quantizer.encode(grads, on(units.lengths, views.device), units.names, context.key)
        nonfinite.append(quantizer.has_nonfinite(data, units.lengths))
        encoded = Encoded(self.codec, context.key, units, None, units.lengths, data, state.tensors)
        return Message.of(encoded, state.tensors, context)

    @property
    def _check_of_message(self) -> Callable[[Tensor, tuple[int, ...]], Tensor] | None:
        """Finds values that are not finite in the message, where nothing else is made of them."""
        codec, exchange = self.codec, self.exchange
        splits = codec.selector or codec.transform or exchange.compresses_in_protocol or exchange.sends_slices
        return None if splits or self.feedback.memories else codec.quantizer.has_nonfinite

    @property
    def _only_compensates(self) -> bool:
        """Whether the exchange itself subtracts what it sends, so that this encoder only adds the error."""
        subtracts = self.exchange.subtracts_sent and tuple(self.feedback.memories) == ("residual",)
        return subtracts and self.feedback.accumulation is not None and accelerated()

    def _compensate(self, flat: Tensor, state: LaneState, storage: LaneMemory, nonfinite: list[Tensor]) -> Message:
        """Add the error in one pass. The sum lies where the exchange leaves the new error."""
        rule, old = self.feedback.accumulation, state.tensors["residual"]
        assert rule is not None
        target = storage.tensors.get("residual")
        target = torch.empty_like(old) if target is None or target is old else target
        nonfinite.append(fused.accumulate_(flat, target, None, rule, old))
        return Message(target, None, {**state.tensors, "residual": target})

    def _encode_finite(self, grad: Tensor, state: LaneState, context: CommContext) -> Message:
        """Encode gradients that are finite."""
        memory = self.codec.memory_with_gradient(grad, state.tensors, state.observed)
        target, memory = self.feedback.compensate(grad, memory)
        target, memory = self._add_carried(target, dict(memory), state, context)
        message = self.exchange.encode(EncodeInput(grad, target, memory, context.units), self.codec, context)
        if message.sent is None:
            return message
        return message._replace(memory=self.feedback.update_memory(target, message.sent, message.memory))

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


class FusedTopKEncoder(Encoder):
    """Exact top-k, where the gradients lie."""

    def encode(
        self, views: GradViews, state: LaneState, storage: LaneMemory, context: CommContext, nonfinite: list[Tensor]
    ) -> Message:
        memory = {**state.tensors, **_kernel_outputs(self.feedback.written, state, storage)}
        grads = views.vector(on_gpu=True)

        def encode_slice(start: int, stop: int) -> Message:
            window, part = context.units.window(start, stop), slice(start, stop)
            selected = self._select(grads[part], part, window.lengths, state, memory)
            nonfinite.append(selected.nonfinite)
            encoded = encode_selected(self.codec, selected.indices, selected.values, window, context.key, memory)
            self._subtract_sent_(memory, encoded, start)
            return Message.of(encoded, memory, context)

        return self.exchange.encode_slices(encode_slice, context)

    def _select(
        self, grad: Flat, part: slice, lengths: tuple[int, ...], state: LaneState, memory: dict[str, Tensor]
    ) -> fused.Selected:
        """Add a stretch of the gradients to the old memories, which makes the new ones, and select."""
        rule, averaging, selector = self.feedback.residual_rule, self.feedback.averaging, self.codec.selector
        assert rule is not None and selector is not None
        sends, after = self.codec.is_identity_on_selected, _pair(memory, part)
        before = after if memory["residual"] is state.tensors["residual"] else _pair(state.tensors, part)
        budget = lengths, tuple(map(selector.capacity, lengths))
        subtract = sends * (1 + self.feedback.masking)
        if averaging is not None:
            momentum, out = averaging.momentum(state.tensors, part), after[1] if averaging.keeps else None
            residuals = before[0], after[0]
            return momentum_topk_(grad, residuals, momentum, out, subtract, rule.decay, *budget)
        return fused.carry_topk_(grad, before, after, rule, *budget, subtract)

    def _subtract_sent_(self, memory: dict[str, Tensor], encoded: Encoded, start: int) -> None:
        """Subtract what was sent from the error, unless the kernel has done so."""
        if not self.codec.is_identity_on_selected:
            indices, values = encoded.sent
            assert indices is not None
            momentum = memory["momentum"][start:] if self.feedback.masking else None
            fused.subtract_sent_(memory["residual"][start:], momentum, indices, values)


class FusedDenseEncoder(Encoder):
    """Every entry, by a quantizer that keeps the error as it encodes."""

    def encode(
        self, views: GradViews, state: LaneState, storage: LaneMemory, context: CommContext, nonfinite: list[Tensor]
    ) -> Message:
        memory = {**state.tensors, **_kernel_outputs(self.feedback.written, state, storage)}
        in_several = self.feedback.averaging is not None and self.codec.quantizer.momentum_kernel is not None
        grads = views.vector(in_several) if takes_scattered(self.codec.quantizer) else views.flat()

        def encode_slice(start: int, stop: int) -> Message:
            window, part = context.units.window(start, stop), slice(start, stop)
            data, flag = self._keep_error(grads[part], part, window.lengths, state, memory)
            nonfinite.append(flag)
            encoded = Encoded(self.codec, context.key, window, None, window.lengths, data, memory)
            return Message.of(encoded, memory, context)

        return self.exchange.encode_slices(encode_slice, context)

    def _keep_error(
        self, grad: Flat, part: slice, lengths: tuple[int, ...], state: LaneState, memory: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The message of a stretch, and whether its gradients were nonfinite."""
        quantizer, rule, averaging = self.codec.quantizer, self.feedback.residual_rule, self.feedback.averaging
        after, old = memory["residual"], state.tensors["residual"]
        before = None if after is old else old[part]
        assert quantizer.feedback_kernel is not None and rule is not None
        if averaging is None:
            return quantizer.feedback_kernel(grad, after[part], rule.decay, lengths, before=before)
        momentum, out = averaging.momentum(state.tensors, part), memory["momentum"][part] if averaging.keeps else None
        if quantizer.momentum_kernel is not None:
            return quantizer.momentum_kernel(grad, after[part], momentum, rule.decay, lengths, before, out)
        signal = torch.empty_like(after[part]) if out is None else out  # the momentum, which enters the residual
        flag = next_momentum_(grad, momentum, signal)
        return quantizer.feedback_kernel(signal, after[part], rule.decay, lengths, before=before)[0], flag


class FusedSumEncoder(Encoder):
    """Every entry as it is, to be added up."""

    def encode(
        self, views: GradViews, state: LaneState, storage: LaneMemory, context: CommContext, nonfinite: list[Tensor]
    ) -> Message:
        rule, everything = self.feedback.accumulation, slice(None)
        assert rule is not None
        memory = {**state.tensors, **_kernel_outputs(self.feedback.written, state, storage)}
        after = _pair(memory, everything)
        before = after if memory["residual"] is state.tensors["residual"] else _pair(state.tensors, everything)
        limit = max_addend(torch.float32, context.world)
        sent, flag = fused.feedback_sum_(views.flat(), before, after, rule, limit)
        nonfinite.append(flag)
        if context.simulated:
            return Message(None, Decoded(None, sent), memory)
        return Message(Payload(as_bytes(sent)), None, memory)


def encoder_for(feedback: Feedback, codec: Codec, exchange: Exchange, others: Sequence[Exchange] = ()) -> Encoder:
    """The encoder that serves a lane; ``others`` are the exchanges of the lane's other steps."""
    # An exchange with an error of its own may leave it to another, which then has to add it.
    leaves = any(other.keeps_server_error for other in others) and not exchange.keeps_server_error
    rule = feedback.accumulation
    as_it_is = isinstance(codec.quantizer, FP32) and codec.traits.lossless and exchange.adds_payloads
    if accelerated() and not leaves and rule is not None and as_it_is:
        return FusedSumEncoder(feedback, codec, exchange)
    composes = exchange.compresses_in_protocol or codec.transform is not None or codec.traits.linear or leaves
    if not accelerated() or composes:
        return ComposedEncoder(feedback, codec, exchange)
    averages = feedback.averaging is not None
    if (rule is not None or averages) and codec.selector is not None and codec.selector.exact_topk:
        return FusedTopKEncoder(feedback, codec, exchange)
    one_memory = rule is not None and tuple(feedback.memories) == ("residual",)
    fuses = codec.quantizer.fuses and codec.quantizer.feedback_kernel is not None
    if codec.selector is None and fuses and (one_memory or averages):
        return FusedDenseEncoder(feedback, codec, exchange)
    return ComposedEncoder(feedback, codec, exchange)


def _kernel_outputs(names: Sequence[str], state: LaneState, storage: LaneMemory) -> dict[str, Tensor]:
    """Where new memories go that kernels write."""
    there = storage.tensors
    return {name: there[name] if name in there else torch.empty_like(state.tensors[name]) for name in names}


def _pair(memory: dict[str, Tensor], part: slice) -> tuple[Tensor, Tensor | None]:
    """Residual, and momentum, if there is one."""
    momentum = memory.get("momentum")
    return memory["residual"][part], None if momentum is None else momentum[part]
