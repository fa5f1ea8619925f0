"""Error feedback for the CPU: scale, bits and debt with as few passes as the scale allows."""

import numpy as np
import torch
from numba import prange
from torch import Tensor

from gradwire.kernels.bits import packed_bytes
from gradwire.kernels.cpu import scales
from gradwire.kernels.cpu.codes import TILE, pack_tile
from gradwire.kernels.cpu.threads import compiled, in_turn, serial
from gradwire.kernels.fused import Accumulation


@serial
def accumulate_tile(g, v, u, m, nesterov, decay, kind):
    """Add a tile of the gradient to the memories. Returns whether any of it was not finite; that counts as zero."""
    raw = g.view(np.int32)
    bad = np.int32(0)
    for j in range(g.size):
        bad |= np.int32((raw[j] & np.int32(0x7F800000)) == np.int32(0x7F800000))
    if bad:
        g = np.where(np.isfinite(g), g, np.float32(0.0))
    if kind == 0:
        for j in range(g.size):
            v[j] = g[j] + decay * v[j]
    elif nesterov:
        for j in range(g.size):
            u[j] = m * (u[j] + g[j])
            v[j] = v[j] + u[j] + g[j]
    else:
        for j in range(g.size):
            u[j] = m * u[j] + g[j]
            v[j] = v[j] + u[j]
    return bad != 0


@compiled
def _accumulate(grad, residual, momentum, m, nesterov, decay, kind):
    n = grad.size
    broken = np.zeros((n + TILE - 1) // TILE, dtype=np.uint8)
    for t in prange(broken.size):
        a, b = t * TILE, min(n, (t + 1) * TILE)
        broken[t] = accumulate_tile(grad[a:b], residual[a:b], momentum[a:b], m, nesterov, decay, kind)
    return broken.any()


@compiled
def _signs(v, ends, sizes, out):
    """Pack the signs of the target, and leave what they do not say."""
    n = v.size
    for t in prange((n + TILE - 1) // TILE):
        a, b = t * TILE, min(n, (t + 1) * TILE)
        for i in range(a // 8, (b + 7) // 8):
            byte = 0
            for j in range(min(8, n - 8 * i)):
                byte |= (v[8 * i + j] >= 0.0) << j
            out[i] = byte
        s = np.searchsorted(ends, a, side="right")
        while a < b:
            stop = min(b, ends[s])
            size = sizes[s]
            for i in range(a, stop):
                v[i] = v[i] - (size if v[i] >= 0.0 else -size)
            a = stop
            s += 1


@compiled
def _integers(v, scales_, ends, levels, bits, table, out):
    """Round the target to levels, pack them, and leave the rounding."""
    n = v.size
    most = np.float32(levels)
    for t in prange((n + TILE - 1) // TILE):
        a, b = t * TILE, min(n, (t + 1) * TILE)
        codes = np.empty(b - a, dtype=np.uint32)
        g = np.searchsorted(ends, a, side="right")
        j = a
        while j < b:
            stop = min(b, ends[g])
            scale = scales_[g]
            divisor = scale if scale != 0.0 else np.float32(1.0)
            for i in range(j, stop):
                code = levels + np.int32(np.rint(v[i] / divisor * most))
                codes[i - a] = code
                v[i] = v[i] - scale * table[min(max(code, 0), 2 * levels)]
            j = stop
            g += 1
        pack_tile(codes, bits, out[a * bits // 8 : (b * bits + 7) // 8])


@in_turn
def accumulate_(grad: Tensor, residual: Tensor, momentum: Tensor | None, rule: Accumulation) -> Tensor:
    v = residual.numpy()
    u = v if momentum is None else momentum.numpy()
    g = grad.detach().float().contiguous().numpy()
    numbers = np.float32(rule.momentum), rule.nesterov, np.float32(rule.decay), int(momentum is not None)
    return torch.tensor(bool(_accumulate(g, v, u, *numbers)))


@in_turn
def feedback_sign_(
    grad: Tensor, residual: Tensor, decay: float, lengths: tuple[int, ...], norm: bool
) -> tuple[Tensor, Tensor]:
    broken = accumulate_(grad, residual, None, Accumulation(decay=decay))
    v, groups = residual.numpy(), np.array(lengths, dtype=np.int64)
    sums = scales.total(v, groups, scales.SQUARES if norm else scales.TOTAL) / np.maximum(groups, 1)
    sizes = (np.sqrt(sums) if norm else sums).astype(np.float32)
    message = np.empty(4 * sizes.size + packed_bytes(v.size, 1), dtype=np.uint8)
    message[: 4 * sizes.size] = sizes.view(np.uint8)
    _signs(v, groups.cumsum(), sizes, message[4 * sizes.size :])
    return torch.from_numpy(message), broken


@in_turn
def feedback_integer_(
    grad: Tensor, residual: Tensor, decay: float, lengths: tuple[int, ...], bits: int, block: int
) -> tuple[Tensor, Tensor]:
    broken = accumulate_(grad, residual, None, Accumulation(decay=decay))
    v = residual.numpy()
    groups = scales.cut(np.array(lengths, dtype=np.int64), block)
    tops = scales.largest(v, groups)
    levels = (1 << bits - 1) - 1
    table = np.arange(-levels, levels + 1, dtype=np.float32) / np.float32(levels)
    message = np.empty(4 * tops.size + packed_bytes(v.size, bits), dtype=np.uint8)
    message[: 4 * tops.size] = tops.view(np.uint8)
    _integers(v, tops, groups.cumsum(), levels, bits, table, message[4 * tops.size :])
    return torch.from_numpy(message), broken
