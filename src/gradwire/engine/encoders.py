"""Encoders: how a lane adds its error, encodes, and keeps the new error.

There are three. Which one serves a lane is decided when the plan is built, from what the stages declare:

    FusedTopK    feedback with an `accumulation`, a selector that is `exact_topk`: one pass over gradient and memories
    FusedDense   feedback with an `accumulation` and no momentum, a quantizer with a `feedback_kernel`, no selector
    Composed     everything else: feedback, codec and feedback again, as they are written

The law: a fused encoder makes the same messages and memories as the composed one, bit for bit.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from gradwire.codecs.codec import Codec
from gradwire.codecs.encoding import encode_selected
from gradwire.codecs.stage import Decoded, EncodeInput
from gradwire.core.payload import Payload
from gradwire.core.segments import Segments
from gradwire.engine.state import Generation, LaneState
from gradwire.engine.views import ContiguousRun, GradViews
from gradwire.exchanges.exchange import CommContext, Exchange, Message, ShardMessage
from gradwire.exchanges.shards import shard
from gradwire.feedback import Feedback
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
    keeps_spare: ClassVar[bool] = False  # on a CPU, the old memories' storage is worth keeping for the next step

    @abstractmethod
    def encode(
        self, views: GradViews, state: LaneState, new: Generation, context: CommContext, flags: list[Tensor]
    ) -> EncodedLane:
        """Encode the gradients.

        Args:
            views: The gradients.
            state: Is only read.
            new: Storage for new memories. It may lack some, and it may be the state's own.
            context: Of the exchange.
            flags: Gets bools on the device: whether a gradient was not finite.
        """


class Composed(Encoder):
    """The definition."""

    def encode(
        self, views: GradViews, state: LaneState, new: Generation, context: CommContext, flags: list[Tensor]
    ) -> EncodedLane:
        flat, on_cpu = views.flat(), views.device.type == "cpu"
        if self._only_compensates and not on_cpu and state.carried is None and "served" not in state.tensors:
            return self._compensate(flat, state, new, flags)
        check = None if on_cpu else self._check_of_message
        if check is None:
            flat, bad = zero_nonfinite(flat)
            flags.append(bad)
        encoded = self.encode_flat(flat, state, context)
        if check is not None:  # what was encoded of values that are not finite will be dropped
            assert isinstance(encoded.message.content, Payload)
            flags.append(check(encoded.message.content.data, context.units.lengths))
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
        settles = self.exchange.settles and tuple(self.feedback.memories) == ("residual",)
        return settles and self.feedback.accumulation is not None and accelerated()

    def _compensate(self, flat: Tensor, state: LaneState, new: Generation, flags: list[Tensor]) -> EncodedLane:
        """Add the error in one pass. The sum lies where the exchange leaves the new error."""
        rule, old = self.feedback.accumulation, state.tensors["residual"]
        assert rule is not None
        target = new.tensors.get("residual")
        target = torch.empty_like(old) if target is None or target is old else target
        flags.append(fused.accumulate_(flat, target, None, rule, old))
        return EncodedLane(Message(target, None, {**state.tensors, "residual": target}), target)

    def encode_flat(self, grad: Tensor, state: LaneState, context: CommContext) -> EncodedLane:
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
        if state.carried is not None:
            target = target + state.carried
        if "served" in memory and not (self.exchange.serves and context.keeps_error):
            start, stop = shard(context.units.total, context.world, context.key.rank)
            target = target.clone()
            target[start:stop] += context.world * memory["served"]
            memory["served"] = torch.zeros_like(memory["served"])
        return target, memory


class FusedTopK(Encoder):
    """Exact top-k, where the gradients lie."""

    keeps_spare: ClassVar[bool] = True

    def encode(
        self, views: GradViews, state: LaneState, new: Generation, context: CommContext, flags: list[Tensor]
    ) -> EncodedLane:
        memory = {**state.tensors, **_room(self.feedback, state, new)}
        whole = context.units == context.tensors and not self.exchange.cuts and views.device.type == "cpu"
        runs = views.runs() if whole and views.width == torch.float32 else _one_run(views)

        def encode_shard(start: int, stop: int) -> ShardMessage:
            window = _window(context.units, start, stop)
            cut = runs if len(runs) > 1 else [ContiguousRun(start, runs[0].flat[start:stop], window.lengths)]
            found = [self.select(run, state, memory, flags) for run in cut]
            encoded = encode_selected(self.codec, *_together(found, cut), window, context.key, memory)
            self.settle_(memory, encoded.sent, start)
            return ShardMessage(encoded.payload, None, memory)

        return EncodedLane(self.exchange.encode_shards(encode_shard, context))

    def select(
        self, run: ContiguousRun, state: LaneState, memory: dict[str, Tensor], flags: list[Tensor]
    ) -> fused.Selected:
        """Add a run's gradients to the old memories, which makes the new ones, and select."""
        rule = self.feedback.accumulation
        assert rule is not None and self.codec.selector is not None
        part = slice(run.start, run.start + run.flat.numel())
        after = _pair(memory, part)
        before = after if memory["residual"] is state.tensors["residual"] else _pair(state.tensors, part)
        counts = tuple(map(self.codec.selector.capacity, run.lengths))
        about = rule, run.lengths, counts, None
        if self.codec.is_identity_on_selected:
            found = fused.send_topk_(run.flat, before, after, self.feedback.masks, *about)
        else:
            found = fused.carry_topk_(run.flat, before, after, *about)
        flags.append(found.broken)
        return found

    def settle_(self, memory: dict[str, Tensor], sent: Decoded, start: int = 0) -> None:
        """Take what was sent off the error, unless the kernel has done so."""
        if not self.codec.is_identity_on_selected:
            assert sent.indices is not None
            residual, momentum = _pair(memory, slice(start, None))
            fused.settle_(residual, momentum if self.feedback.masks else None, sent.indices, sent.values)


