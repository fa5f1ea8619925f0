"""Quantizing in blocks: scale, codes and what is left over, from one pass.

A program takes whole blocks of one segment: a *slab*. Where segments do not start on whole bytes of codes, neighbors
share bytes, and codes are merged into zeroed words one by one.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.core.graph_refs import cached_on_device
from gradwire.core.keys import Key
from gradwire.kernels.cuda.accumulate import PLAIN, READ, Entering, enter, put, report
from gradwire.kernels.cuda.codes import (
    inverse,
    merge_codes,
    message,
    part_of,
    quotient,
    reciprocal,
    seeds,
    step_words,
    store_codes,
    uniform,
    uniform_fours,
    word,
)
from gradwire.kernels.groups import before
from gradwire.kernels.philox import ragged

INTEGER = tl.constexpr(0)
QSGD = tl.constexpr(1)

_SLAB = 512  # values, the work of one warp: threads of several would wait for each other
_MOST = tl.constexpr(3.4028234663852886e38)
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves no place for a fraction
_ROUND_BITS = tl.constexpr(0x4B400000)  # the same as it lies in memory


class Slabs(NamedTuple):
    """Slabs of a buffer: where they start, and so on, each int64[slabs]; and the groups of each segment.

    ``width`` is the block, rounded up to a power of two, and ``across`` how many blocks make a slab.
    """

    n: int
    groups: int
    width: int
    across: int
    start: Tensor
    size: Tensor
    group: Tensor
    segment: Tensor
    first: Tensor  # where the segment starts, for each slab
    first_group: Tensor  # int64[segments]
    aligned: bool  # all starts and blocks are multiples of 8


@cached_on_device(64)
def slabs(lengths: tuple[int, ...], block: int, device: torch.device, slab: int = _SLAB) -> Slabs:
    """Cut segments into slabs of whole blocks, of about so many values."""
    width = triton.next_power_of_2(block)
    across = max(1, slab // width)
    size = torch.tensor(lengths, dtype=torch.int64)
    starts = before(size)
    groups = -(-size // block)
    counts = -(-groups // across)
    segment = torch.arange(len(lengths)).repeat_interleave(counts)
    index, first_group = ragged(counts), before(groups)
    inside = index * across * block
    return Slabs(
        n=int(size.sum()),
        groups=int(groups.sum()),
        width=width,
        across=across,
        start=(starts[segment] + inside).to(device),
        size=(size[segment] - inside).clamp(max=across * block).to(device),
        group=(first_group[segment] + index * across).to(device),
        segment=segment.to(device),
        first=starts[segment].to(device),
        first_group=first_group.to(device),
        aligned=block % 8 == 0 and not bool((starts[size > 0] % 8).any()),
    )


@triton.jit
def _nearest(x, divisor, LEVELS: tl.constexpr):
    """``x / divisor * LEVELS``, rounded by `_ROUND` on top of it; and where that may be off by one.

    The definition divides every value. A product with the inverse of the block differs from that by two parts in 2^22
    at most, which matters only next to a tie.
    """
    inverse = tl.div_rn(tl.zeros_like(divisor) + LEVELS, divisor)
    inverse = tl.where(inverse > 1e-36, inverse, float("nan"))  # a smaller one has fewer bits
    level = x * inverse[:, None]
    raw = level + _ROUND
    return raw, ~(tl.abs(level - (raw - _ROUND)) < 0.5 - LEVELS * 1e-6)


@triton.jit
def _any(doubt, bad, nonfinite, RULE: tl.constexpr):
    """Whether there is any doubt. Whatever is bad is reported by the way: one wait of all threads for each other."""
    both = doubt.to(tl.int32) | (bad.to(tl.int32) << 16)
    flags = tl.max(both, None)
    if (RULE != READ) & (flags >> 16 != 0):
        tl.store(nonfinite, 1)
        flags = flags | 1  # whether there is doubt, too, is not known then
    return flags & 0xFFFF != 0


@triton.jit
def round_integers(
    x, bad, nonfinite, left, at, live, high_part, low_part,
    LEVELS: tl.constexpr, RULE: tl.constexpr, KEEP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Blocks, [blocks, values], to the nearest steps of their scales. KEEP: what that loses goes to ``left``."""
    scale = tl.max(tl.abs(x), 1)
    divisor = tl.where(scale != 0, scale, 1.0)
    raw, doubt = _nearest(x, divisor, LEVELS)
    if _any(doubt, bad, nonfinite, RULE):
        raw = tl.div_rn(x, divisor[:, None] + tl.zeros_like(x)) * LEVELS + _ROUND
    if KEEP:
        put(left, at, x - scale[:, None] * part_of(raw - _ROUND, high_part, low_part), live, MASKED)
    return scale, raw.to(tl.int32, bitcast=True) - _ROUND_BITS


