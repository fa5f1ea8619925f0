"""Error feedback for the CPU: scale, bits and error with as few passes as the scale allows."""

import numpy as np
import torch
from numba import prange
from numpy.typing import NDArray
from torch import Tensor

from gradwire.core.layout import Flat
from gradwire.kernels.bits import packed_bytes
from gradwire.kernels.cpu import scales
from gradwire.kernels.cpu.buffer_pool import pooled_message
from gradwire.kernels.cpu.codes import LARGEST, levels_of, nearest, scale_of
from gradwire.kernels.cpu.halves import gradient, stretch
from gradwire.kernels.cpu.packing import join, pack
from gradwire.kernels.cpu.pieces import blocked, groups_of, whole
from gradwire.kernels.cpu.places import carry
from gradwire.kernels.cpu.signs import subtract_signs
from gradwire.kernels.cpu.threads import compiled, in_turn, inlined, serial
from gradwire.kernels.fused import Accumulation

_EXPONENT = np.int32(0x7F800000)


@inlined
def _finite(x, raw):
    return np.float32(0.0) if (raw & _EXPONENT) == _EXPONENT else x


@serial
def accumulate_tile(g, v, u, m, nesterov, decay, kind):
    """Add a tile of the gradient to the memories. Returns whether any of it was not finite; that counts as zero."""
    raw = g.view(np.int32)
    top = np.int32(0)
    if kind == 0:
        for j in range(g.size):
            top = max(top, raw[j] & _EXPONENT)
            v[j] = _finite(g[j], raw[j]) + decay * v[j]
    elif nesterov:
        for j in range(g.size):
            top = max(top, raw[j] & _EXPONENT)
            x = _finite(g[j], raw[j])
            w = m * (u[j] + x)
            u[j] = w
            v[j] = v[j] + w + x
    else:
        for j in range(g.size):
            top = max(top, raw[j] & _EXPONENT)
            w = m * u[j] + _finite(g[j], raw[j])
            u[j] = w
            v[j] = v[j] + w
    return top == _EXPONENT


@compiled
def _accumulate(grad, residual, momentum, m, nesterov, decay, kind, pieces, nonfinite):
    for t in prange(nonfinite.size):
        a, b = pieces.start[t], pieces.stop[t]
        nonfinite[t] = accumulate_tile(stretch(grad, a, b), residual[a:b], momentum[a:b], m, nesterov, decay, kind)


@compiled
def _accumulate_and_sum(grad, old, v, decay, pieces, what, nonfinite, sums):
    for t in prange(nonfinite.size):
        a, b = pieces.start[t], pieces.stop[t]
        target = v[a:b]
        if old.size:
            carry(old[a:b], target)
        nonfinite[t] = accumulate_tile(stretch(grad, a, b), target, target, np.float32(0.0), False, decay, 0)
        sums[t] = scales.squares(target) if what == scales.SQUARES else scales.magnitudes(target)


@serial
def _encode_block(v, scale, levels, codes, decoded):
    nearest(v, scale, levels, codes)
    levels_of(codes, scale, levels, decoded)
    for i in range(v.size):
        v[i] = v[i] - decoded[i]


@compiled
def _integers(grad, old, v, decay, pieces, block, levels, bits, nonfinite, group_scales, heads, out):
    """Accumulate, round the target to levels, pack them, and leave the rounding."""
    for t in prange(heads.size):
        a, b = pieces.start[t], pieces.stop[t]
        target = v[a:b]
        if old.size:
            carry(old[a:b], target)
        nonfinite[t] = accumulate_tile(stretch(grad, a, b), target, target, np.float32(0.0), False, decay, 0)
        codes = np.empty(b - a, dtype=np.uint32)
        decoded = np.empty(min(block, b - a), dtype=np.float32)
        for i in range((b - a + block - 1) // block):
            part = target[i * block : (i + 1) * block]
            scale = scale_of(part, LARGEST)
            group_scales[pieces.group[t] + i] = scale
            _encode_block(part, scale, levels, codes[i * block : (i + 1) * block], decoded[: part.size])
        heads[t] = pack(codes, a, bits, out)


@in_turn
def accumulate_(
    grad: Flat, residual: Tensor, momentum: Tensor | None, rule: Accumulation, before: Tensor | None = None
) -> Tensor:
    v = residual.numpy() if before is None else residual.copy_(before).numpy()
    u = v if momentum is None else momentum.numpy()
    numbers = np.float32(rule.momentum), rule.nesterov, np.float32(rule.decay), int(momentum is not None)
    pieces = whole((v.size,))
    nonfinite = np.zeros(pieces.start.size, dtype=np.bool_)
    _accumulate(gradient(grad), v, u, *numbers, pieces, nonfinite)
    return torch.tensor(bool(nonfinite.any()))


@in_turn
def feedback_sign_(
    grad: Flat, residual: Tensor, decay: float, lengths: tuple[int, ...], norm: bool, before: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    v, pieces = residual.numpy(), whole(lengths)
    what = scales.SQUARES if norm else scales.MAGNITUDES
    count = pieces.start.size
    nonfinite, sums, heads = np.zeros(count, dtype=np.bool_), np.empty(count), np.empty(count, dtype=np.uint8)
    _accumulate_and_sum(gradient(grad), _old(before), v, np.float32(decay), pieces, what, nonfinite, sums)
    sizes = scales.mean(scales.summed(sums, pieces.segment, len(lengths)), lengths, what)
    message, head, body = pooled_message(sizes.size, packed_bytes(v.size, 1))
    head[:] = sizes
    subtract_signs(v, pieces, sizes, heads, body)
    join(pieces.start, 1, heads, body)
    return message, torch.tensor(bool(nonfinite.any()))


@in_turn
def feedback_integer_(
    grad: Flat,
    residual: Tensor,
    decay: float,
    lengths: tuple[int, ...],
    bits: int,
    block: int,
    before: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    v, pieces, groups = residual.numpy(), blocked(lengths, block), groups_of(lengths, block)
    count = pieces.start.size
    nonfinite, heads = np.zeros(count, dtype=np.bool_), np.empty(count, dtype=np.uint8)
    message, head, body = pooled_message(groups, packed_bytes(v.size, bits))
    levels = (1 << bits - 1) - 1
    _integers(
        gradient(grad), _old(before), v, np.float32(decay), pieces, block, levels, bits, nonfinite, head, heads, body
    )
    join(pieces.start, bits, heads, body)
    return message, torch.tensor(bool(nonfinite.any()))


def _old(before: Tensor | None) -> NDArray[np.float32]:
    return np.empty(0, dtype=np.float32) if before is None else before.numpy()
