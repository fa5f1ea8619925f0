"""Signs: bits and their scale in one pass over the values."""

import numpy as np
import torch
from numba import prange
from numpy.typing import NDArray
from torch import Tensor

from gradwire.core.layout import Flat
from gradwire.kernels.bits import packed_bytes
from gradwire.kernels.cpu import scales
from gradwire.kernels.cpu.buffer_pool import pooled_empty, pooled_message, scales_and_rest
from gradwire.kernels.cpu.packing import join, pack_signs, sign_at, signs_at
from gradwire.kernels.cpu.pieces import whole
from gradwire.kernels.cpu.places import leave, places, stretch
from gradwire.kernels.cpu.threads import compiled, in_turn, serial
from gradwire.kernels.cpu.vectors import choose


@compiled
def _encode(x, pieces, what, sums, heads, out):
    for t in prange(sums.size):
        a, b = pieces.start[t], pieces.stop[t]
        piece = x[a:b]
        sums[t] = scales.squares(piece) if what == scales.SQUARES else scales.magnitudes(piece)
        heads[t] = pack_signs(piece, a, out)


@compiled
def _encode_sides(x, pieces, above, below, counts, heads, out):
    for t in prange(above.size):
        a, b = pieces.start[t], pieces.stop[t]
        piece = x[a:b]
        above[t] = scales.upper(piece)
        below[t] = scales.lower(piece)
        count = 0
        for j in range(piece.size):
            count += np.int64(piece[j] >= 0.0)
        counts[t] = count
        heads[t] = pack_signs(piece, a, out)


@serial
def choose_signs(data, first, up, down, out):
    """The upper number where a bit is set, from bit number ``first`` on, else the lower one."""
    n = out.size
    begin = min(n, -first % 8)
    end = begin + (n - begin) // 64 * 64
    for i in range(begin):
        out[i] = up if sign_at(data, first + i) else down
    for i in range(begin, end, 64):
        choose(signs_at(data, first + i), up, down, out, i)
    for i in range(end, n):
        out[i] = up if sign_at(data, first + i) else down


@compiled
def _decode(data, pieces, above, below, out):
    for t in prange(pieces.start.size):
        a, b = pieces.start[t], pieces.stop[t]
        piece = stretch(out, a, b)
        choose_signs(data, a, above[pieces.segment[t]], below[pieces.segment[t]], piece)
        leave(out, a, b, piece)


@compiled
def _subtract_signs(v, pieces, sizes, heads, out):
    """Pack the signs of the target, and leave what they do not say."""
    for t in prange(heads.size):
        a, b = pieces.start[t], pieces.stop[t]
        target = v[a:b]
        heads[t] = pack_signs(target, a, out)
        size = sizes[pieces.segment[t]]
        for i in range(target.size):
            target[i] = target[i] - (size if target[i] >= 0.0 else -size)


def message_of_signs(v: NDArray[np.float32], lengths: tuple[int, ...], what: int, sums: NDArray[np.float64]) -> Tensor:
    """The signs of a target and their sizes, given the sums of pieces. What they do not say is left in the target."""
    pieces = whole(lengths)
    message, head, body = pooled_message(len(lengths), packed_bytes(v.size, 1))
    head[:] = scales.mean(scales.summed(sums, pieces.segment, len(lengths)), lengths, what)
    heads = np.empty(sums.size, dtype=np.uint8)
    _subtract_signs(v, pieces, head, heads, body)
    join(pieces.start, 1, heads, body)
    return message


def _table(lengths: Tensor) -> tuple[int, ...]:
    return tuple(lengths.tolist())


@in_turn
def sign_encode(values: Tensor, lengths: Tensor, norm: bool) -> Tensor:
    x, table = values.detach().contiguous().numpy(), _table(lengths)
    pieces, what = whole(table), scales.SQUARES if norm else scales.MAGNITUDES
    message, head, body = pooled_message(len(table), packed_bytes(x.size, 1))
    sums, heads = np.empty(pieces.start.size), np.empty(pieces.start.size, dtype=np.uint8)
    _encode(x, pieces, what, sums, heads, body)
    join(pieces.start, 1, heads, body)
    head[:] = scales.mean(scales.summed(sums, pieces.segment, len(table)), table, what)
    return message


@in_turn
def sign_decode(data: Tensor, lengths: Tensor, out: Flat | None = None) -> Flat:
    head, body = scales_and_rest(data, lengths.numel())
    return _decoded(body, lengths, head, -head, out)


@in_turn
def onebit_encode(values: Tensor, lengths: Tensor) -> Tensor:
    x, table = values.detach().contiguous().numpy(), _table(lengths)
    pieces = whole(table)
    message, head, body = pooled_message(2 * len(table), packed_bytes(x.size, 1))
    above, below, counts = (np.empty(pieces.start.size) for _ in range(3))
    heads = np.empty(pieces.start.size, dtype=np.uint8)
    _encode_sides(x, pieces, above, below, counts, heads, body)
    join(pieces.start, 1, heads, body)
    up, down, held = (scales.summed(part, pieces.segment, len(table)) for part in (above, below, counts))
    means = up / np.maximum(held, 1), down / np.maximum(np.array(table) - held, 1)
    head[:] = np.concatenate(means).astype(np.float32)
    return message


@in_turn
def onebit_decode(data: Tensor, lengths: Tensor) -> Flat:
    head, body = scales_and_rest(data, 2 * lengths.numel())
    above, below = np.split(head, 2)
    return _decoded(body, lengths, above, below)


def _decoded(
    body: NDArray[np.uint8],
    lengths: Tensor,
    above: NDArray[np.float32],
    below: NDArray[np.float32],
    out: Flat | None = None,
) -> Flat:
    table = _table(lengths)
    out = torch.from_numpy(pooled_empty(sum(table), np.float32)) if out is None else out
    _decode(body, whole(table), above, below, places(out))
    return out
