"""Casts to 16 bits, in integers: round to the nearest, of two to the even one, and saturate what is finite."""

import numpy as np
import torch
from numba import prange
from torch import Tensor

from gradwire.kernels.cpu.buffer_pool import pooled_empty
from gradwire.kernels.cpu.pieces import TILE
from gradwire.kernels.cpu.threads import compiled, in_turn, inlined, serial
from gradwire.kernels.cpu.vectors import as_bits, as_float

_MAGNITUDE, _INFINITE = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)
_LEAST_NORMAL = np.uint32(0x38800000)  # of float16: 2^-14
_REBIAS = np.uint32(0x38000000)  # between the exponents of the two formats
_HALF = np.uint32(0x3F000000)  # 0.5, whose last place is that of float16's subnormals


@inlined
def _rounded(size, shift):
    """Without the lowest bits; what they were decides."""
    odd = (size >> np.uint32(shift)) & np.uint32(1)
    return (size + np.uint32((1 << shift - 1) - 1) + odd) >> np.uint32(shift)


@inlined
def _sign(raw):
    return raw >> np.uint32(16) & np.uint32(0x8000)


@serial
def _to_bfloat16(raw, out):
    for i in range(raw.size):
        size = raw[i] & _MAGNITUDE
        finite = min(_rounded(size, 16), np.uint32(0x7F7F))
        broken = np.uint32(0x7FC0) if size > _INFINITE else np.uint32(0x7F80)
        out[i] = (finite if size < _INFINITE else broken) | _sign(raw[i])


@serial
def _to_float16(raw, out):
    for i in range(raw.size):
        size = raw[i] & _MAGNITUDE
        normal = min(_rounded(size - _REBIAS, 13), np.uint32(0x7BFF))
        small = as_bits(as_float(size) + np.float32(0.5)) - _HALF  # the sum rounds where float16 would
        broken = np.uint32(0x7E00) if size > _INFINITE else np.uint32(0x7C00)
        finite = small if size < _LEAST_NORMAL else normal
        out[i] = (finite if size < _INFINITE else broken) | _sign(raw[i])


@compiled
def _cast(raw, half, out):
    n = raw.size
    for t in prange((n + TILE - 1) // TILE):
        a, b = t * TILE, min(n, (t + 1) * TILE)
        if half:
            _to_float16(raw[a:b], out[a:b])
        else:
            _to_bfloat16(raw[a:b], out[a:b])


@in_turn
def cast_encode(values: Tensor, dtype: torch.dtype) -> Tensor:
    raw = values.detach().float().contiguous().numpy().view(np.uint32)
    out = pooled_empty(raw.size, np.uint16)
    _cast(raw, dtype == torch.float16, out)
    return torch.from_numpy(out.view(np.int16)).view(dtype).view(values.shape)


@in_turn
def cast_decode(values: Tensor) -> Tensor:
    # torch's own loop is as fast as memory; only its output would be of fresh pages.
    return torch.from_numpy(pooled_empty(values.numel(), np.float32)).copy_(values.flatten()).view(values.shape)
