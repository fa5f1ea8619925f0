"""The server's part of two legs: the mean of ranks' messages, the error on top, encoded again; in one pass.

Eight values in a row are one thread's. Each rank's codes for them are a few bytes, which may lie anywhere. The error is
asked for last: what waits for it is little, and what it would wait for holds many registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels import fused
from gradwire.kernels.cuda.accumulate import READ, fetch, put
from gradwire.kernels.cuda.blockwise import round_integers, slabs, write_blocks
from gradwire.kernels.cuda.codes import eight, load_eights, load_float, message, part_of, reciprocal, word
from gradwire.kernels.cuda.launch import form, launch
from gradwire.kernels.cuda.segment_stats import MEAN, ROOT, conclude, describe, room
from gradwire.kernels.cuda.sign import deduct
from gradwire.kernels.cuda.tables import BLOCK, definition, grid, placed

_WIDEST = 2048  # a larger block does not fit into one slab
_TOGETHER = 16  # ranks, at most, that are unrolled
_SLAB = 512  # one warp, which waits for no other
_EACH = 512  # values of a warp
_SIGN_BIT = tl.constexpr(-0x80000000)
_TO_FLOAT = 0x4B000000  # 2^23: a number in its lower 23 bits makes it that much larger
_INTEGERS = {"maxnreg": 64, "enable_fp_fusion": False}
_SIGNS = {"num_warps": 4, "maxnreg": 80, "enable_fp_fusion": False}


@triton.jit
def _mean(total, share, RANKS: tl.constexpr):
    """Over a power of two, the product with its inverse, ``share``, is the same."""
    return total * share if RANKS & RANKS - 1 == 0 else tl.div_rn(total, tl.zeros_like(total) + RANKS)


@triton.jit
def _add_step(
    total, codes, scale, to_float,
    PLACE: tl.constexpr, HIGH: tl.constexpr, LOW: tl.constexpr, LEVELS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Plus the scale times what code PLACE says.

    The code is not shifted, but made a float where it lies: 2^AT times as large, which the two parts of the reciprocal
    make up for. One instruction does it, if ``to_float`` is no constant: it has room for only one.
    """
    FAR: tl.constexpr = (PLACE + 1) * BITS > 23
    AT: tl.constexpr = PLACE * BITS - 16 if FAR else PLACE * BITS
    if FAR:
        codes = codes >> 16
    raw = codes & ((1 << BITS) - 1 << AT) | to_float
    q = raw.to(tl.float32, bitcast=True) - (8388608.0 + (LEVELS << AT))
    return total + scale * part_of(q, HIGH / (1 << AT), LOW / (1 << AT))