@triton.jit
def write_blocks(
    q, scale, scales, out, start, size, group, at, live,
    LEVELS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, ACROSS: tl.constexpr,
    ALIGNED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Write scales and codes of a slab."""
    tl.store(scales + group + tl.arange(0, ACROSS), scale, mask=tl.arange(0, ACROSS) * GROUP < size)
    codes = q + LEVELS
    if BITS == 8 and ALIGNED and GROUP == WIDTH and not MASKED:
        # Four bytes at a time, as values come: alone, they are not known to lie at multiples of four.
        four = tl.reshape(codes, [ACROSS * WIDTH // 4, 4]) << 8 * tl.arange(0, 4)[None, :]
        to = (out + start).to(tl.pointer_type(tl.int32))
        tl.store(to + tl.arange(0, ACROSS * WIDTH // 4), tl.sum(four, 1))
    elif BITS == 8:
        put(out + start, at, codes.to(tl.uint8), live, MASKED)
    elif ALIGNED and GROUP == WIDTH:
        eight = tl.arange(0, ACROSS * WIDTH // 8)
        some = (eight[:, None] * 8 + tl.arange(0, 8)[None, :]) < size
        # A row of eight takes one element of the type that holds it, or, of odd widths, BITS bytes.
        row = start // 8 if BITS == 2 or BITS == 4 else start // 8 * BITS
        store_codes(out + row, eight, tl.reshape(codes, [ACROSS * WIDTH // 8, 8]), some, BITS, MASKED)
    else:
        merge_codes(out, start + at, codes, live, BITS)


@triton.jit
def _slab(
    grad, residual, fresh, nonfinite, scales, out, decay, start, size, group, place, seed, low, high, high_part,
    low_part, LEVELS: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, RULE: tl.constexpr, GROUP: tl.constexpr,
    WIDTH: tl.constexpr, ACROSS: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    across, along = tl.arange(0, ACROSS)[:, None], tl.arange(0, WIDTH)[None, :]
    at = across * GROUP + along
    live = (along < GROUP) & (at < size)
    old = residual + start
    new = old if fresh is None else fresh + start
    x, bad = enter(grad + start, old, old, old, old, at, live, 0.0, decay, RULE, False, MASKED)
    # Outside, x is 0: the loads say so.
    if KIND == INTEGER:
        scale, q = round_integers(
            x, bad, nonfinite, new, at, live, high_part, low_part, LEVELS, RULE, RULE != READ, MASKED
        )
    else:
        if RULE != READ:
            report(bad, nonfinite)
        wide = x.to(tl.float64)
        norm = tl.sqrt(tl.sum(wide * wide, 1))
        scale = tl.where(norm < float("inf"), tl.minimum(norm, _MOST), norm).to(tl.float32)
        level = quotient(tl.abs(wide), inverse(scale)[:, None]) * LEVELS
        whole = level.to(tl.int32)
        if GROUP % 4 == 0:
            fours = tl.arange(0, ACROSS * WIDTH // 4)
            fours = fours // (WIDTH // 4) * (GROUP // 4) + fours % (WIDTH // 4)
            u = tl.reshape(uniform_fours((place >> 2) + fours, seed, low, high), [ACROSS, WIDTH])
        else:
            u = uniform(place + at, seed, low, high)
        q = whole + (u < level - whole.to(tl.float32)).to(tl.int32)
        minus = x.to(tl.int32, bitcast=True) >> 31  # all ones, or none
        q = (q ^ minus) - minus
    write_blocks(
        q, scale, scales, out, start, size, group, at, live, LEVELS, BITS, GROUP, WIDTH, ACROSS, ALIGNED, MASKED
    )


@triton.jit(do_not_specialize=["low", "high"])
def _quantize(
    grad, residual, fresh, nonfinite, scales, out, decay, starts, sizes, groups, segments, firsts, seeds, low, high,
    high_part, low_part,
    LEVELS: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, RULE: tl.constexpr, GROUP: tl.constexpr,
    WIDTH: tl.constexpr, ACROSS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    slab = tl.program_id(0)
    start, size, group = tl.load(starts + slab), tl.load(sizes + slab), tl.load(groups + slab)
    place, seed = start - tl.load(firsts + slab), tl.load(seeds + tl.load(segments + slab))
    if ALIGNED:
        start = tl.multiple_of(start, 8)
    if size == ACROSS * WIDTH:
        _slab(
            grad, residual, fresh, nonfinite, scales, out, decay, start, size, group, place, seed, low, high, high_part,
            low_part, LEVELS, BITS, KIND, RULE, GROUP, WIDTH, ACROSS, ALIGNED, False,
        )  # fmt: skip
    else:
        _slab(
            grad, residual, fresh, nonfinite, scales, out, decay, start, size, group, place, seed, low, high, high_part,
            low_part, LEVELS, BITS, KIND, RULE, GROUP, WIDTH, ACROSS, ALIGNED, True,
        )  # fmt: skip


def quantize(
    x: Tensor,
    where: Slabs,
    block: int,
    kind: tl.constexpr,
    levels: int,
    bits: int,
    names: tuple[str, ...] = (),
    key: Key | None = None,
    entering: Entering | None = None,
) -> Tensor:
    """The message of ``x``, or of what feedback makes of it and a gradient; ``x`` then keeps the rest."""
    straight = bits == 8 or (where.aligned and block == where.width)
    data, scales, body = message(where.groups, where.n, bits, x.device, zero=not straight)
    grad, nonfinite, decay, old = entering or Entering(x, x)
    random = (seeds(key, names, x.device), *step_words(key)) if key else (where.first_group, 0, 0)
    if where.n:
        _quantize[(where.start.numel(),)](
            grad, x if old is None else old, None if old is None else x, nonfinite, scales,
            body.view(word(bits) if straight else torch.int32), decay, where.start, where.size, where.group,
            where.segment, where.first, *random, *reciprocal(levels), levels, bits, kind.value,
            (PLAIN if entering else READ).value, block, where.width, where.across, where.aligned,
            num_warps=max(1, where.across * where.width // _SLAB), maxnreg=96, enable_fp_fusion=False,
        )  # fmt: skip
    return data
