"""Shorter float formats and back, each in one pass; and error feedback of values that are sent as they are."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels import fused, quantize
from gradwire.kernels.cuda.accumulate import enter, fetch, launch_tiles, put, readable, report, rule_of
from gradwire.kernels.cuda.launch import form, launch
from gradwire.kernels.cuda.tables import definition, placed
from gradwire.kernels.fused import Accumulation

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


@triton.jit
def _sum_tile(
    grad, v, u, new_v, new_u, sent, nonfinite, at, live, m, decay, limit, RULE: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    target, bad = enter(grad, v, u, new_v, new_u, at, live, m, decay, RULE, False, MASKED)
    within = tl.where(target > limit, limit, tl.where(target < -limit, -limit, target))
    put(sent, at, within, live, MASKED)
    put(new_v, at, target - within, live, MASKED)
    report(bad, nonfinite)


@triton.jit
def _feedback_sum(
    grad, v, u, new_v, new_u, sent, nonfinite, n, m, decay, limit, RULE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    base = tl.program_id(0).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    live = at < n - base
    g, v, u, new_v, new_u, out = grad + base, v + base, u + base, new_v + base, new_u + base, sent + base
    if base + BLOCK <= n:
        _sum_tile(g, v, u, new_v, new_u, out, nonfinite, at, live, m, decay, limit, RULE, False)
    else:
        _sum_tile(g, v, u, new_v, new_u, out, nonfinite, at, live, m, decay, limit, RULE, True)


@placed
def feedback_sum_(
    grad: Tensor,
    before: tuple[Tensor, Tensor | None],
    after: tuple[Tensor, Tensor | None],
    rule: Accumulation,
    limit: float,
) -> tuple[Tensor, Tensor]:
    if grad.numel() == 0 or not readable(grad, *before, *after):
        return definition(fused.feedback_sum_)(grad, before, after, rule, limit)
    sent = torch.empty_like(after[0])
    # Without momentum, its place is taken by the residual, and not touched.
    old, new = ((v, v if u is None else u) for v, u in (before, after))
    numbers, kind = (rule.momentum, rule.decay, limit), rule_of(after[1], rule)
    return sent, launch_tiles(_feedback_sum, (grad, *old, *new, sent), numbers, kind)