@triton.jit
def _sum_steps(
    codes, scales, stride, row, size, to_float,
    HIGH: tl.constexpr, LOW: tl.constexpr, LEVELS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    RANKS: tl.constexpr, TOGETHER: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The sum of all ranks' values, ``size`` in each. ``codes`` and ``scales`` point to the first rank's."""
    a = row.to(tl.float32) * 0.0
    b, c, d, e, f, g, h = a, a, a, a, a, a, a
    for _ in range(0, RANKS, TOGETHER):
        for _k in tl.static_range(TOGETHER):
            scale = load_float(scales, row * 8 // GROUP * 4, row * 8 < size, WIDE)
            low, high = load_eights(codes, row, (size * BITS + 7) // 8, BITS, WIDE)
            a = _add_step(a, low, scale, to_float, 0, HIGH, LOW, LEVELS, BITS)
            b = _add_step(b, low, scale, to_float, 1, HIGH, LOW, LEVELS, BITS)
            c = _add_step(c, low, scale, to_float, 2, HIGH, LOW, LEVELS, BITS)
            d = _add_step(d, low, scale, to_float, 3, HIGH, LOW, LEVELS, BITS)
            e = _add_step(e, high, scale, to_float, 0, HIGH, LOW, LEVELS, BITS)
            f = _add_step(f, high, scale, to_float, 1, HIGH, LOW, LEVELS, BITS)
            g = _add_step(g, high, scale, to_float, 2, HIGH, LOW, LEVELS, BITS)
            h = _add_step(h, high, scale, to_float, 3, HIGH, LOW, LEVELS, BITS)
            codes += stride
            scales += stride
    return eight(a, b, c, d, e, f, g, h)


@triton.jit
def _slab(
    messages, error, left, scales, out, start, size, group, head, stride, share, to_float,
    HIGH: tl.constexpr, LOW: tl.constexpr, LEVELS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    ACROSS: tl.constexpr, HAS_ERROR: tl.constexpr, RANKS: tl.constexpr, TOGETHER: tl.constexpr, WIDE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ACROSS * GROUP // 8)
    at = tl.arange(0, ACROSS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    live = at < size
    total = _sum_steps(
        messages + head + start // 8 * BITS, messages + group * 4, stride, row, size, to_float,
        HIGH, LOW, LEVELS, BITS, GROUP, RANKS, TOGETHER, WIDE,
    )  # fmt: skip
    x = tl.reshape(_mean(total, share, RANKS), [ACROSS, GROUP])
    if HAS_ERROR:
        x = x + fetch(error + start, at, live, MASKED)
    if MASKED:
        x = tl.where(live, x, 0.0)
    scale, q = round_integers(x, at < 0, error, left + start, at, live, HIGH, LOW, LEVELS, READ, HAS_ERROR, MASKED)
    write_blocks(q, scale, scales, out, start, size, group, at, live, LEVELS, BITS, GROUP, GROUP, ACROSS, True, MASKED)


@triton.jit
def _merge_blocks(
    messages, error, left, scales, out, starts, sizes, groups, head, stride, share, to_float,
    HIGH: tl.constexpr, LOW: tl.constexpr, LEVELS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    ACROSS: tl.constexpr, HAS_ERROR: tl.constexpr, RANKS: tl.constexpr, TOGETHER: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    slab = tl.program_id(0)
    start, size, group = tl.load(starts + slab), tl.load(sizes + slab), tl.load(groups + slab)
    start = tl.multiple_of(start, 8)
    if size == ACROSS * GROUP:
        _slab(
            messages, error, left, scales, out, start, size, group, head, stride, share, to_float,
            HIGH, LOW, LEVELS, BITS, GROUP, ACROSS, HAS_ERROR, RANKS, TOGETHER, WIDE, False,
        )  # fmt: skip
    else:
        _slab(
            messages, error, left, scales, out, start, size, group, head, stride, share, to_float,
            HIGH, LOW, LEVELS, BITS, GROUP, ACROSS, HAS_ERROR, RANKS, 1, False, True,
        )  # fmt: skip


@triton.jit
def _add_sign(total, flips, scale, PLACE: tl.constexpr):
    """Plus the scale, or minus it where bit PLACE of ``flips`` is set."""
    return total + (flips << (31 - PLACE) & _SIGN_BIT ^ scale).to(tl.float32, bitcast=True)


@triton.jit
def _scales_of(messages, row, byte, base, row_segment, starts, stop):
    """The scale of each eight values of a tile, in one rank's message, whose segments start with whole eights."""
    scale = byte.to(tl.float32) * 0.0
    for i in range(row, stop):
        segment = tl.load(row_segment + i)
        first = tl.load(starts + segment) - base
        scale = tl.where(byte * 8 >= first, load_float(messages, segment * 4, segment >= 0, False), scale)
    return scale


@triton.jit
def _sum_signs(
    messages, head, stride, n, tile, row, stop, segment, row_segment, starts,
    ALONE: tl.constexpr, RANKS: tl.constexpr, TOGETHER: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of all ranks' values in a tile. ALONE: one segment has all of it."""
    byte = tl.arange(0, BLOCK // 8)
    a = byte.to(tl.float32) * 0.0
    b, c, d, e, f, g, h = a, a, a, a, a, a, a
    for _ in range(0, RANKS, TOGETHER):
        for _k in tl.static_range(TOGETHER):
            if ALONE:
                scale = tl.where(byte >= 0, load_float(messages, segment * 4, segment >= 0, WIDE), 0.0)
            else:
                scale = _scales_of(messages, row, byte, tile * BLOCK, row_segment, starts, stop)
            scale = scale.to(tl.int32, bitcast=True)
            to = messages + head + tile * (BLOCK // 8) + byte
            bits = tl.load(to, mask=byte * 8 < n - tile * BLOCK, other=0) if MASKED else tl.load(to)
            flips = ~bits.to(tl.int32)
            a = _add_sign(a, flips, scale, 0)
            b = _add_sign(b, flips, scale, 1)
            c = _add_sign(c, flips, scale, 2)
            d = _add_sign(d, flips, scale, 3)
            e = _add_sign(e, flips, scale, 4)
            f = _add_sign(f, flips, scale, 5)
            g = _add_sign(g, flips, scale, 6)
            h = _add_sign(h, flips, scale, 7)
            messages += stride
    return eight(a, b, c, d, e, f, g, h)


@triton.jit
def _sign_tile(
    messages, error, left, bits, parts, tile_row, tile_segment, row_segment, starts, rows, n, head, stride, share,
    STAT: tl.constexpr, HAS_ERROR: tl.constexpr, RANKS: tl.constexpr, TOGETHER: tl.constexpr, WIDE: tl.constexpr,
    MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    live = at < n - tile * BLOCK
    row, stop, segment = tl.load(tile_row + tile), tl.load(tile_row + tile + 1), tl.load(tile_segment + tile)
    if stop == row + 1:
        total = _sum_signs(
            messages, head, stride, n, tile, row, stop, segment, row_segment, starts,
            True, RANKS, TOGETHER, WIDE, MASKED, BLOCK,
        )  # fmt: skip
    else:
        total = _sum_signs(
            messages, head, stride, n, tile, row, stop, segment, row_segment, starts,
            False, RANKS, 1, WIDE, MASKED, BLOCK,
        )  # fmt: skip
    x = _mean(total, share, RANKS)
    if HAS_ERROR:
        x = x + fetch(error + tile * BLOCK, at, live, MASKED)
        put(left + tile * BLOCK, at, x, live, MASKED)
    describe(x, bits, parts, rows, n, tile, row, stop, row_segment, starts, STAT, True, MASKED, BLOCK)


@triton.jit
def _merge_signs(
    messages, error, left, bits, parts, tile_row, tile_segment, row_segment, starts, rows, n, head, stride, share,
    STAT: tl.constexpr, HAS_ERROR: tl.constexpr, RANKS: tl.constexpr, TOGETHER: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    if (tl.program_id(0).to(tl.int64) + 1) * BLOCK <= n:
        _sign_tile(
            messages, error, left, bits, parts, tile_row, tile_segment, row_segment, starts, rows, n, head, stride,
            share, STAT, HAS_ERROR, RANKS, TOGETHER, WIDE, False, BLOCK,
        )  # fmt: skip
    else:
        _sign_tile(
            messages, error, left, bits, parts, tile_row, tile_segment, row_segment, starts, rows, n, head, stride,
            share, STAT, HAS_ERROR, RANKS, 1, WIDE, True, BLOCK,
        )  # fmt: skip


@placed
def merge_integer(
    messages: Tensor, error: Tensor | None, lengths: tuple[int, ...], bits: int, block: int
) -> tuple[Tensor, Tensor | None]:
    where = slabs(lengths, block, messages.device, _SLAB) if block <= _WIDEST else None
    if where is None or not where.n or not where.aligned or block != where.width or not _fit(messages, error):
        return definition(fused.merge_integer)(messages, error, lengths, bits, block)
    ranks, levels = messages.shape[0], (1 << bits - 1) - 1
    data, scales, body = message(where.groups, where.n, bits, messages.device)
    left = None if error is None else torch.empty_like(error)
    before, after = (scales, scales) if error is None or left is None else (error, left)
    fresh = (messages, before, after, scales, body.view(word(bits)), where.start, where.size, where.group)
    facts = (lengths, bits, block, ranks, messages.stride(0), _wide(messages), error is None, *form(*fresh))
    rest = (
        4 * where.groups, messages.stride(0), 1 / ranks, _TO_FLOAT, *reciprocal(levels), levels, bits, block,
        where.across, error is not None, ranks, _together(ranks), _wide(messages),
    )  # fmt: skip
    warps = max(1, where.across * block // _EACH)
    launch(_merge_blocks, where.start.numel(), facts, fresh, rest, num_warps=warps, **_INTEGERS)
    return data, left


@placed
def merge_sign(
    messages: Tensor, error: Tensor | None, lengths: tuple[int, ...], norm: bool, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    where = grid(lengths, messages.device)
    if not where.n or not where.eights or not _fit(messages, error, out):
        return definition(fused.merge_sign)(messages, error, lengths, norm, out)
    ranks, stat = messages.shape[0], ROOT if norm else MEAN
    data, scales, bits = message(len(lengths), where.n, 1, messages.device)
    parts = room(where, messages.device)
    left = None if error is None else torch.empty_like(error) if out is None else out
    before, after = (scales, scales) if error is None or left is None else (error, left)
    fresh = (messages, before, after, bits, parts, *where.tables)
    facts = (lengths, norm, ranks, messages.stride(0), _wide(messages), error is None, *form(*fresh))
    rest = (
        where.rows, where.n, 4 * len(lengths), messages.stride(0), 1 / ranks, stat.value, error is not None,
        ranks, _together(ranks), _wide(messages), BLOCK,
    )  # fmt: skip
    launch(_merge_signs, where.tiles, facts, fresh, rest, **_SIGNS)
    conclude(parts, where, stat, scales)
    if left is not None:
        deduct(left, scales, where)
    return data, left


def _fit(messages: Tensor, *errors: Tensor | None) -> bool:
    return messages.stride(1) == 1 and all(
        x is None or (x.dtype == torch.float32 and x.is_contiguous()) for x in errors
    )


def _together(ranks: int) -> int:
    """How many ranks' messages are asked for before the first is waited for."""
    return max(i for i in range(1, _TOGETHER + 1) if ranks % i == 0)


def _wide(messages: Tensor) -> bool:
    """Whether every message starts at a multiple of four bytes."""
    return messages.data_ptr() % 4 == 0 and messages.stride(0) % 4 == 0
