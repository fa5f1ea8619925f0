"""Codec: ``transform? | selector? | quantizer | index coder``, the one way a vector becomes bytes.

Wire, in this order and with no padding between the parts:

    count     uint32, little-endian; only when the length of the message is not known beforehand
    indices   by the index coder; absent when nothing was selected or receivers can redraw the choice
    values    by the quantizer
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.codecs.chain import fill
from gradwire.codecs.indices import Rice
from gradwire.codecs.quantizers import FP32
from gradwire.codecs.stage import (
    Decoded,
    EncodeInput,
    IndexCoder,
    Memory,
    Quantizer,
    Selector,
    Stage,
    Transform,
)
from gradwire.core.deferred_checks import refuse
from gradwire.core.graph_refs import kept
from gradwire.core.keys import Key
from gradwire.core.payload import CorruptMessageError, Payload, as_bytes, as_rows, from_bytes
from gradwire.core.segments import Segments, on
from gradwire.core.spec import parse
from gradwire.core.traits import Traits
from gradwire.kernels import groups
from gradwire.kernels.fused import scatter_mean, scatter_mean_

_COUNT_BYTES = 4


class Encoded(NamedTuple):
    """A message, what the group will hear in it, and the lane's memory after saying it."""

    payload: Payload
    sent: Decoded
    memory: Memory


class Entries(NamedTuple):
    """What sparse messages say, rank by rank.

    Attributes:
        values: Of all ranks.
        indices: Their positions, which rise within a message.
        bounds: Where each rank's begin, and where the last one's end.
    """

    values: Tensor
    indices: Tensor
    bounds: tuple[int, ...]

    def mean(self, n: int) -> Tensor:
        """The mean over ranks, of so many entries."""
        return scatter_mean(*self, n, len(self.bounds) - 1)

    def mean_(self, out: Tensor) -> Tensor:
        """The same, written over what is there."""
        scatter_mean_(out, *self, 0, len(self.bounds) - 1)
        return out


