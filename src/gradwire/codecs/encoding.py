"""Encoding: from a vector to a message."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradwire.codecs.checks import check_body, check_positions
from gradwire.codecs.stage import Decoded, EncodeInput, Memory
from gradwire.core import Key, Payload, Segments, as_bytes, on
from gradwire.core.payload import COUNT_BYTES
from gradwire.kernels import groups

if TYPE_CHECKING:
    from gradwire.codecs.codec import Codec


@dataclass(frozen=True, eq=False)
class Encoded:
    """An encoded vector. Its message is put together, or decoded, only where that is asked for.

    Attributes:
        codec: The codec.
        key: The sender's.
        segments: The segment table, before the transform.
        indices: Rising positions that were selected, after the transform; None when every position is sent.
        counts: How many values each segment has.
        body: The quantized values.
        memory: The lane's memory after sending.
        exact: The values, where receivers decode just these and the tensor is not shared.
    """

    codec: "Codec"
    key: Key
    segments: Segments
    indices: Tensor | None
    counts: tuple[int, ...]
    body: Tensor
    memory: Memory
    exact: Tensor | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter((self.payload, self.sent, self.memory))

    @cached_property
    def payload(self) -> Payload:
        """The message."""
        table, indices = self.codec.transformed(self.segments), self.indices
        coder = self.codec.coder(table)
        if indices is None or coder is None:
            return Payload(self.body)
        parts = [coder.encode(indices, table.total), self.body]
        if self.codec.header_bytes:
            count = torch.tensor([indices.numel()], dtype=torch.int64, device=indices.device)
            parts.insert(0, as_bytes(count)[:COUNT_BYTES])
        return Payload(torch.cat(parts))

    @cached_property
    def sent(self) -> Decoded:
        """What receivers decode."""
        values, table = self.exact, self.codec.transformed(self.segments)
        if values is None:
            lengths = on(self.counts, self.body.device)
            values = self.codec.quantizer.decode(self.body, lengths, table.names, self.key)
        if self.codec.transform is None:
            return Decoded(self.indices, values)
        if self.indices is not None:
            values = values.new_zeros(table.total).index_copy_(0, self.indices, values)
        # In the original basis nothing was left out, so nothing counts as selected there.
        return Decoded(None, self.codec.transform.inverse(values, self.segments, self.key))


def encode(codec: "Codec", signal: EncodeInput, key: Key) -> Encoded:
    """Encode ``signal.target``."""
    x, selector = _transformed(codec, signal, key), codec.selector
    if selector is None:
        encoded = encode_selected(codec, None, x.target, x.segments, key, x.memory)
        return encoded if codec.transform is None else replace(encoded, segments=signal.segments)
    capacities = codec.capacities(x.segments)  # which refuses wrong ones before anything is selected by them
    indices = selector.select(x, key)
    check_positions(selector, indices, x.segments, capacities)
    values = _scaled(codec, x.target[indices], indices, x.segments)
    encoded = encode_selected(codec, indices, values, x.segments, key, x.memory)
    assert encoded.indices is not None
    memory = x.memory if selector.memory_after_sending is None else selector.memory_after_sending(x, encoded.indices)
    return replace(encoded, segments=signal.segments, memory=memory)


def encode_selected(
    codec: "Codec", indices: Tensor | None, values: Tensor, table: Segments, key: Key, memory: Memory
) -> Encoded:
    """Encode entries that were selected already, or every entry; ``table`` is the one after the transform."""
    if indices is not None and codec.indices is not None and codec.indices.drop_overflow is not None:
        fitting = codec.indices.drop_overflow(indices, table.total, key)
        if fitting.numel() < indices.numel():
            indices, values = fitting, values[torch.isin(indices, fitting)]
    counts = codec.counts(indices, table)
    body = codec.quantizer.encode(values, on(counts, values.device), table.names, key)
    check_body(codec.quantizer, body, counts)
    exact = values if indices is not None and codec.quantizer.traits.lossless else None  # selected values are a copy
    return Encoded(codec, key, table, indices, counts, body, memory, exact)


def _transformed(codec: "Codec", signal: EncodeInput, key: Key) -> EncodeInput:
    if codec.transform is None:
        return signal
    grad = codec.transform.forward(signal.grad, signal.segments, key)
    target = codec.transform.forward(signal.target, signal.segments, key)
    return signal._replace(grad=grad, target=target, segments=codec.transformed(signal.segments))


def _scaled(codec: "Codec", values: Tensor, indices: Tensor, table: Segments) -> Tensor:
    """Times the selector's gains, which undo its bias."""
    if codec.selector is None or codec.selector.gain is None:
        return values
    gains = tuple(map(codec.selector.gain, table.lengths))
    lengths = on(codec.counts(indices, table), values.device)
    return values * groups.spread(on(gains, values.device, torch.float32), lengths, values.numel())
