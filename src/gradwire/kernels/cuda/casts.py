"""Shorter float formats and back, each in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels import quantize
from gradwire.kernels.cuda.accumulate import fetch, put, readable
from gradwire.kernels.cuda.launch import form, launch
from gradwire.kernels.cuda.tables import definition, placed

_TILE = 2048
_NAN = tl.constexpr(0x7FC0)  # of bfloat16


@triton.jit
def _tile(values, out, base, n, most, ENCODE: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr):
    at = tl.arange(0, TILE)
    live = at < n - base
    if values.dtype.element_ty == tl.int16:
        raw = tl.load(values + base + at, mask=live, other=0) if MASKED else tl.load(values + base + at)
        x = (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        x = fetch(values + base, at, live, MASKED)
    if ENCODE:
        size = tl.abs(x)
        beyond = (size > most) & (size < float("inf"))
        x = tl.where(beyond, tl.where(x > 0, most, -most), x)
    if out.dtype.element_ty == tl.int16:
        raw = x.to(tl.int32, bitcast=True)
        even = (raw + 0x7FFF + (raw >> 16 & 1)) >> 16
        put(out + base, at, tl.where(x == x, even, _NAN).to(tl.int16), live, MASKED)
    else:
        put(out + base, at, x.to(out.dtype.element_ty), live, MASKED)


@triton.jit
def _cast(values, out, n, most, ENCODE: tl.constexpr, TILE: tl.constexpr):
    """ENCODE: what is finite, yet beyond ``most``, becomes that. Integers of 16 bits are bfloat16.

    Those are made by hand, because Triton's interpreter would cut them off instead of rounding.
    """
    base = tl.program_id(0).to(tl.int64) * TILE
    if base + TILE <= n:
        _tile(values, out, base, n, most, ENCODE, False, TILE)
    else:
        _tile(values, out, base, n, most, ENCODE, True, TILE)


@placed
def cast_encode(values: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype not in (torch.float16, torch.bfloat16) or values.dtype != torch.float32 or not readable(values):
        return definition(quantize.cast_encode)(values, dtype)
    return _run(values, dtype, torch.finfo(dtype).max)


@placed
def cast_decode(values: Tensor) -> Tensor:
    return _run(values, torch.float32, 0.0) if readable(values) else definition(quantize.cast_decode)(values)


def _run(values: Tensor, dtype: torch.dtype, most: float) -> Tensor:
    """``most``: 0 if there is nothing that it could be beyond."""
    out, n = torch.empty_like(values, dtype=dtype), values.numel()
    if n:
        fresh = _bits(values), _bits(out)
        launch(_cast, -(-n // _TILE), (n, *form(*fresh)), fresh, (n, most, most > 0, _TILE), num_warps=4)
    return out


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x