@dataclass(frozen=True)
class Codec:
    """A chain of stages with every slot filled."""

    transform: Transform | None
    selector: Selector | None
    quantizer: Quantizer
    indices: IndexCoder | None  # None when no index ever travels

    @classmethod
    def of(cls, stages: Sequence[Stage]) -> "Codec":
        """Fill the slots in order; what is left out gets its default: fp32 values, Rice-coded indices."""
        return cls(*fill(stages))

    def stages(self) -> tuple[Stage, ...]:
        """The stages as one would write them: defaults left out, but never all of them."""
        quantizer = None if self.selector and self.quantizer == FP32() else self.quantizer
        indices = None if self.indices == Rice() else self.indices
        return tuple(s for s in (self.transform, self.selector, quantizer, indices) if s)

    def __str__(self) -> str:
        return " | ".join(map(str, self.stages()))

    def __or__(self, stage: Stage) -> "Codec":
        return Codec.of((*self.stages(), stage))

    def steady(self) -> "Codec":
        """The same with messages of known length, which nobody has to wait for, if it can have such."""
        if self.selector is not None and self.selector.fixed and self.indices == Rice():
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
            fixed=(self.selector is None or self.selector.fixed) and (self.indices is None or self.indices.fixed),
        )

    @property
    def memories(self) -> tuple[str, ...]:
        return self.selector.memories if self.selector else ()

    @cached_property
    def plain(self) -> bool:
        """Whether selected entries are heard just as they are, all of them."""
        whole = self.indices is None or not self.indices.drops
        return self.transform is None and self.quantizer.traits.lossless and whole

    def absorb(self, grad: Tensor, memory: Memory, observed: Tensor | None) -> Memory:
        """The lane's memory with what the selector keeps of today's gradient."""
        return memory if self.selector is None else self.selector.absorb(grad, memory, observed)

    def capacities(self, segments: Segments) -> tuple[int, ...]:
        """The most entries that each segment may send."""
        table = self._table(segments)
        return _capacities(self.selector, table.lengths) if self.selector else table.lengths

    def size(self, segments: Segments) -> int:
        """The most bytes a message for this buffer may take; exact when the codec is `fixed`."""
        table = self._table(segments)
        if self.selector is None:
            return self.quantizer.size(table.lengths)
        most = _capacities(self.selector, table.lengths)
        index_bytes = self.indices.over(table).size(sum(most), table.total) if self.indices else 0
        return self._header_bytes + index_bytes + self.quantizer.size(most)

    def encode(self, signal: EncodeInput, key: Key) -> Encoded:
        """Say ``signal.target`` in few bytes."""
        moved = self._move(signal, key)
        indices, values, lengths = self._chosen(moved, key)
        payload, heard = self._write(indices, values, lengths, moved.segments, key)
        return Encoded(payload, self._sent(indices, heard, signal.segments, key), self._remembered(moved, indices))

    def message(self, signal: EncodeInput, key: Key) -> tuple[Payload, Memory]:
        """`encode`'s message and memory, for whoever does not ask what will be heard: nothing is decoded."""
        moved = self._move(signal, key)
        indices, values, lengths = self._chosen(moved, key)
        body = self.quantizer.encode(values, lengths, moved.segments.names, key)
        return self._around(body, indices, moved.segments), self._remembered(moved, indices)

    def echo(self, signal: EncodeInput, key: Key) -> Decoded:
        """What the group would hear of `encode`'s message, which is not written; codecs without memory only."""
        moved = self._move(signal, key)
        indices, values, lengths = self._chosen(moved, key)
        body = self.quantizer.encode(values, lengths, moved.segments.names, key)
        heard = self.quantizer.decode(body, lengths, moved.segments.names, key)
        return self._sent(indices, heard, signal.segments, key)

    def encode_selected(self, indices: Tensor, values: Tensor, table: Segments, key: Key) -> tuple[Payload, Decoded]:
        """The message of entries that were selected elsewhere, and what of them will be heard."""
        if self.indices is not None:
            fitting = self.indices.over(table).fit(indices, table.total, key)
            if fitting.numel() < indices.numel():
                indices, values = fitting, values[torch.isin(indices, fitting)]
        lengths = on(self._counts(indices, table), indices.device)
        payload, heard = self._write(indices, values, lengths, table, key)
        return payload, Decoded(indices, heard)

    def echo_selected(self, indices: Tensor, values: Tensor, table: Segments, key: Key) -> Decoded:
        """What the group would hear of `encode_selected`'s message, which is not written; all positions must fit."""
        lengths = on(self._counts(indices, table), indices.device)
        body = self.quantizer.encode(values, lengths, table.names, key)
        return Decoded(indices, self.quantizer.decode(body, lengths, table.names, key))

    def length(self, indices: Tensor, counts: tuple[int, ...], table: Segments) -> tuple[int, Tensor | None]:
        """How long the message of these positions is, ``counts`` in each segment.

        In two parts: bytes that are known, and those that take a look at the device, if there are such.
        """
        total, n = self._header_bytes + self.quantizer.size(counts), table.total
        if self.indices is None:
            return total, None
        coder = self.indices.over(table)
        return (total + coder.size(sum(counts), n), None) if coder.fixed else (total, coder.measure(indices, n))

    def total(self, payloads: Iterable[Payload], segments: Segments, keys: Iterable[Key]) -> Tensor:
        """The sum of several ranks' messages, added in the order given. -> float32[segments.total]."""
        out: Tensor | None = None
        key = None
        for payload, key in zip(payloads, keys, strict=True):
            heard = self._read(payload, segments, key)
            if heard.indices is None:
                out = heard.values if out is None else out.add_(heard.values)  # what is read is nobody else's
                continue
            if out is None:
                out = heard.values.new_zeros(self._table(segments).total)
            out.index_add_(0, heard.indices, heard.values)  # distinct within one message
        assert out is not None and key is not None
        return self._back(out, segments, key)

    def mean(self, payloads: Sequence[Payload], segments: Segments, keys: Sequence[Key]) -> Tensor:
        """The mean of several ranks' messages, bit for bit their `total` over their number."""
        if self.sparse(segments, len(payloads)):
            return self.entries(payloads, segments, keys).mean(segments.total)
        return groups.over_(self.total(payloads, segments, keys), len(payloads))

    def sparse(self, segments: Segments, ranks: int) -> bool:
        """Whether `entries` serve. Messages longer together than the vector are better read one after the other."""
        return not self.transform and self.selector is not None and ranks * self.most(segments) <= segments.total

    def entries(self, payloads: Sequence[Payload], segments: Segments, keys: Sequence[Key]) -> Entries:
        """What sparse messages say."""
        together = self._entries_together(payloads, segments, keys)
        if together is not None:
            return together
        heard = [self._read(payload, segments, key) for payload, key in zip(payloads, keys, strict=True)]
        values = torch.cat([one.values for one in heard])
        indices = torch.cat([one.indices for one in heard if one.indices is not None])
        return Entries(values, indices, (0, *accumulate(one.values.numel() for one in heard)))

    def _entries_together(self, payloads: Sequence[Payload], segments: Segments, keys: Sequence[Key]) -> Entries | None:
        """`entries`, with one look at all messages. None: look at each by itself.

        Whatever is not as it should be is left to that: it knows what to say.
        """
        first, ranks = payloads[0].data, len(payloads)
        if self.indices is None or self.selector is None or self.transform:
            return None
        if not self._header_bytes:
            return self._entries_known(payloads, segments, keys)
        if len({payload.nbytes for payload in payloads}) > 1 or first.numel() < _COUNT_BYTES:
            return None
        counts, rows = _capacities(self.selector, segments.lengths), as_rows(payloads)
        found = self.indices.over(segments).decode_rows(rows[:, _COUNT_BYTES:], sum(counts), segments.total)
        if found is None:
            return None
        heads = from_bytes(rows[:, :_COUNT_BYTES].reshape(-1), torch.int32).long()
        *said, faulty = torch.cat((heads, found.used, found.faults.any().long()[None])).tolist()
        size = self.quantizer.size(counts)
        starts = [_COUNT_BYTES + used for used in said[ranks:]]
        if faulty or set(said[:ranks]) != {sum(counts)} or max(starts) + size > first.numel():
            return None
        lengths = on(counts, first.device)
        values = [
            self.quantizer.decode(row[start : start + size], lengths, segments.names, key)
            for row, start, key in zip(rows, starts, keys, strict=True)
        ]
        return Entries(torch.cat(values), found.indices.flatten(), _evenly(sum(counts), ranks))

    def _entries_known(self, payloads: Sequence[Payload], segments: Segments, keys: Sequence[Key]) -> Entries | None:
        """`entries` of messages whose parts all lie at known places, so that nobody has to wait for any."""
        assert self.indices is not None
        coder, counts = self.indices.over(segments), _capacities(self.selector, segments.lengths)
        count, room, size = sum(counts), coder.size(sum(counts), segments.total), self.quantizer.size(counts)
        if any(payload.nbytes != room + size for payload in payloads):
            return None
        rows = as_rows(payloads)
        found = coder.decode_rows(rows[:, :room], count, segments.total)
        if found is None:
            return None
        refuse(found.faults, "a message names positions that it cannot mean; it was damaged on the way")
        lengths = on(counts, rows.device)
        values = [
            self.quantizer.decode(row[room:], lengths, segments.names, key) for row, key in zip(rows, keys, strict=True)
        ]
        together = values[0] if len(values) == 1 else torch.cat(values)
        return Entries(together, found.indices.flatten(), _evenly(count, len(rows)))

    def merge(
        self, payloads: Sequence[Payload], debt: Tensor | None, segments: Segments, keys: Sequence[Key], key: Key
    ) -> tuple[Payload, Tensor | None]:
        """The mean of several ranks' messages, and a debt on top of it, said again under ``key``; and what that loses.

        Only with a debt there is a loss to be kept.
        """
        if self.selector is None and self.transform is None:
            made = self.quantizer.merge(as_rows(payloads), debt, segments.lengths)
            if made is not None:
                return Payload(made[0]), made[1]
        mine = groups.over(self.total(payloads, segments, keys), len(payloads))
        mine = mine if debt is None else mine + debt
        signal = EncodeInput(mine, mine, {}, segments)
        if debt is None:
            return self.message(signal, key)[0], None
        said = self.encode(signal, key)
        return said.payload, said.sent.off(mine)

    def decode(self, payload: Payload, segments: Segments, key: Key) -> Tensor:
        """One message as a dense vector. ``key`` is the sender's.

        Raises:
            CorruptMessageError: The message is not one that a healthy sender writes.
        """
        return self.total([payload], segments, [key])

    def summand(self, payload: Payload) -> Tensor:
        """A linear codec's message as numbers that may be added across ranks."""
        return from_bytes(payload.data, self.quantizer.dtype)  # type: ignore[attr-defined]

    def clamped(self, payload: Payload, limit: float) -> Payload:
        """A linear codec's message with every summand clamped to +-limit."""
        return Payload(as_bytes(self.summand(payload).clamp(-limit, limit)))

    def bound(self, encoded: Encoded, limit: float, segments: Segments, key: Key) -> Encoded:
        """The same, and what will then be heard of it."""
        payload = self.clamped(encoded.payload, limit)
        heard = self.summand(payload).float()
        if self.transform is None:
            sent = Decoded(encoded.sent.indices, heard)
        else:
            sent = Decoded(None, self.expand(heard, segments, key))
        return Encoded(payload, sent, encoded.memory)

    def expand(self, values: Tensor, segments: Segments, key: Key) -> Tensor:
        """A sum of summands, or their mean, as a dense float32 vector."""
        table = self._table(segments)
        if self.selector is None:
            return self._back(values, segments, key)
        empty = EncodeInput(values, values, {}, table)
        out = values.new_zeros(table.total)
        out[self.selector.select(empty, key)] = values
        return self._back(out, segments, key)

    # -- the parts of a message ------------------------------------------------------------------------------------

    @cached_property
    def _header_bytes(self) -> int:
        return 0 if self.indices is None or self.traits.fixed else _COUNT_BYTES

    def most(self, table: Segments) -> int:
        """The most entries that a message may hold."""
        return sum(_capacities(self.selector, table.lengths)) if self.selector else table.total

    def _counts(self, indices: Tensor, table: Segments) -> tuple[int, ...]:
        """How many of the rising positions lie in each segment. All there may be, mostly: then nobody has to look."""
        if self.selector and indices.numel() == self.most(table):
            return _capacities(self.selector, table.lengths)
        found: list[int] = torch.searchsorted(indices, table.offsets_on(indices.device)).diff().tolist()
        return tuple(found)

    def _table(self, segments: Segments) -> Segments:
        return self.transform.widen(segments) if self.transform else segments

    def _move(self, signal: EncodeInput, key: Key) -> EncodeInput:
        if self.transform is None:
            return signal
        grad = self.transform.forward(signal.grad, signal.segments, key)
        target = self.transform.forward(signal.target, signal.segments, key)
        return signal._replace(grad=grad, target=target, segments=self._table(signal.segments))

    def _back(self, y: Tensor, segments: Segments, key: Key) -> Tensor:
        return self.transform.inverse(y, segments, key) if self.transform else y

    def _chosen(self, moved: EncodeInput, key: Key) -> tuple[Tensor | None, Tensor, Tensor]:
        """The positions to send, the values there, and how many each segment has."""
        table = moved.segments
        if self.selector is None:
            return None, moved.target, table.lengths_on(moved.target.device)
        indices = self.selector.select(moved, key)
        if self.indices:
            indices = self.indices.over(table).fit(indices, table.total, key)
        lengths = on(self._counts(indices, table), indices.device)
        return indices, self._scaled(moved.target[indices], lengths, table), lengths

    def _scaled(self, values: Tensor, lengths: Tensor, table: Segments) -> Tensor:
        """Times the selector's gains, which undo its bias."""
        assert self.selector is not None
        gains = tuple(map(self.selector.gain, table.lengths))
        if all(gain == 1.0 for gain in gains):
            return values
        return values * groups.spread(_numbers(gains, lengths.device), lengths, values.numel())

    def _write(
        self, indices: Tensor | None, values: Tensor, lengths: Tensor, table: Segments, key: Key
    ) -> tuple[Payload, Tensor]:
        body = self.quantizer.encode(values, lengths, table.names, key)
        payload = self._around(body, indices, table)
        if indices is not None and self.quantizer.traits.lossless:  # selected values are a copy already
            return payload, values
        return payload, self.quantizer.decode(body, lengths, table.names, key)

    def _around(self, body: Tensor, indices: Tensor | None, table: Segments) -> Payload:
        preamble = self._preamble(indices, table)
        return Payload(torch.cat([*preamble, body]) if preamble else body)

    def _remembered(self, moved: EncodeInput, indices: Tensor | None) -> Memory:
        return self.selector.remember(moved, indices) if self.selector and indices is not None else moved.memory

    def _preamble(self, indices: Tensor | None, table: Segments) -> list[Tensor]:
        if indices is None or self.indices is None:
            return []
        coded = self.indices.over(table).encode(indices, table.total)
        if not self._header_bytes:
            return [coded]
        count = torch.tensor([indices.numel()], dtype=torch.int64, device=indices.device)
        return [as_bytes(count)[:_COUNT_BYTES], coded]

    def _sent(self, indices: Tensor | None, heard: Tensor, segments: Segments, key: Key) -> Decoded:
        if self.transform is None:
            return Decoded(indices, heard)
        y = heard
        if indices is not None:
            y = heard.new_zeros(self._table(segments).total)
            y[indices] = heard
        # In the original basis nothing was left out, so nothing counts as selected there.
        return Decoded(None, self._back(y, segments, key))

    def _read(self, payload: Payload, segments: Segments, key: Key) -> Decoded:
        table = self._table(segments)
        indices, taken = self._read_indices(payload.data, table, key)
        counts = table.lengths if indices is None else self._counts(indices, table)
        stop = taken + self.quantizer.size(counts)
        if stop > payload.nbytes:
            raise CorruptMessageError(
                f"a message of {payload.nbytes} bytes ends before its values do ({stop} bytes); "
                "was it cut, or written by another version?"
            )
        body = payload.data[taken:stop]
        return Decoded(indices, self.quantizer.decode(body, on(counts, body.device), table.names, key))

    def _read_indices(self, data: Tensor, table: Segments, key: Key) -> tuple[Tensor | None, int]:
        if self.selector is None:
            return None, 0
        if self.indices is None:
            empty = data.new_zeros(0)
            return self.selector.select(EncodeInput(empty, empty, {}, table), key), 0
        most = self.most(table)
        count = most
        if self._header_bytes:
            if data.numel() < _COUNT_BYTES:
                raise CorruptMessageError(f"a message of {data.numel()} bytes is too short for its count")
            count = int.from_bytes(bytes(data[:_COUNT_BYTES].tolist()), "little")
        if count > most:
            raise CorruptMessageError(f"a message claims {count} entries where at most {most} may be sent")
        indices, taken = self.indices.over(table).decode(data[self._header_bytes :], count, table.total)
        return _checked(indices, table.total), self._header_bytes + taken


