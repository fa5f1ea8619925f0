"""One number per segment, from one pass; signs are packed, and a gradient enters the memory, in the same pass.

Each row's sums go down in float64; a second, small launch adds up the rows of a segment, always in the same order.
Where a segment has very many, one program would be long about it, and one more launch adds up groups of rows before.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.core.graph_refs import cached_on_device
from gradwire.kernels.cuda.accumulate import PLAIN, READ, Entering, enter, report
from gradwire.kernels.cuda.codes import store_codes
from gradwire.kernels.cuda.tables import BLOCK, Grid

MEAN = tl.constexpr(0)  # of magnitudes
ROOT = tl.constexpr(1)  # of the mean square
NORM = tl.constexpr(2)
SIDES = tl.constexpr(3)  # the mean of what is >= 0, then that of the rest
PEAK = tl.constexpr(4)  # the largest magnitude, at most ``clip`` roots of the mean square; then that limit

LONG = 16384  # rows that one program adds up alone: two turns of its loop take about as long as one more launch
GROUP = 512  # rows that are added up before, where some segment is longer

_PARTS = tl.constexpr(3)
_NARROWEST, _WIDEST = 32, 8192  # rows that a program adds up together
_MOST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _sum(x):
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def _span(row, base, row_segment, starts, BLOCK: tl.constexpr):
    segment = tl.load(row_segment + row)
    first = tl.maximum(tl.load(starts + segment) - base, 0)
    return first.to(tl.int32), tl.minimum(tl.load(starts + segment + 1) - base, BLOCK).to(tl.int32)


@triton.jit
def _only(x, inside, ALL: tl.constexpr):
    if ALL:
        return x
    else:
        return tl.where(inside, x, 0.0)


@triton.jit
def _note(x, inside, to, rows, STAT: tl.constexpr, ALL: tl.constexpr):
    """Write down what one row gives. ALL: everything is inside."""
    if STAT == MEAN:
        tl.store(to, _sum(_only(tl.abs(x), inside, ALL).to(tl.float64)))
    elif STAT == SIDES:
        above = inside & (x >= 0)
        tl.store(to, _sum(tl.where(above, x, 0.0).to(tl.float64)))
        tl.store(to + rows, _sum(tl.where(inside & ~above, x, 0.0).to(tl.float64)))
        tl.store(to + 2 * rows, _sum(above.to(tl.int32)).to(tl.float64))
    else:
        wide = _only(x, inside, ALL).to(tl.float64)
        tl.store(to, _sum(wide * wide))
    if STAT == PEAK:
        tl.store(to + rows, tl.max(tl.max(_only(tl.abs(x), inside, ALL), 1), 0).to(tl.float64))


@triton.jit
def describe(
    x, bits, parts, rows, n, tile, row, stop, row_segment, starts,
    STAT: tl.constexpr, PACK: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pack the signs of a tile, [BLOCK / 8, 8], and write down what each of its rows, up to ``stop``, gives."""
    base = tile * BLOCK
    eight = tl.arange(0, BLOCK // 8)
    at = eight[:, None] * 8 + tl.arange(0, 8)[None, :]
    if PACK:
        store_codes(bits + tile * (BLOCK // 8), eight, (x >= 0).to(tl.int32), at < n - base, 1, MASKED)
    # To know where a row lies, one has to ask twice; where it is alone, it lies everywhere.
    alone = stop == row + 1
    if MASKED:
        alone = stop < row  # never: values end before the tile does
    if alone:
        _note(x, at >= 0, parts + row, rows, STAT, True)
    else:
        while row < stop:
            first, end = _span(row, base, row_segment, starts, BLOCK)
            _note(x, (at >= first) & (at < end), parts + row, rows, STAT, False)
            row += 1


@triton.jit
def _tile(
    grad, residual, fresh, nonfinite, bits, parts, rows, n, decay, tile_row, row_segment, starts,
    STAT: tl.constexpr, PACK: tl.constexpr, RULE: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    old = residual + tile * BLOCK
    new = old if fresh is None else fresh + tile * BLOCK
    live = at < n - tile * BLOCK
    row, stop = tl.load(tile_row + tile), tl.load(tile_row + tile + 1)
    x, bad = enter(grad + tile * BLOCK, old, old, new, old, at, live, 0.0, decay, RULE, True, MASKED)
    if RULE != READ:
        report(bad, nonfinite)
    describe(x, bits, parts, rows, n, tile, row, stop, row_segment, starts, STAT, PACK, MASKED, BLOCK)


@triton.jit
def _survey(
    grad, residual, fresh, nonfinite, bits, parts, rows, n, decay, tile_row, row_segment, starts,
    STAT: tl.constexpr, PACK: tl.constexpr, RULE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if (tl.program_id(0).to(tl.int64) + 1) * BLOCK <= n:
        _tile(
            grad, residual, fresh, nonfinite, bits, parts, rows, n, decay, tile_row, row_segment, starts,
            STAT, PACK, RULE, False, BLOCK,
        )  # fmt: skip
    else:
        _tile(
            grad, residual, fresh, nonfinite, bits, parts, rows, n, decay, tile_row, row_segment, starts,
            STAT, PACK, RULE, True, BLOCK,
        )  # fmt: skip


@triton.jit
def _gather(parts, rows, STAT: tl.constexpr, GROUP: tl.constexpr):
    """Add up a group of rows, and write it down behind all rows. Where they are not of one segment, it is not read."""
    group, groups = tl.program_id(0), rows // GROUP
    at = parts + group * GROUP + tl.arange(0, GROUP)
    to = parts + _PARTS * rows + group
    one = tl.load(at)
    if STAT == SIDES:
        two, three = tl.load(at + rows), tl.load(at + 2 * rows)
        tl.store(to + groups, tl.sum(two, 0))
        tl.store(to + 2 * groups, tl.sum(three, 0))
    if STAT == PEAK:
        tl.store(to + groups, tl.max(tl.load(at + rows), 0))
    tl.store(to, tl.sum(one, 0))


@triton.jit
def _add(parts, rows, at, live, one, two, three, STAT: tl.constexpr):
    one += tl.load(parts + at, mask=live, other=0.0)
    if STAT == SIDES:
        two += tl.load(parts + rows + at, mask=live, other=0.0)
        three += tl.load(parts + 2 * rows + at, mask=live, other=0.0)
    if STAT == PEAK:
        two = tl.maximum(two, tl.load(parts + rows + at, mask=live, other=0.0))
    return one, two, three


@triton.jit
def _conclude(
    parts, rows, starts, segment_row, scales, second, clip_at,
    STAT: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """What a segment's rows give together. GROUP: whole groups of so many are added up already; 0: none is."""
    segment = tl.program_id(0)
    row, end = tl.load(segment_row + segment), tl.load(segment_row + segment + 1)
    count = tl.maximum(tl.load(starts + segment + 1) - tl.load(starts + segment), 1).to(tl.float64)
    one, two, three = (tl.zeros([WIDTH], tl.float64),) * 3
    if GROUP:
        # Rows before the first of the segment's whole groups and behind the last, then the groups as if they were rows.
        first, last = (row + GROUP - 1) // GROUP, end // GROUP
        head = tl.minimum(first * GROUP, end)
        tail = tl.maximum(last * GROUP, head)
        at = tl.arange(0, WIDTH)
        before = at < GROUP
        at = tl.where(before, row + at, tail + at - GROUP)
        one, two, three = _add(parts, rows, at, at < tl.where(before, head, end), one, two, three, STAT)
        parts += _PARTS * rows
        rows = rows // GROUP
        row, end = first, last
    for i in range(row, end, WIDTH):
        at = i + tl.arange(0, WIDTH)
        one, two, three = _add(parts, rows, at, at < end, one, two, three, STAT)
    total = tl.sum(one, 0)
    if STAT == MEAN:
        result = total / count
    elif STAT == ROOT:
        result = tl.sqrt(total / count)
    elif STAT == NORM:
        norm = tl.sqrt(total)
        result = tl.where(norm < float("inf"), tl.minimum(norm, _MOST), norm)
    elif STAT == SIDES:
        above = tl.sum(three, 0)
        exact = (tl.load(starts + segment + 1) - tl.load(starts + segment)).to(tl.float64)
        result = total / tl.maximum(above, 1.0)
        tl.store(second + segment, (tl.sum(two, 0) / tl.maximum(exact - above, 1.0)).to(tl.float32))
    else:
        root = tl.sqrt(total / count)
        clip = tl.load(clip_at)
        limit = tl.where((root != 0) & (clip > 0), clip * root, float("inf")).to(tl.float32)
        tl.store(second + segment, limit)
        result = tl.minimum(tl.max(two, 0).to(tl.float32), limit)
    tl.store(scales + segment, result.to(tl.float32))


def survey(
    x: Tensor,
    where: Grid,
    stat: tl.constexpr,
    scales: Tensor,
    second: Tensor | None = None,
    bits: Tensor | None = None,
    clip: float = 0.0,
    entering: Entering | None = None,
) -> None:
    """Write each segment's ``stat`` into ``scales``, and what else it gives into ``second``; a gradient may enter x."""
    parts = room(where, x.device)
    grad, nonfinite, decay, before = entering or Entering(x, parts)
    if where.tiles:
        _survey[(where.tiles,)](
            grad, x if before is None else before, None if before is None else x, nonfinite,
            parts if bits is None else bits, parts, where.rows, where.n, decay, where.tile_row, where.row_segment,
            where.starts, stat.value, bits is not None, (PLAIN if entering else READ).value, BLOCK,
            num_warps=4 if stat is MEAN and not entering else 8,
            maxnreg=64 if stat is MEAN or entering else 48,  # enough, and more programs fit side by side
            enable_fp_fusion=False,
        )  # fmt: skip
    conclude(parts, where, stat, scales, second, clip)


def conclude(
    parts: Tensor, where: Grid, stat: tl.constexpr, scales: Tensor, second: Tensor | None = None, clip: float = 0.0
) -> None:
    """Add up what `describe` has written down, segment by segment."""
    if scales.numel():
        group = GROUP if where.longest > LONG else 0
        # There may be very many segments of few rows, each of which has a program.
        width = 2 * group or min(max(triton.next_power_of_2(where.longest), _NARROWEST), _WIDEST)
        if group:
            _gather[(where.rows // group,)](parts, where.rows, stat.value, group, enable_fp_fusion=False)
        _conclude[(where.starts.numel() - 1,)](
            parts, where.rows, where.starts, where.segment_row, scales, scales if second is None else second,
            _float64(clip, scales.device), stat.value, group, width,
            num_warps=16 if group else max(1, width // 512), enable_fp_fusion=False,
        )  # fmt: skip


def room(where: Grid, device: torch.device) -> Tensor:
    """Room for what `describe` writes down, three numbers a row, one kind after the other; then the same for groups."""
    return torch.empty(max(where.rows + where.rows // GROUP, 1) * _PARTS.value, dtype=torch.float64, device=device)


@cached_on_device(64)
def _float64(x: float, device: torch.device) -> Tensor:
    return torch.tensor(x, dtype=torch.float64, device=device)  # as an argument it would be a float32
