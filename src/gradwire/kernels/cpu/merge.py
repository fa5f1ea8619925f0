"""The server's part between two legs: messages are decoded, added and encoded again while a tile is in cache."""

import numpy as np
import torch
from numba import prange
from numpy.typing import NDArray
from torch import Tensor

from gradwire.kernels.bits import packed_bytes
from gradwire.kernels.cpu import scales
from gradwire.kernels.cpu.buffer_pool import pooled_empty, pooled_message
from gradwire.kernels.cpu.codes import decode_piece, leave_rounding
from gradwire.kernels.cpu.packing import join
from gradwire.kernels.cpu.pieces import blocked, whole
from gradwire.kernels.cpu.signs import choose_signs, message_of_signs
from gradwire.kernels.cpu.threads import compiled, in_turn, serial
from gradwire.kernels.groups import num_blocks


@serial
def _add(total, part, first):
    for i in range(total.size):
        total[i] = part[i] if first else total[i] + part[i]


@serial
def _over(total, count, error, has_error):
    """Divide, and add an error on top of it."""
    for i in range(total.size):
        total[i] = total[i] / count
    if has_error:
        for i in range(total.size):
            total[i] = total[i] + error[i]


@compiled
def _mean_of_signs(rows, heads, pieces, error, has_error, what, mean, sums):
    world, body = rows.shape[0], 4 * heads.shape[1]
    for t in prange(sums.size):
        a, b = pieces.start[t], pieces.stop[t]
        total, part = mean[a:b], np.empty(b - a, dtype=np.float32)
        for r in range(world):
            size = heads[r, pieces.segment[t]]
            choose_signs(rows[r][body:], a, size, -size, part)
            _add(total, part, r == 0)
        _over(total, np.float32(world), error[a:b] if has_error else total, has_error)
        sums[t] = scales.squares(total) if what == scales.SQUARES else scales.magnitudes(total)


@compiled
def _merge_integers(rows, tops, pieces, block, levels, bits, error, has_error, mean, group_scales, heads, out):
    world, body = rows.shape[0], 4 * tops.shape[1]
    for t in prange(heads.size):
        a, b = pieces.start[t], pieces.stop[t]
        total, part = mean[a:b], np.empty(b - a, dtype=np.float32)
        codes = np.empty(b - a, dtype=np.uint32)
        for r in range(world):
            decode_piece(rows[r][body:], a, pieces.group[t], block, levels, bits, tops[r], codes, part)
            _add(total, part, r == 0)
        _over(total, np.float32(world), error[a:b] if has_error else total, has_error)
        heads[t] = leave_rounding(total, a, pieces.group[t], block, levels, bits, group_scales, codes, out)


def _parts(messages: Tensor, count: int) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """The scales of all messages, and the messages."""
    rows = messages.contiguous().numpy()
    return np.ascontiguousarray(rows[:, : 4 * count]).view(np.float32), rows


@in_turn
def merge_sign(
    messages: Tensor, error: Tensor | None, lengths: tuple[int, ...], norm: bool, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    heads, rows = _parts(messages, len(lengths))
    pieces, what = whole(lengths), scales.SQUARES if norm else scales.MAGNITUDES
    mean = pooled_empty(sum(lengths), np.float32)
    sums = np.empty(pieces.start.size)
    old = mean if error is None else error.numpy()
    _mean_of_signs(rows, heads, pieces, old, error is not None, what, mean, sums)
    message, left = message_of_signs(mean, lengths, what, sums), torch.from_numpy(mean)
    return message, None if error is None else left if out is None else out.copy_(left)


@in_turn
def merge_integer(
    messages: Tensor, error: Tensor | None, lengths: tuple[int, ...], bits: int, block: int
) -> tuple[Tensor, Tensor | None]:
    groups, pieces = num_blocks(lengths, block), blocked(lengths, block)
    tops, rows = _parts(messages, groups)
    mean = pooled_empty(sum(lengths), np.float32)
    message, head, body = pooled_message(groups, packed_bytes(mean.size, bits))
    loose = np.empty(pieces.start.size, dtype=np.uint8)
    about = block, (1 << bits - 1) - 1, bits, mean if error is None else error.numpy(), error is not None
    _merge_integers(rows, tops, pieces, *about, mean, head, loose, body)
    join(pieces.start, bits, loose, body)
    return message, None if error is None else torch.from_numpy(mean)