class FusedDense(Encoder):
    """Every entry, by a quantizer that keeps the error as it encodes."""

    def encode(
        self, views: GradViews, state: LaneState, new: Generation, context: CommContext, flags: list[Tensor]
    ) -> EncodedLane:
        memory = {**state.tensors, **_room(self.feedback, state, new)}
        (run,) = _one_run(views)

        def encode_shard(start: int, stop: int) -> ShardMessage:
            payload = self.quantize(run.flat, start, stop, context.units, state, memory, flags)
            return ShardMessage(payload, None, memory)

        return EncodedLane(self.exchange.encode_shards(encode_shard, context))

    def quantize(
        self,
        flat: Tensor,
        start: int,
        stop: int,
        units: Segments,
        state: LaneState,
        memory: dict[str, Tensor],
        flags: list[Tensor],
    ) -> Payload:
        """The payload of ``[start, stop)``."""
        kernel, rule = self.codec.quantizer.feedback_kernel, self.feedback.accumulation
        assert kernel is not None and rule is not None
        after, old = memory["residual"], state.tensors["residual"]
        before = None if after is old else old[start:stop]
        lengths = _window(units, start, stop).lengths
        data, bad = kernel(flat[start:stop], after[start:stop], rule.decay, lengths, before=before)
        flags.append(bad)
        return Payload(data)


def encoder_for(feedback: Feedback, codec: Codec, exchange: Exchange, others: Sequence[Exchange] = ()) -> Encoder:
    """The encoder that serves a lane; ``others`` are the exchanges of the lane's other steps."""
    # An exchange with an error of its own may leave it to another, which then has to add it.
    leaves = any(other.serves for other in others) and not exchange.serves
    rule = feedback.accumulation
    composes = exchange.compresses_in_protocol or codec.transform is not None or codec.traits.linear or leaves
    if accelerated() and rule is not None and not composes:
        if codec.selector is not None and codec.selector.exact_topk:
            return FusedTopK(feedback, codec, exchange)
        if codec.selector is None and tuple(feedback.memories) == ("residual",) and codec.quantizer.feedback_kernel:
            return FusedDense(feedback, codec, exchange)
    return Composed(feedback, codec, exchange)


def zero_nonfinite(flat: Tensor, ranks: int = 1) -> tuple[Tensor, Tensor]:
    """The gradients of so many ranks, with zeros for each that has an entry not finite; and whether there was one.

    What is encoded of it will be dropped by all ranks.
    """
    if flat.device.type == "cpu" and torch.isfinite(flat.sum()):  # then all are, which is slow to see one by one
        return flat, torch.tensor(False)
    rows = flat.view(ranks, -1)
    # The largest magnitude tells in one pass, where `isfinite` of every entry takes five.
    fine = torch.isfinite(torch.linalg.vector_norm(rows, torch.inf, 1)) if flat.numel() else rows.new_ones(ranks).bool()
    bad = ~fine.all()
    if flat.device.type == "cpu" and not bad:  # on another device, looking would mean waiting
        return flat, bad
    return torch.where(fine[:, None], rows, 0.0).view(-1), bad


def _room(feedback: Feedback, state: LaneState, new: Generation) -> dict[str, Tensor]:
    """Where new memories go that kernels write."""
    missing = [name for name in feedback.memories if name not in new.tensors]
    return {
        **{name: torch.empty_like(state.tensors[name]) for name in missing},
        **{name: x for name, x in new.tensors.items() if name in feedback.memories},
    }


def _pair(memory: dict[str, Tensor], part: slice) -> tuple[Tensor, Tensor | None]:
    """Residual and momentum, if there is one."""
    momentum = memory.get("momentum")
    return memory["residual"][part], None if momentum is None else momentum[part]


def _one_run(views: GradViews) -> list[ContiguousRun]:
    """The gradients end to end. Kernels of a CPU widen 16-bit ones as they go."""
    flat = views.flat(views.width if views.device.type == "cpu" else torch.float32)
    return [ContiguousRun(0, flat, tuple(x.numel() for x in views.grads))]


def _together(found: Sequence[fused.Selected], runs: Sequence[ContiguousRun]) -> tuple[Tensor, Tensor]:
    """The positions and values that several runs selected."""
    if len(found) == 1:
        return found[0].indices, found[0].values
    indices = [one.indices + run.start for one, run in zip(found, runs, strict=True)]
    return torch.cat(indices), torch.cat([one.values for one in found])


def _window(units: Segments, start: int, stop: int) -> Segments:
    return units if (start, stop) == (0, units.total) else units.window(start, stop)
