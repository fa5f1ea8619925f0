"""Codec: ``transform? | selector? | quantizer | index coder``, the one way a vector becomes bytes.

Wire, in this order and with no padding between the parts:

    count     uint32, little-endian; only when the length of the message is not known beforehand
    indices   by the index coder; absent when nothing was selected or receivers can redraw the choice
    values    by the quantizer

`encoding` writes messages, `decoding` reads them, `addends` has what payloads need that are added as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gradwire.codecs.checks import check_capacity
from gradwire.codecs.decoding import Decoder
from gradwire.codecs.encoding import Encoded, encode
from gradwire.codecs.indices import Rice
from gradwire.codecs.quantizers import FP32
from gradwire.codecs.stage import EncodeInput, IndexCoder, Memory, Quantizer, Selector, Stage, Transform
from gradwire.core import Key, Payload, Segments, Traits, parse
from gradwire.core.payload import COUNT_BYTES
from gradwire.core.renamed import renamed_attributes

_ORDER = (Transform, Selector, Quantizer, IndexCoder)
_WORDS = ("transform", "selector", "quantizer", "index coder")

# The old names of one release.
_RENAMED = {name: f"decoder.{name}" for name in ("total", "mean", "entries", "merge", "expand")}
_RENAMED |= {"sparse": "decoder.is_sparse", "steady": "with_fixed_length", "plain": "is_identity_on_selected"}
_RENAMED |= {"absorb": "memory_with_gradient"}


@renamed_attributes(_RENAMED)
@dataclass(frozen=True)
class Codec:
    """A chain of stages with every slot filled."""

    transform: Transform | None
    selector: Selector | None
    quantizer: Quantizer
    indices: IndexCoder | None  # None when no index ever travels

    @classmethod
    def of(cls, stages: Sequence[Stage]) -> "Codec":
        """Fill the slots in order; what is left out gets its default: fp32 values, Rice-coded indices.

        Raises:
            ValueError: The stages stand in the wrong order, or do not go together.
        """
        by_slot = _by_slot(stages)
        transform, selector, coder = by_slot.get(0), by_slot.get(1), by_slot.get(3)
        sends_indices = selector is not None and not selector.receivers_redraw
        if coder is not None and not sends_indices:
            reason = f"all ranks can redraw {selector}" if selector else "every entry is sent"
            raise ValueError(f"{coder} has no indices to code: {reason}; leave {coder} out")
        if transform is not None and selector is not None and selector.memories:
            raise ValueError(
                f"{selector} remembers coordinates, which {transform} mixes differently at every step; drop one of them"
            )
        return cls(transform, selector, by_slot.get(2, FP32()), coder or (Rice() if sends_indices else None))

    def stages(self) -> tuple[Stage, ...]:
        """The stages as one would write them: defaults left out, but never all of them."""
        quantizer = None if self.selector and self.quantizer == FP32() else self.quantizer
        indices = None if self.indices == Rice() else self.indices
        return tuple(s for s in (self.transform, self.selector, quantizer, indices) if s)

    def __str__(self) -> str:
        return " | ".join(map(str, self.stages()))

    def __or__(self, stage: Stage) -> "Codec":
        return Codec.of((*self.stages(), stage))

    def with_fixed_length(self) -> "Codec":
        """The same codec with messages of known length, which need no agreement on it, if it can have them."""
        if self.selector is not None and self.selector.traits.fixed and self.indices == Rice():
            return replace(self, indices=Rice(static=True))
        return self

    @cached_property
    def traits(self) -> Traits:
        quantizer = self.quantizer.traits
        selector = self.selector.traits if self.selector else Traits(True, True, True, True)
        return Traits(
            linear=quantizer.linear and selector.linear,
            unbiased=quantizer.unbiased and selector.unbiased,
            contraction=quantizer.contraction and selector.contraction,
            lossless=quantizer.lossless and self.selector is None and self.transform is None,
            fixed=selector.fixed and (self.indices is None or self.indices.fixed),
        )

    @property
    def memories(self) -> tuple[str, ...]:
        return self.selector.memories if self.selector else ()

    @cached_property
    def is_identity_on_selected(self) -> bool:
        """Whether receivers decode all selected entries, and exactly."""
        whole = self.indices is None or self.indices.drop_overflow is None
        return self.transform is None and self.quantizer.traits.lossless and whole

    def memory_with_gradient(self, grad: Tensor, memory: Memory, observed: Tensor | None) -> Memory:
        """The lane's memory with what the selector keeps of today's gradient."""
        memory_with_gradient = self.selector.memory_with_gradient if self.selector else None
        return memory if memory_with_gradient is None else memory_with_gradient(grad, memory, observed)

    def transformed(self, segments: Segments) -> Segments:
        """The segment table after the transform."""
        return self.transform.widen(segments) if self.transform else segments

    def capacities(self, table: Segments) -> tuple[int, ...]:
        """The most entries that each segment may send; ``table`` is the one after the transform."""
        return _capacities(self.selector, table.lengths) if self.selector else table.lengths

    def counts(self, indices: Tensor | None, table: Segments) -> tuple[int, ...]:
        """How many rising positions lie in each segment. Mostly as many as may: then the device is not read."""
        most = self.capacities(table)
        if indices is None or indices.numel() == sum(most):
            return most
        counts: list[int] = torch.searchsorted(indices, table.offsets_on(indices.device)).diff().tolist()
        return tuple(counts)

    def coder(self, table: Segments) -> IndexCoder | None:
        """The index coder, with what it may use of the table."""
        return self.indices.bind(table) if self.indices and self.indices.bind else self.indices

    @cached_property
    def header_bytes(self) -> int:
        return 0 if self.indices is None or self.traits.fixed else COUNT_BYTES

    def size(self, segments: Segments) -> int:
        """The most bytes a message for this buffer may take; exact when the codec is `fixed`."""
        table = self.transformed(segments)
        counts, coder = self.capacities(table), self.coder(table)
        index_bytes = coder.size(sum(counts), table.total) if coder else 0
        return self.header_bytes + index_bytes + self.quantizer.size(counts)

    def fixed_size(self, segments: Segments) -> int | None:
        """The length of all messages for this buffer; None where it varies."""
        return self.size(segments) if self.traits.fixed else None

    def length(self, indices: Tensor, counts: tuple[int, ...], table: Segments) -> tuple[int, Tensor | None]:
        """How long the message of these positions is, ``counts`` in each segment.

        In two parts: bytes that are known here, and those that only the device has counted, if there are such.
        """
        total, coder, n = self.header_bytes + self.quantizer.size(counts), self.coder(table), table.total
        if coder is None or coder.fixed:
            return total + (coder.size(sum(counts), n) if coder else 0), None
        if coder.measure is None:
            return total + coder.encode(indices, n).numel(), None
        return total, coder.measure(indices, n)

    def encode(self, signal: EncodeInput, key: Key) -> Encoded:
        """Encode ``signal.target``."""
        return encode(self, signal, key)

    @cached_property
    def decoder(self) -> Decoder:
        """Reads messages of several ranks."""
        return Decoder(self)

    def decode(self, payload: Payload, segments: Segments, key: Key) -> Tensor:
        """One message as a dense vector. ``key`` is the sender's.

        Raises:
            CorruptMessageError: The message is not one that a correct sender writes.
        """
        return self.decoder.total([payload], segments, [key])


def codec(spec: "str | Stage | Codec") -> Codec:
    """A codec from its text, a lone stage, or itself."""
    made = parse(spec) if isinstance(spec, str) else spec
    if isinstance(made, Stage):
        return Codec.of((made,))
    if not isinstance(made, Codec):
        kind = getattr(made, "kind", type(made).__name__)
        raise ValueError(f"{str(spec)!r} is of kind {kind} where a codec belongs; write for example int4")
    return made


def join(left: Stage, right: "Stage | Codec") -> Codec:
    """``left | right``."""
    return Codec.of((left, *(right.stages() if isinstance(right, Codec) else (right,))))


def _by_slot(stages: Sequence[Stage]) -> dict[int, Any]:
    """Stages by the number of their slot."""
    slots = [_slot(stage) for stage in stages]
    for i, (left, right) in enumerate(pairwise(slots)):
        if left >= right:
            raise ValueError(_refusal(stages[i], stages[i + 1], left, right))
    return dict(zip(slots, stages, strict=True))


def _slot(stage: Stage) -> int:
    for slot, kind in enumerate(_ORDER):
        if isinstance(stage, kind):
            return slot
    kind_name = getattr(stage, "kind", type(stage).__name__)
    raise ValueError(f"{stage} is of kind {kind_name}, which has no place in a chain of codec stages")


def _refusal(left: Stage, right: Stage, a: int, b: int) -> str:
    verb = "cannot follow another" if a == b else f"cannot follow the {_WORDS[a]}"
    order = "transform | selector | quantizer | index coder"
    return f"{left} | {right}: a {_WORDS[b]} {verb} {left if a != b else _WORDS[a]}; the order is {order}"


@lru_cache(maxsize=256)
def _capacities(selector: Selector, lengths: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(check_capacity(selector, n) for n in lengths)
