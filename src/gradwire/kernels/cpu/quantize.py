"""Quantizers for the CPU: one pass where a scale belongs to a block, two where it belongs to a whole segment."""

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.core.keys import Key
from gradwire.core.layout import Flat, in_one_place
from gradwire.kernels.bits import packed_bytes
from gradwire.kernels.cpu import codes, scales
from gradwire.kernels.cpu.buffer_pool import pooled_empty, pooled_message, scales_and_rest
from gradwire.kernels.cpu.packing import join
from gradwire.kernels.cpu.pieces import Pieces, blocked, whole
from gradwire.kernels.cpu.places import places
from gradwire.kernels.cpu.random import streams
from gradwire.kernels.cpu.threads import in_turn
from gradwire.kernels.groups import blocks, num_blocks
from gradwire.kernels.quantize import omega

_NO_KEYS: NDArray[np.uint32] = np.zeros((1, 2), dtype=np.uint32)
_LARGEST = np.finfo(np.float32).max
_LONG = 1 << 62  # a block that no piece exceeds


def _flat(values: Tensor) -> NDArray[np.float32]:
    return values.detach().contiguous().numpy()


def _cut(lengths: Tensor, block: int | None) -> tuple[tuple[int, ...], Pieces, int]:
    """The segments, the pieces, and the block as the kernels take it."""
    table: tuple[int, ...] = tuple(lengths.tolist())
    return (table, whole(table), _LONG) if block is None else (table, blocked(table, block), block)


@in_turn
def ternary_encode(values: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key, clip: float) -> Tensor:
    x, groups = _flat(values), lengths.numpy()
    tops, squares = scales.tops_and_squares(x, tuple(lengths.tolist()))
    limits = np.full(groups.size, np.inf, dtype=np.float32)
    if clip:
        sigma = np.sqrt(squares / np.maximum(groups, 1))
        limits = np.where(sigma != 0, clip * sigma, np.inf).astype(np.float32)
        tops = np.minimum(tops, limits)
    message, head, body = pooled_message(groups.size, (x.size + 4) // 5)
    head[:] = tops
    codes.encode_trits(x, groups.cumsum(), limits, tops, streams(key, names), np.uint64(key.step), body)
    return message


@in_turn
def ternary_decode(data: Tensor, lengths: Tensor) -> Tensor:
    head, body = scales_and_rest(data, lengths.numel())
    ends = lengths.numpy().cumsum()
    out = pooled_empty(int(ends[-1]) if ends.size else 0, np.float32)
    codes.decode_trits(body, ends, head, out)
    return torch.from_numpy(out)


@in_turn
def qsgd_encode(
    values: Flat, lengths: Tensor, names: tuple[str, ...], key: Key, levels: int, bucket: int | None
) -> Tensor:
    values = in_one_place(values).contiguous() if bucket is None or isinstance(values, Tensor) else values
    x, (table, pieces, block) = places(values), _cut(lengths, bucket)
    bits = (2 * levels).bit_length()
    message, head, body = pooled_message(num_blocks(table, bucket), packed_bytes(values.numel(), bits))
    if bucket is None:
        norms = np.sqrt(scales.tops_and_squares(x.memory, table)[1])
        head[:] = np.where(np.isfinite(norms), np.minimum(norms, _LARGEST), norms)
    heads = np.empty(pieces.start.size, dtype=np.uint8)
    random = streams(key, names), np.uint64(key.step)
    codes.encode(x, pieces, block, codes.NORM, bucket is None, head, *random, levels, bits, True, heads, body)
    join(pieces.start, bits, heads, body)
    return message


@in_turn
def qsgd_decode(
    data: Tensor, lengths: Tensor, levels: int, bucket: int | None, biased: bool, out: Flat | None = None
) -> Flat:
    head, body = scales_and_rest(data, num_blocks(tuple(lengths.tolist()), bucket))
    if biased:
        head = (head.astype(np.float64) / _divisors(tuple(lengths.tolist()), bucket, levels)).astype(np.float32)
    return _levels(body, lengths, bucket, head, levels, (2 * levels).bit_length(), out)


@lru_cache(maxsize=16)
def _divisors(lengths: tuple[int, ...], bucket: int | None, levels: int) -> NDArray[np.float64]:
    return (1 + omega(blocks(torch.tensor(lengths, dtype=torch.int64), bucket), levels)).numpy()


@in_turn
def integer_encode(values: Tensor, lengths: Tensor, bits: int, block: int) -> Tensor:
    x, (table, pieces, _) = _flat(values), _cut(lengths, block)
    message, head, body = pooled_message(num_blocks(table, block), packed_bytes(x.size, bits))
    heads = np.empty(pieces.start.size, dtype=np.uint8)
    random = _NO_KEYS, np.uint64(0)
    levels = (1 << bits - 1) - 1
    codes.encode(places(x), pieces, block, codes.LARGEST, False, head, *random, levels, bits, False, heads, body)
    join(pieces.start, bits, heads, body)
    return message


@in_turn
def integer_decode(data: Tensor, lengths: Tensor, bits: int, block: int, out: Flat | None = None) -> Flat:
    head, body = scales_and_rest(data, num_blocks(tuple(lengths.tolist()), block))
    return _levels(body, lengths, block, head, (1 << bits - 1) - 1, bits, out)


def _levels(
    body: NDArray[np.uint8],
    lengths: Tensor,
    block: int | None,
    head: NDArray[np.float32],
    levels: int,
    bits: int,
    out: Flat | None,
) -> Flat:
    table, pieces, size = _cut(lengths, block)
    out = torch.from_numpy(pooled_empty(sum(table), np.float32)) if out is None else out
    codes.decode(body, pieces, size, head, levels, bits, places(out))
    return out


@in_turn
def natural_encode(values: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key) -> Tensor:
    raw, (_, pieces, _) = _flat(values).view(np.int32), _cut(lengths, None)
    message, _, body = pooled_message(0, packed_bytes(raw.size, 9))
    heads = np.empty(pieces.start.size, dtype=np.uint8)
    codes.encode_powers(raw, pieces, streams(key, names), np.uint64(key.step), heads, body)
    join(pieces.start, 9, heads, body)
    return message


@in_turn
def natural_decode(data: Tensor, count: int) -> Tensor:
    out = pooled_empty(count, np.int32)
    codes.decode_powers(data.numpy(), whole((count,)), out)
    return torch.from_numpy(out.view(np.float32))
