"""Signs: one bit a value, with one scale per segment or two; and error feedback with them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.core.segments import known
from gradwire.kernels import fused, quantize
from gradwire.kernels.cuda.accumulate import Entering, fetch, memory_of, no_report, put, readable
from gradwire.kernels.cuda.block_signs import are_blocks, are_short, encode_blocks, encode_short
from gradwire.kernels.cuda.codes import message
from gradwire.kernels.cuda.decode import SIDE, SIGN, decode
from gradwire.kernels.cuda.segment_stats import MEAN, ROOT, SIDES, survey
from gradwire.kernels.cuda.tables import BLOCK, Grid, definition, grid, placed


@triton.jit
def _deduct_tile(
    residual, scales, n, tile, tile_row, tile_segment, row_segment, starts, MASKED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    base = tile * BLOCK
    at = tl.arange(0, BLOCK)
    live = at < n - base
    row, stop = tl.load(tile_row + tile), tl.load(tile_row + tile + 1)
    scale = tl.zeros([BLOCK], tl.float32) + tl.load(scales + tl.load(tile_segment + tile))
    x = fetch(residual + base, at, live, MASKED)
    for later in range(row + 1, stop):
        segment = tl.load(row_segment + later)
        first = (tl.load(starts + segment) - base).to(tl.int32)
        scale = tl.where(at >= first, tl.load(scales + segment), scale)
    put(residual + base, at, x - tl.where(x >= 0, scale, -scale), live, MASKED)


@triton.jit
def _deduct(residual, scales, n, tile_row, tile_segment, row_segment, starts, BLOCK: tl.constexpr):
    """Take off what the signs and scales say, from the end on: what was written last may still be in the cache."""
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    if (tile + 1) * BLOCK <= n:
        _deduct_tile(residual, scales, n, tile, tile_row, tile_segment, row_segment, starts, False, BLOCK)
    else:
        _deduct_tile(residual, scales, n, tile, tile_row, tile_segment, row_segment, starts, True, BLOCK)


@placed
def sign_encode(values: Tensor, lengths: Tensor, norm: bool) -> Tensor:
    if not readable(values):
        return definition(quantize.sign_encode)(values, lengths, norm)
    where = grid(known(lengths), values.device)
    if are_blocks(where):
        return encode_blocks(values, where, norm)
    if are_short(where):
        return encode_short(values, where, norm)
    data, scales, bits = message(lengths.numel(), where.n, 1, values.device)
    survey(values, where, ROOT if norm else MEAN, scales, bits=bits)
    return data


@placed
def sign_decode(data: Tensor, lengths: Tensor, out: Tensor | None = None) -> Tensor:
    scales, bits = quantize.scales_and_codes(data, lengths.numel())
    return decode(bits, scales, grid(known(lengths), data.device), SIGN, out=out)


@placed
def onebit_encode(values: Tensor, lengths: Tensor) -> Tensor:
    if not readable(values):
        return definition(quantize.onebit_encode)(values, lengths)
    where, segments = grid(known(lengths), values.device), lengths.numel()
    data, scales, bits = message(2 * segments, where.n, 1, values.device)
    survey(values, where, SIDES, scales[:segments], scales[segments:], bits)
    return data


@placed
def onebit_decode(data: Tensor, lengths: Tensor) -> Tensor:
    sides, bits = quantize.scales_and_codes(data, 2 * lengths.numel())
    upper, lower = sides.view(2, -1)
    return decode(bits, upper, grid(known(lengths), data.device), SIDE, second=lower)


@placed
def feedback_sign_(
    grad: Tensor, residual: Tensor, decay: float, lengths: tuple[int, ...], norm: bool, before: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    where = grid(lengths, grad.device)
    if where.n == 0 or not readable(grad, residual):
        return definition(fused.feedback_sign_)(grad, residual, decay, lengths, norm, before)
    entering = Entering(grad, no_report(grad.device), decay, memory_of(residual, before))
    if are_blocks(where):
        data = encode_blocks(residual, where, norm, entering)
    else:
        data, scales, bits = message(len(lengths), where.n, 1, grad.device)
        survey(residual, where, ROOT if norm else MEAN, scales, bits=bits, entering=entering)
        deduct(residual, scales, where)
    return data, entering.nonfinite.view(torch.bool)


def deduct(residual: Tensor, scales: Tensor, where: Grid) -> None:
    """Take off what its signs say, times the scales."""
    _deduct[(where.tiles,)](residual, scales, where.n, *where.tables, BLOCK, num_warps=8)
