"""A server's turn: several ranks' messages to their mean, its debt on top, and that in few bytes again; in one pass.

Eight values in a row are one thread's. Each rank's codes for them are a few bytes, which may lie anywhere.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels import fused
from gradwire.kernels.cuda.blocks import round_integers, slabs, write_blocks
from gradwire.kernels.cuda.codes import message, part_of, reciprocal, word
from gradwire.kernels.cuda.enter import READ, fetch, put
from gradwire.kernels.cuda.launch import form, launch
from gradwire.kernels.cuda.sign import deduct
from gradwire.kernels.cuda.survey import MEAN, ROOT, conclude, describe, room
from gradwire.kernels.cuda.tables import BLOCK, definition, grid, placed

_WIDEST = 2048  # a larger block does not fit into one slab
_TO_FLOAT = tl.constexpr(0x4B000000)  # 2^23: a small number in its lower bits makes it that much larger
_TWO_23 = tl.constexpr(8388608.0)


@triton.jit
def _bytes(data, live, COUNT: tl.constexpr):
    """COUNT bytes, up to four, as one number."""
    number = tl.load(data, mask=live, other=0).to(tl.int32)
    for i in tl.static_range(1, COUNT):
        number |= tl.load(data + i, mask=live, other=0).to(tl.int32) << 8 * i
    return number


@triton.jit
def _add_step(total, code, scale, high_part, low_part, LEVELS: tl.constexpr):
    """``scale * ((code - LEVELS) / LEVELS)`` on top of a total. To make a float of a code by its bits is faster."""
    q = (code | _TO_FLOAT).to(tl.float32, bitcast=True) - (_TWO_23 + LEVELS)
    return total + scale * part_of(q, high_part, low_part)


@triton.jit
def _add_sign(total, bits, scale, place: tl.constexpr):
    return total + tl.where((bits >> place & 1) == 1, scale, -scale)


@triton.jit
def _eight(a, b, c, d, e, f, g, h):
    """Eight columns side by side. 8 x [N] -> [N, 8]."""
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    return tl.reshape(tl.join(even, odd), [a.shape[0], 8])


@triton.jit
def _mean(total, ranks, share, HALVES: tl.constexpr):
    """HALVES: the number of ranks is a power of two, and the product with its inverse, ``share``, is the same."""
    return total * share if HALVES else tl.div_rn(total, tl.zeros_like(total) + ranks)


@triton.jit
def _sum_steps(
    shards, stride, ranks, row, live, group, high_part, low_part,
    LEVELS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The sum of all ranks' values. ``shards`` points to a slab's codes, ``group`` to its scales."""
    a = row.to(tl.float32) * 0.0
    b, c, d, e, f, g, h = a, a, a, a, a, a, a
    MASK: tl.constexpr = (1 << BITS) - 1
    for _ in range(ranks):
        scale = _bytes(group + row * 8 // GROUP * 4, live, 4).to(tl.float32, bitcast=True)
        data = shards + row * BITS
        low = _bytes(data, live, BITS if BITS < 4 else 4)
        high = low >> 4 * BITS
        if BITS == 8:
            high = _bytes(data + 4, live, 4)
        a = _add_step(a, low & MASK, scale, high_part, low_part, LEVELS)
        b = _add_step(b, low >> BITS & MASK, scale, high_part, low_part, LEVELS)
        c = _add_step(c, low >> 2 * BITS & MASK, scale, high_part, low_part, LEVELS)
        d = _add_step(d, low >> 3 * BITS & MASK, scale, high_part, low_part, LEVELS)
        e = _add_step(e, high & MASK, scale, high_part, low_part, LEVELS)
        f = _add_step(f, high >> BITS & MASK, scale, high_part, low_part, LEVELS)
        g = _add_step(g, high >> 2 * BITS & MASK, scale, high_part, low_part, LEVELS)
        h = _add_step(h, high >> 3 * BITS & MASK, scale, high_part, low_part, LEVELS)
        shards += stride
        group += stride
    return _eight(a, b, c, d, e, f, g, h)


@triton.jit
def _slab(
    shards, served, left, scales, out, start, size, group, head, stride, ranks, share, high_part, low_part,
    LEVELS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ACROSS: tl.constexpr, OWES: tl.constexpr,
    HALVES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ACROSS * GROUP // 8)
    total = _sum_steps(
        shards + head + start // 8 * BITS, stride, ranks, row, row * 8 < size, shards + group * 4, high_part, low_part,
        LEVELS, BITS, GROUP,
    )  # fmt: skip
    x = tl.reshape(_mean(total, ranks, share, HALVES), [ACROSS, GROUP])
    at = tl.arange(0, ACROSS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    live = at < size
    if OWES:
        x = x + fetch(served + start, at, live, MASKED)
    x = tl.where(live, x, 0.0)
    scale, q = round_integers(
        x, at < 0, served, left + start, at, live, high_part, low_part, LEVELS, READ, OWES, MASKED
    )
    write_blocks(q, scale, scales, out, start, size, group, at, live, LEVELS, BITS, GROUP, GROUP, ACROSS, True, MASKED)


@triton.jit
def _merge_blocks(
    shards, served, left, scales, out, starts, sizes, groups, head, stride, ranks, share, high_part, low_part,
    LEVELS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ACROSS: tl.constexpr, OWES: tl.constexpr,
    HALVES: tl.constexpr,
):  # fmt: skip
    slab = tl.program_id(0)
    start, size, group = tl.load(starts + slab), tl.load(sizes + slab), tl.load(groups + slab)
    start = tl.multiple_of(start, 8)
    if size == ACROSS * GROUP:
        _slab(
            shards, served, left, scales, out, start, size, group, head, stride, ranks, share, high_part, low_part,
            LEVELS, BITS, GROUP, ACROSS, OWES, HALVES, False,
        )  # fmt: skip
    else:
        _slab(
            shards, served, left, scales, out, start, size, group, head, stride, ranks, share, high_part, low_part,
            LEVELS, BITS, GROUP, ACROSS, OWES, HALVES, True,
        )  # fmt: skip


@triton.jit
def _scales(shards, row, eight, base, row_segment, starts, stop):
    """The scale of each eight values of a tile, in one rank's message, whose segments start with whole eights."""
    scale = eight.to(tl.float32) * 0.0
    for i in range(row, stop):
        segment = tl.load(row_segment + i)
        first = tl.load(starts + segment) - base
        own = _bytes(shards + segment * 4, True, 4).to(tl.float32, bitcast=True)
        scale = tl.where(eight * 8 >= first, own, scale)
    return scale


@triton.jit
def _sum_signs(shards, head, stride, ranks, n, tile, tile_row, row_segment, starts, BLOCK: tl.constexpr):
    eight = tl.arange(0, BLOCK // 8)
    row, stop = tl.load(tile_row + tile), tl.load(tile_row + tile + 1)
    live = eight * 8 < n - tile * BLOCK
    a = eight.to(tl.float32) * 0.0
    b, c, d, e, f, g, h = a, a, a, a, a, a, a
    for _ in range(ranks):
        scale = _scales(shards, row, eight, tile * BLOCK, row_segment, starts, stop)
        bits = tl.load(shards + head + tile * (BLOCK // 8) + eight, mask=live, other=0).to(tl.int32)
        a = _add_sign(a, bits, scale, 0)
        b = _add_sign(b, bits, scale, 1)
        c = _add_sign(c, bits, scale, 2)
        d = _add_sign(d, bits, scale, 3)
        e = _add_sign(e, bits, scale, 4)
        f = _add_sign(f, bits, scale, 5)
        g = _add_sign(g, bits, scale, 6)
        h = _add_sign(h, bits, scale, 7)
        shards += stride
    return _eight(a, b, c, d, e, f, g, h)


@triton.jit
def _sign_tile(
    shards, served, left, bits, parts, tile_row, row_segment, starts, n, head, stride, ranks, share,
    STAT: tl.constexpr, OWES: tl.constexpr, HALVES: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    total = _sum_signs(shards, head, stride, ranks, n, tile, tile_row, row_segment, starts, BLOCK)
    x = _mean(total, ranks, share, HALVES)
    at = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    live = at < n - tile * BLOCK
    if OWES:
        x = x + fetch(served + tile * BLOCK, at, live, MASKED)
        put(left + tile * BLOCK, at, x, live, MASKED)
    describe(x, bits, parts, n, tile, tile_row, row_segment, starts, STAT, True, MASKED, BLOCK)


@triton.jit
def _merge_signs(
    shards, served, left, bits, parts, tile_row, row_segment, starts, n, head, stride, ranks, share,
    STAT: tl.constexpr, OWES: tl.constexpr, HALVES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if (tl.program_id(0).to(tl.int64) + 1) * BLOCK <= n:
        _sign_tile(
            shards, served, left, bits, parts, tile_row, row_segment, starts, n, head, stride, ranks, share,
            STAT, OWES, HALVES, False, BLOCK,
        )  # fmt: skip
    else:
        _sign_tile(
            shards, served, left, bits, parts, tile_row, row_segment, starts, n, head, stride, ranks, share,
            STAT, OWES, HALVES, True, BLOCK,
        )  # fmt: skip


@placed
def merge_integer(
    shards: Tensor, served: Tensor | None, lengths: tuple[int, ...], bits: int, block: int
) -> tuple[Tensor, Tensor | None]:
    where = slabs(lengths, block, shards.device) if block <= _WIDEST else None
    if where is None or not where.n or not where.aligned or block != where.width or not _fit(shards, served):
        return definition(fused.merge_integer)(shards, served, lengths, bits, block)
    ranks, levels = shards.shape[0], (1 << bits - 1) - 1
    data, scales, body = message(where.groups, where.n, bits, shards.device)
    left = None if served is None else torch.empty_like(served)
    owed, kept = (scales, scales) if served is None or left is None else (served, left)
    fresh = (shards, owed, kept, scales, body.view(word(bits)), where.start, where.size, where.group)
    facts = (where.n, where.groups, bits, block, ranks, shards.stride(0), served is None, *form(*fresh))
    rest = (
        4 * where.groups, shards.stride(0), ranks, 1 / ranks, *reciprocal(levels), levels, bits, block, where.across,
        served is not None, ranks & ranks - 1 == 0,
    )  # fmt: skip
    options = {"num_warps": 8, "maxnreg": 64, "enable_fp_fusion": False}
    launch(_merge_blocks, where.start.numel(), facts, fresh, rest, **options)
    return data, left


@placed
def merge_sign(
    shards: Tensor, served: Tensor | None, lengths: tuple[int, ...], norm: bool
) -> tuple[Tensor, Tensor | None]:
    where = grid(lengths, shards.device)
    if not where.n or not _eights(lengths) or not _fit(shards, served):
        return definition(fused.merge_sign)(shards, served, lengths, norm)
    ranks, stat = shards.shape[0], ROOT if norm else MEAN
    data, scales, bits = message(len(lengths), where.n, 1, shards.device)
    parts = room(where, shards.device)
    left = None if served is None else torch.empty_like(served)
    owed, kept = (scales, scales) if served is None or left is None else (served, left)
    fresh = (shards, owed, kept, bits, parts, where.tile_row, where.row_segment, where.starts)
    facts = (where.n, len(lengths), norm, ranks, shards.stride(0), served is None, *form(*fresh))
    rest = (
        where.n, 4 * len(lengths), shards.stride(0), ranks, 1 / ranks, stat.value, served is not None,
        ranks & ranks - 1 == 0, BLOCK,
    )  # fmt: skip
    options = {"num_warps": 8, "maxnreg": 64, "enable_fp_fusion": False}
    launch(_merge_signs, where.tiles, facts, fresh, rest, **options)
    conclude(parts, where, stat, scales)
    if left is not None:
        deduct(left, scales, where)
    return data, left


def _fit(shards: Tensor, served: Tensor | None) -> bool:
    plain = served is None or (served.dtype == torch.float32 and served.is_contiguous())
    return plain and shards.stride(1) == 1


def _eights(lengths: tuple[int, ...]) -> bool:
    """Whether all segments, but for what follows the last, are made of whole eights."""
    used = [n for n in lengths if n]
    return all(n % 8 == 0 for n in used[:-1])
