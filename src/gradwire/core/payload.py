"""Payload: exactly the bytes that travel."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.core.layout import rows_of

COUNT_BYTES = 4  # of the uint32 that a message of unknown length begins with


@dataclass(frozen=True)
class Payload:
    """A message: one contiguous uint8 tensor, every byte of which crosses the wire."""

    data: Tensor

    def __post_init__(self) -> None:
        assert self.data.dtype == torch.uint8 and self.data.dim() == 1

    @property
    def nbytes(self) -> int:
        return self.data.numel()


def with_spare_byte(whole: Tensor, n: int) -> Tensor:
    """The first ``n`` bytes of a buffer as a message. The byte behind them is free: a status may travel there."""
    data = whole[:n]
    data.spare_byte = whole[n : n + 1]  # type: ignore[attr-defined]
    return data


def spare_byte(payload: Payload) -> Tensor | None:
    """The free byte behind a message, if it has one."""
    return getattr(payload.data, "spare_byte", None)


def as_bytes(x: Tensor) -> Tensor:
    """A tensor's memory, little-endian as it lies, as uint8."""
    # A lone element of a strided vector counts as contiguous but keeps its stride, which no view of bytes accepts.
    return x.contiguous().as_strided((x.numel(),), (1,)).view(torch.uint8)


def from_bytes(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers. The copy aligns them: a slice of a payload may start anywhere."""
    return data.clone().view(dtype)


def raw_bytes(x: Tensor) -> bytes:
    """A tensor's memory as bytes of the host."""
    raw: bytes = as_bytes(x.detach()).cpu().numpy().tobytes()
    return raw


def byte_tensor(body: bytes) -> Tensor:
    """Bytes of the host as uint8."""
    return torch.frombuffer(bytearray(body), dtype=torch.uint8) if body else torch.empty(0, dtype=torch.uint8)


def as_rows(payloads: Sequence[Payload]) -> Tensor:
    """Messages of one length as a matrix."""
    return rows_of([payload.data for payload in payloads])


class CorruptMessageError(ValueError):
    """A received message that no healthy sender has written."""


def first_bytes(data: Tensor, size: int, what: str) -> Tensor:
    """The part of a message that begins here.

    Raises:
        CorruptMessageError: Not so many bytes are left.
    """
    if data.numel() < size:
        raise CorruptMessageError(
            f"{what} takes {size} bytes but only {data.numel()} are left; the message was cut short"
        )
    return data[:size]
