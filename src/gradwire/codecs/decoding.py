"""Decoding: from messages of several ranks to their sum, mean or entries."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from gradwire.codecs.stage import Decoded, EncodeInput
from gradwire.core import CorruptMessageError, Key, Payload, Segments, from_bytes, on
from gradwire.core.deferred_checks import check
from gradwire.core.layout import Flat, takes_scattered
from gradwire.core.payload import COUNT_BYTES, as_rows
from gradwire.kernels import groups
from gradwire.kernels.fused import scatter_mean
from gradwire.kernels.rice import Found

if TYPE_CHECKING:
    from gradwire.codecs.codec import Codec


class Entries(NamedTuple):
    """The entries of sparse messages, rank by rank.

    Attributes:
        values: Of all ranks.
        indices: Their positions, which rise within a message.
        bounds: Where each rank's begin, and where the last one's end.
    """

    values: Tensor
    indices: Tensor
    bounds: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """Of so many ranks."""
        return len(self.bounds) - 1

    def mean(self, n: int) -> Tensor:
        """The mean over ranks, of so many entries."""
        return scatter_mean(*self, n, self.ranks)

    def mean_of_senders(self, n: int) -> Tensor:
        """The same, but of each entry over those ranks that sent it."""
        return groups.over_senders(scatter_mean(*self, n, 1), self.indices)


@dataclass(frozen=True)
class Decoder:
    """Reads messages that a codec wrote."""

    codec: "Codec"

    def total(
        self, payloads: Iterable[Payload], segments: Segments, keys: Iterable[Key], out: Tensor | None = None
    ) -> Tensor:
        """The sum of several ranks' messages, added in the order given. -> float32[segments.total].

        It may lie in ``out``, or in new memory.
        """
        total: Tensor | None = None
        key = None
        for payload, key in zip(payloads, keys, strict=True):
            indices, values = self._read(payload, segments, key, out if total is None else None)
            if indices is None:
                total = values if total is None else total.add_(values)  # decoded values share no memory
                continue
            if total is None:
                total = values.new_zeros(self.codec.transformed(segments).total)
            total.index_add_(0, indices, values)  # distinct within one message
        assert total is not None and key is not None
        return self._inverse(total, segments, key)

    def mean(
        self, payloads: Sequence[Payload], segments: Segments, keys: Sequence[Key], out: Tensor | None = None
    ) -> Tensor:
        """The mean of several ranks' messages, bit for bit their `total` over their number.

        It may lie in ``out``, or in new memory.
        """
        if self.is_sparse(segments, len(payloads)):
            return self.entries(payloads, segments, keys).mean(segments.total)
        return groups.over_(self.total(payloads, segments, keys, out), len(payloads))

    def is_sparse(self, segments: Segments, ranks: int) -> bool:
        """Whether `entries` serve. Messages longer together than the vector are better read one after the other."""
        codec = self.codec
        if codec.transform is not None or codec.selector is None:
            return False
        return ranks * sum(codec.capacities(segments)) <= segments.total

    def entries(self, payloads: Sequence[Payload], segments: Segments, keys: Sequence[Key]) -> Entries:
        """The entries of sparse messages."""
        together = self._entries_together(payloads, segments, keys)
        if together is not None:
            return together
        decoded = [self._read(payload, segments, key) for payload, key in zip(payloads, keys, strict=True)]
        values = torch.cat([one.values for one in decoded])
        indices = torch.cat([one.indices for one in decoded if one.indices is not None])
        return Entries(values, indices, (0, *accumulate(one.values.numel() for one in decoded)))

    def _entries_together(self, payloads: Sequence[Payload], segments: Segments, keys: Sequence[Key]) -> Entries | None:
        """`entries`, reading the device once for all messages. None: read each by itself, which also names errors."""
        codec, coder, nbytes = self.codec, self.codec.coder(segments), payloads[0].nbytes
        counts, head = codec.capacities(segments), codec.header_bytes
        if coder is None or coder.decode_rows is None or any(payload.nbytes != nbytes for payload in payloads):
            return None
        total, size = sum(counts), codec.quantizer.size(counts)
        stop = nbytes if head else coder.size(total, segments.total)
        if nbytes < head or (not head and nbytes != stop + size):
            return None
        rows = as_rows(payloads)
        found = coder.decode_rows(rows[:, head:stop], total, segments.total)
        starts = None if found is None else _starts(found, rows, head, stop, total)
        if found is None or starts is None or max(starts) + size > nbytes:
            return None
        lengths, decode = on(counts, rows.device), codec.quantizer.decode
        bodies = [row[start : start + size] for row, start in zip(rows, starts, strict=True)]
        values = [decode(body, lengths, segments.names, key) for body, key in zip(bodies, keys, strict=True)]
        bounds = tuple(total * rank for rank in range(len(rows) + 1))
        return Entries(values[0] if len(values) == 1 else torch.cat(values), found.indices.flatten(), bounds)

    def merge(
        self,
        payloads: Sequence[Payload],
        error: Tensor | None,
        segments: Segments,
        keys: Sequence[Key],
        key: Key,
        out: Tensor | None = None,
    ) -> tuple[Payload, Tensor | None]:
        """The mean of several ranks' messages plus an error, encoded under ``key``; and the new error.

        Without an error, none is kept. The new one may lie in ``out``, or in new memory.
        """
        codec = self.codec
        whole = codec.selector is None and codec.transform is None and codec.quantizer.fuses
        if whole and codec.quantizer.merge_into is not None and error is not None and out is not None:
            body = codec.quantizer.merge_into(as_rows(payloads), error, segments.lengths, out)
            return Payload(body), out
        if whole and codec.quantizer.merge is not None:
            body, error = codec.quantizer.merge(as_rows(payloads), error, segments.lengths)
            return Payload(body), error
        target = groups.over(self.total(payloads, segments, keys), len(payloads))
        target = target if error is None else target + error
        encoded = codec.encode(EncodeInput(target, target, {}, segments), key)
        return encoded.payload, None if error is None else encoded.sent.residual_of(target)

    def write(self, payload: Payload, segments: Segments, key: Key, out: Flat) -> None:
        """Write a message's values to ``out``."""
        codec, size = self.codec, self.codec.size(segments)
        plain = codec.selector is None and codec.transform is None and payload.nbytes >= size
        if plain and codec.quantizer.decode_into and (isinstance(out, Tensor) or takes_scattered(codec.quantizer)):
            codec.quantizer.decode_into(payload.data[:size], on(segments.lengths, payload.data.device), out)
        else:
            out.copy_(self.total([payload], segments, [key]))

    def decode_times(
        self, payload: Payload, segments: Segments, key: Key, out: Tensor, factor: Tensor, product: Flat
    ) -> None:
        """Write a message's values to ``out``, and their products with ``factor`` to ``product``; at once if it can."""
        codec, size = self.codec, self.codec.size(segments)
        plain = codec.selector is None and codec.transform is None and payload.nbytes >= size
        taken = isinstance(product, Tensor) or takes_scattered(codec.quantizer)
        if plain and taken and codec.quantizer.decode_times is not None:
            data, lengths = payload.data[:size], on(segments.lengths, payload.data.device)
            codec.quantizer.decode_times(data, lengths, out, factor, product)
            return
        self.write(payload, segments, key, out)
        if isinstance(product, Tensor):
            torch.mul(out, factor, out=product)
        else:
            product.copy_(out * factor)

    def expand(self, values: Tensor, segments: Segments, key: Key) -> Tensor:
        """A sum of addends, or their mean, as a dense float32 vector."""
        if self.codec.selector is not None:
            table = self.codec.transformed(segments)
            indices = self.codec.selector.select(EncodeInput(values, values, {}, table), key)
            values = values.new_zeros(table.total).index_copy_(0, indices, values)
        return self._inverse(values, segments, key)

    def _inverse(self, y: Tensor, segments: Segments, key: Key) -> Tensor:
        return self.codec.transform.inverse(y, segments, key) if self.codec.transform else y

    def _read(self, payload: Payload, segments: Segments, key: Key, out: Tensor | None = None) -> Decoded:
        codec, table = self.codec, self.codec.transformed(segments)
        indices, start = self._read_indices(payload.data, table, key)
        counts = codec.counts(indices, table)
        stop = start + codec.quantizer.size(counts)
        if stop > payload.nbytes:
            raise CorruptMessageError(
                f"a message of {payload.nbytes} bytes ends before its values do ({stop} bytes); "
                "was it cut, or written by another version?"
            )
        body = payload.data[start:stop]
        lengths = on(counts, body.device)
        if out is not None and codec.quantizer.decode_into and codec.selector is None and codec.transform is None:
            return Decoded(None, codec.quantizer.decode_into(body, lengths, out))
        return Decoded(indices, codec.quantizer.decode(body, lengths, table.names, key))

    def _read_indices(self, data: Tensor, table: Segments, key: Key) -> tuple[Tensor | None, int]:
        codec, coder = self.codec, self.codec.coder(table)
        if codec.selector is None:
            return None, 0
        if coder is None:
            empty = data.new_zeros(0)
            return codec.selector.select(EncodeInput(empty, empty, {}, table), key), 0
        count = most = sum(codec.capacities(table))
        if codec.header_bytes:
            if data.numel() < COUNT_BYTES:
                raise CorruptMessageError(f"a message of {data.numel()} bytes is too short for its count")
            count = int.from_bytes(bytes(data[:COUNT_BYTES].tolist()), "little")
        if count > most:
            raise CorruptMessageError(f"a message claims {count} entries where at most {most} may be sent")
        indices, used = coder.decode(data[codec.header_bytes :], count, table.total)
        return _checked(indices, table.total), codec.header_bytes + used


def _starts(found: Found, rows: Tensor, head: int, stop: int, count: int) -> list[int] | None:
    """Where the values of each message begin; None if one is not what a sender of ``count`` entries writes."""
    if not head:  # they lie at a known place, so the device is not read
        check(found.faults, "a message names positions that it cannot mean; it was damaged on the way")
        return [stop] * len(rows)
    headers = from_bytes(rows[:, :head].reshape(-1), torch.int32).long()
    *numbers, faulty = torch.cat((headers, found.used, found.faults.any().long()[None])).tolist()
    if faulty or set(numbers[: len(rows)]) != {count}:
        return None
    return [head + used for used in numbers[len(rows) :]]


def _checked(indices: Tensor, n: int) -> Tensor:
    """A corrupted message may not write outside the buffer, nor twice at one place."""
    if indices.numel() == 0:
        return indices
    # Compared, not subtracted: the difference of two corrupt positions may wrap around.
    rising = (indices[1:] > indices[:-1]).all() & (indices[0] >= 0) & (indices[-1] < n)
    read = check(
        ~rising,
        f"a message names positions that do not rise from 0 to {n - 1}; "
        "it was damaged on the way, or comes from another model",
    )
    return indices if read else indices.clamp(0, n - 1)