def codec(spec: "str | Stage | Codec") -> Codec:
    """A codec from its text, a lone stage, or itself."""
    made = parse(spec) if isinstance(spec, str) else spec
    if isinstance(made, Stage):
        return Codec.of((made,))
    if not isinstance(made, Codec):
        kind = getattr(made, "kind", type(made).__name__)
        raise ValueError(f"{spec!r} is of kind {kind} where a codec belongs; write for example topk(0.01) | sign")
    return made


def join(left: Stage, right: "Stage | Codec") -> Codec:
    """``left | right``."""
    return Codec.of((left, *(right.stages() if isinstance(right, Codec) else (right,))))


@lru_cache(maxsize=256)
def _capacities(selector: Selector, lengths: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(selector.capacity, lengths))


def _evenly(count: int, ranks: int) -> tuple[int, ...]:
    """Where the entries of each rank begin, and where the last ones end, if all have as many."""
    return tuple(count * rank for rank in range(ranks + 1))


@kept(256)
def _numbers(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, device=device)  # kept: nobody may write into it


def _checked(indices: Tensor, n: int) -> Tensor:
    """A corrupted message may not write outside the buffer, nor twice at one place."""
    if indices.numel() == 0:
        return indices
    # Compared, not subtracted: the difference of two damaged positions may wrap around.
    rising = (indices[1:] > indices[:-1]).all() & (indices[0] >= 0) & (indices[-1] < n)
    looked = refuse(
        ~rising,
        f"a message names positions that do not rise from 0 to {n - 1}; "
        "it was damaged on the way, or comes from another model",
    )
    return indices if looked else indices.clamp(0, n - 1)
