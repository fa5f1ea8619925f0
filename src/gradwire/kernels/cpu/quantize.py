"""Quantizers for the CPU: scales in one pass, codes and bytes in another."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.core.keys import Key
from gradwire.kernels.bits import packed_bytes
from gradwire.kernels.cpu import codes, scales
from gradwire.kernels.cpu.random import streams
from gradwire.kernels.cpu.threads import in_turn

_NO_KEYS: NDArray[np.uint32] = np.zeros((1, 2), dtype=np.uint32)
_LARGEST = np.finfo(np.float32).max


def _message(head: NDArray[np.float32], body_bytes: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """A message, its head filled in, and the part that is to be filled."""
    message = np.empty(4 * head.size + body_bytes, dtype=np.uint8)
    message[: 4 * head.size] = head.view(np.uint8)
    return message, message[4 * head.size :]


def _head(data: Tensor, count: int) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    raw = data.numpy()
    return raw[: 4 * count].copy().view(np.float32), raw[4 * count :]


def _flat(values: Tensor) -> NDArray[np.float32]:
    return values.detach().contiguous().numpy()


@in_turn
def sign_encode(values: Tensor, lengths: Tensor, norm: bool) -> Tensor:
    x, groups = _flat(values), lengths.numpy()
    sums = scales.total(x, groups, scales.SQUARES if norm else scales.TOTAL) / np.maximum(groups, 1)
    message, body = _message((np.sqrt(sums) if norm else sums).astype(np.float32), packed_bytes(x.size, 1))
    codes.encode_signs(x, body)
    return torch.from_numpy(message)


@in_turn
def sign_decode(data: Tensor, lengths: Tensor) -> Tensor:
    head, body = _head(data, lengths.numel())
    return _signs(body, lengths, head, -head)


@in_turn
def onebit_encode(values: Tensor, lengths: Tensor) -> Tensor:
    x, groups = _flat(values), lengths.numpy()
    above, below = scales.mean_of(x, groups, scales.ABOVE), scales.mean_of(x, groups, scales.BELOW)
    message, body = _message(np.concatenate((above, below)), packed_bytes(x.size, 1))
    codes.encode_signs(x, body)
    return torch.from_numpy(message)


@in_turn
def onebit_decode(data: Tensor, lengths: Tensor) -> Tensor:
    head, body = _head(data, 2 * lengths.numel())
    above, below = np.split(head, 2)
    return _signs(body, lengths, above, below)


def _signs(body: NDArray[np.uint8], lengths: Tensor, above: NDArray[np.float32], below: NDArray[np.float32]) -> Tensor:
    ends = lengths.numpy().cumsum()
    out = np.empty(int(ends[-1]) if ends.size else 0, dtype=np.float32)
    codes.decode_signs(body, ends, above, below, out)
    return torch.from_numpy(out)


@in_turn
def ternary_encode(values: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key, clip: float) -> Tensor:
    x, groups = _flat(values), lengths.numpy()
    tops = scales.largest(x, groups)
    limits = np.full(groups.size, np.inf, dtype=np.float32)
    if clip:
        sigma = np.sqrt(scales.total(x, groups, scales.SQUARES) / np.maximum(groups, 1))
        limits = np.where(sigma != 0, clip * sigma, np.inf).astype(np.float32)
        tops = np.minimum(tops, limits)
    message, body = _message(tops, (x.size + 4) // 5)
    codes.encode_trits(x, groups.cumsum(), limits, tops, streams(key, names), np.uint64(key.step), body)
    return torch.from_numpy(message)


@in_turn
def ternary_decode(data: Tensor, lengths: Tensor) -> Tensor:
    head, body = _head(data, lengths.numel())
    ends = lengths.numpy().cumsum()
    out = np.empty(int(ends[-1]) if ends.size else 0, dtype=np.float32)
    codes.decode_trits(body, ends, head, out)
    return torch.from_numpy(out)


@in_turn
def qsgd_encode(
    values: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key, levels: int, bucket: int | None
) -> Tensor:
    x = _flat(values)
    groups = scales.cut(lengths.numpy(), bucket)
    norms = np.sqrt(scales.total(x, groups, scales.SQUARES))
    heads = np.where(np.isfinite(norms), np.minimum(norms, _LARGEST), norms).astype(np.float32)
    bits = (2 * levels).bit_length()
    message, body = _message(heads, packed_bytes(x.size, bits))
    ends, keys, step = lengths.numpy().cumsum(), streams(key, names), np.uint64(key.step)
    codes.encode(x, ends, heads, groups.cumsum(), keys, step, levels, bits, True, body)
    return torch.from_numpy(message)


@in_turn
def qsgd_decode(data: Tensor, lengths: Tensor, levels: int, bucket: int | None, biased: bool) -> Tensor:
    groups = scales.cut(lengths.numpy(), bucket)
    head, body = _head(data, groups.size)
    if biased:
        omega = np.minimum(groups / levels**2, np.sqrt(groups) / levels)
        head = (head.astype(np.float64) / (1 + omega)).astype(np.float32)
    return _levels(body, groups, head, levels, (2 * levels).bit_length())


@in_turn
def integer_encode(values: Tensor, lengths: Tensor, bits: int, block: int) -> Tensor:
    x = _flat(values)
    groups = scales.cut(lengths.numpy(), block)
    tops = scales.largest(x, groups)
    message, body = _message(tops, packed_bytes(x.size, bits))
    levels = (1 << bits - 1) - 1
    codes.encode(x, lengths.numpy().cumsum(), tops, groups.cumsum(), _NO_KEYS, np.uint64(0), levels, bits, False, body)
    return torch.from_numpy(message)


@in_turn
def integer_decode(data: Tensor, lengths: Tensor, bits: int, block: int) -> Tensor:
    groups = scales.cut(lengths.numpy(), block)
    head, body = _head(data, groups.size)
    return _levels(body, groups, head, (1 << bits - 1) - 1, bits)


def _levels(
    body: NDArray[np.uint8], groups: NDArray[np.int64], head: NDArray[np.float32], levels: int, bits: int
) -> Tensor:
    ends = groups.cumsum()
    table = np.arange(-levels, levels + 1, dtype=np.float32) / np.float32(levels)
    out = np.empty(int(ends[-1]) if ends.size else 0, dtype=np.float32)
    codes.decode(body, head, ends, table, bits, out)
    return torch.from_numpy(out)


@in_turn
def natural_encode(values: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key) -> Tensor:
    raw = _flat(values).view(np.int32)
    message = np.empty(packed_bytes(raw.size, 9), dtype=np.uint8)
    codes.encode_powers(raw, lengths.numpy().cumsum(), streams(key, names), np.uint64(key.step), message)
    return torch.from_numpy(message)


@in_turn
def natural_decode(data: Tensor, count: int) -> Tensor:
    out = np.empty(count, dtype=np.int32)
    codes.decode_powers(data.numpy(), out)
    return torch.from_numpy(out.view(np.float32))
