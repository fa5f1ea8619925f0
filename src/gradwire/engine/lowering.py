"""Lowering: where a fused kernel exists for a pair of feedback and codec, a lane runs it instead of the composition.

The law is that nobody can tell, but for time: the same messages, the same memories. The old memories stay until the
step is committed, since it may still be dropped: kernels write new ones, unless they are told to write over the old.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from gradwire.codecs.codec import Codec
from gradwire.codecs.quantizers import Sign
from gradwire.codecs.quantizers.integer import AbsMax
from gradwire.codecs.selectors import TopK
from gradwire.codecs.stage import Decoded, Memory
from gradwire.core.keys import Key
from gradwire.core.payload import Payload
from gradwire.core.segments import Segments
from gradwire.exchanges.exchange import Exchange, ShardMessage
from gradwire.feedback import Feedback, MomentumCorrection, Residual
from gradwire.kernels import fused
from gradwire.kernels.dispatch import accelerated


def rule_of(feedback: Feedback) -> fused.Accumulation | None:
    """How a feedback accumulates, if the kernels know it."""
    if isinstance(feedback, Residual):
        return fused.Accumulation(decay=feedback.decay)
    if isinstance(feedback, MomentumCorrection):
        return fused.Accumulation(feedback.momentum, feedback.nesterov)
    return None


def lowers(feedback: Feedback, codec: Codec, exchange: Exchange) -> bool:
    """Whether a fused kernel serves this lane."""
    if not accelerated() or exchange.late or codec.transform is not None or codec.traits.linear:
        return False
    if isinstance(codec.selector, TopK):
        return rule_of(feedback) is not None
    plain = codec.selector is None and isinstance(codec.quantizer, Sign | AbsMax)
    return plain and isinstance(feedback, Residual)


@lru_cache(maxsize=256)
def _hint(start: int, counts: tuple[int, ...]) -> str:
    """Where a hint is kept: that of one stretch and density. It may be lost without harm."""
    return f"edge {start} {counts}"


@dataclass
class FusedSpeaker:
    """Compensates, encodes and settles one lane's buffers, stretch by stretch.

    New memories are written to ``room``, as far as there is any, else to tensors of their own. It may be the old ones.
    After speaking, ``broken`` holds a tensor per stretch: whether the gradient had anything there that is not finite.
    """

    grad: Tensor
    memory: Memory
    units: Segments
    codec: Codec
    feedback: Feedback
    key: Key
    room: Memory = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.broken: list[Tensor] = []
        self._held = {**self.memory, **{name: self._new(name) for name in self.feedback.memories}}

    def _new(self, name: str) -> Tensor:
        """Where a new memory goes."""
        room = self.room.get(name)
        return torch.empty_like(self.memory[name]) if room is None else room

    def say(self, start: int, stop: int) -> ShardMessage:
        """The message of ``[start, stop)``."""
        window = self.units if (start, stop) == (0, self.units.total) else self.units.window(start, stop)
        speak = self._selected if self.codec.selector else self._dense
        return ShardMessage(speak(slice(start, stop), window), None, self._held)

    def hear(self) -> Decoded:
        """What the group would hear of the whole buffer's message, which is not written."""
        whole = slice(0, self.units.total)
        if self.codec.selector:
            found, settle = self._select(whole, self.units)
            sent = self.codec.echo_selected(found.indices, found.values, self.units, self.key)
            settle(sent)
            return sent
        said = self._dense(whole, self.units)
        counts = self.units.lengths_on(self.grad.device)
        return Decoded(None, self.codec.quantizer.decode(said.data, counts, self.units.names, self.key))

    @property
    def memory_after(self) -> Memory:
        return self._held

    def _selected(self, stretch: slice, window: Segments) -> Payload:
        found, settle = self._select(stretch, window)
        payload, sent = self.codec.encode_selected(found.indices, found.values, window, self.key)
        settle(sent)
        return payload

    def _select(self, stretch: slice, window: Segments) -> tuple[fused.Selected, Callable[[Decoded], None]]:
        """Accumulate and select; and how to settle what will have been heard."""
        rule = rule_of(self.feedback)
        assert rule is not None and self.codec.selector is not None
        after = self._part(self._held, stretch)
        before = after if self._in_place else self._part(self.memory, stretch)
        counts = self.codec.capacities(window)
        hint = _hint(stretch.start, counts)
        about = rule, window.lengths, counts, self._held.get(hint)
        masks = bool(getattr(self.feedback, "masking", False))
        if self.codec.plain:
            found = fused.send_topk_(self.grad[stretch], before, after, masks, *about)
        else:
            found = fused.carry_topk_(self.grad[stretch], before, after, *about)
        self._held[hint] = found.edge
        self.broken.append(found.broken)

        def settle(sent: Decoded) -> None:
            assert sent.indices is not None
            if not self.codec.plain:
                fused.settle_(after[0], after[1] if masks else None, sent.indices, sent.values)

        return found, settle

    @property
    def _in_place(self) -> bool:
        return self._held["residual"] is self.memory["residual"]

    def _part(self, held: Memory, stretch: slice) -> tuple[Tensor, Tensor | None]:
        """Residual and momentum, if there is one."""
        carries = isinstance(self.feedback, MomentumCorrection)
        return held["residual"][stretch], held["momentum"][stretch] if carries else None

    def _dense(self, stretch: slice, window: Segments) -> Payload:
        assert isinstance(self.feedback, Residual)
        quantizer, before = self.codec.quantizer, None if self._in_place else self.memory["residual"][stretch]
        about = (self.grad[stretch], self._held["residual"][stretch], self.feedback.decay, window.lengths)
        if isinstance(quantizer, Sign):
            data, broken = fused.feedback_sign_(*about, quantizer.scale == "norm", before)
        else:
            assert isinstance(quantizer, AbsMax)
            data, broken = fused.feedback_integer_(*about, quantizer.bits, quantizer.block, before)
        self.broken.append(broken)
        return Payload(data)
