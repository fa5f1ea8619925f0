"""Codes and scales back to floats, in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.cuda.codes import load_codes
from gradwire.kernels.cuda.enter import put
from gradwire.kernels.cuda.tables import BLOCK, Grid

SIGN = tl.constexpr(0)
SIDE = tl.constexpr(1)  # one of two scales
LEVEL = tl.constexpr(2)  # scale * (code / levels)
TRIT = tl.constexpr(3)
POWER = tl.constexpr(4)  # a sign and an exponent; no scale


@triton.jit
def _value(code, scale, other, levels, KIND: tl.constexpr):
    if KIND == SIGN:
        x = tl.where(code == 1, scale, -scale)
    elif KIND == SIDE:
        x = tl.where(code == 1, scale, other)
    elif KIND == LEVEL:
        part = (code - levels).to(tl.float32)
        x = scale * tl.div_rn(part, tl.zeros_like(part) + levels)
    elif KIND == TRIT:
        x = scale * (code - 1).to(tl.float32)
    else:
        power = ((code & 0xFF) << 23).to(tl.float32, bitcast=True)
        x = tl.where(code > 0xFF, -power, power)
    return x


@triton.jit
def _third(byte, digit):
    power = tl.where(digit == 0, 1, tl.where(digit == 1, 3, tl.where(digit == 2, 9, tl.where(digit == 3, 27, 81))))
    return byte // power % 3


@triton.jit
def _tile(
    data, scales, second, out, n, size, levels, tile_row, row_segment, starts, first_group,
    KIND: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    base = tile * BLOCK
    at = tl.arange(0, BLOCK)
    live = at < n - base
    if KIND == TRIT:
        digit = (base % 5).to(tl.int32) + at
        code = _third(tl.load(data + base // 5 + digit // 5, mask=live, other=0).to(tl.int32), digit % 5)
    else:
        byte = tile * (BLOCK // 8) * BITS
        code = load_codes(data + byte, at, size - byte, live, BITS)
    scale = tl.zeros([BLOCK], tl.float32)
    other = scale
    if KIND != POWER:
        for row in range(tl.load(tile_row + tile), tl.load(tile_row + tile + 1)):
            segment = tl.load(row_segment + row)
            ahead = base - tl.load(starts + segment)
            first = tl.maximum(-ahead, 0).to(tl.int32)
            inside = at >= first  # and no later segment's: those come after
            if GROUP == 0:
                scale = tl.where(inside, tl.load(scales + segment), scale)
                if KIND == SIDE:
                    other = tl.where(inside, tl.load(second + segment), other)
            else:
                ahead = tl.maximum(ahead, 0)
                end = tl.minimum(tl.load(starts + segment + 1) - base, BLOCK).to(tl.int32)
                group = (at - first + (ahead % GROUP).to(tl.int32)) // GROUP
                to = scales + tl.load(first_group + segment) + ahead // GROUP
                scale = tl.where(inside, tl.load(to + group, mask=inside & (at < end), other=0.0), scale)
    put(out + base, at, _value(code, scale, other, levels, KIND), live, MASKED)


@triton.jit
def _decode(
    data, scales, second, out, n, size, levels, tile_row, row_segment, starts, first_group,
    KIND: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if (tl.program_id(0).to(tl.int64) + 1) * BLOCK <= n:
        _tile(
            data, scales, second, out, n, size, levels, tile_row, row_segment, starts, first_group,
            KIND, BITS, GROUP, False, BLOCK,
        )  # fmt: skip
    else:
        _tile(
            data, scales, second, out, n, size, levels, tile_row, row_segment, starts, first_group,
            KIND, BITS, GROUP, True, BLOCK,
        )  # fmt: skip


def decode(
    data: Tensor,
    scales: Tensor,
    where: Grid,
    kind: tl.constexpr,
    bits: int = 1,
    levels: int = 1,
    second: Tensor | None = None,
    group: int = 0,
    first_group: Tensor | None = None,
) -> Tensor:
    """The values of a stream of codes. With ``group``, a scale holds for that many values of a segment."""
    out = torch.empty(where.n, dtype=torch.float32, device=data.device)
    if where.n:
        _decode[(where.tiles,)](
            data,
            scales,
            scales if second is None else second,
            out,
            where.n,
            data.numel(),
            levels,
            where.tile_row,
            where.row_segment,
            where.starts,
            where.starts if first_group is None else first_group,
            kind.value,
            bits,
            group,
            BLOCK,
            num_warps=8,
            enable_fp_fusion=False,
        )
    return out
