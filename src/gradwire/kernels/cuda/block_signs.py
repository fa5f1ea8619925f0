"""Signs of short blocks, as of ``sign(per=4096)``: scale, signs and what is left over, from one pass.

One program holds a block: its scale is known before the entries leave the registers, so that the residual is read once
and written once. Of still shorter blocks, as of ``sign(per=64)``, a program holds many, and another one packs their
signs. Longer segments take the passes of `sign`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.core.layout import Flat
from gradwire.kernels import momentum as definitions
from gradwire.kernels.cuda.accumulate import PLAIN, READ, Entering, memory_of, no_report, put, readable, report
from gradwire.kernels.cuda.codes import message, store_codes
from gradwire.kernels.cuda.momentum import averaged, rule_of
from gradwire.kernels.cuda.places import TOGETHER, by_block, end_to_end, place_of, vector_of
from gradwire.kernels.cuda.segment_stats import MEAN, ROOT
from gradwire.kernels.cuda.tables import BLOCK, Grid, definition, grid, placed
from gradwire.kernels.momentum import Momentum

_NARROWEST, _WIDEST = 512, 8192  # entries of the longest block
_SHORT = 256  # entries of the longest of short blocks
EACH = 512  # entries of a warp
REGISTERS = 64  # of a thread: four blocks of 4096 fit side by side, so that some compute while others are read
_MOMENTUM_REGISTERS = 96  # where two more vectors are read


@triton.jit
def scale_of(x, size, STAT: tl.constexpr):
    """The mean of magnitudes, or the root of the mean square, added up in float64."""
    wide = tl.abs(x).to(tl.float64)
    wide = wide if STAT == MEAN else wide * wide
    mean = tl.sum(tl.sum(wide, 1), 0) / size.to(tl.float64)
    return mean.to(tl.float32) if STAT == MEAN else tl.sqrt(mean).to(tl.float32)


@triton.jit
def _block(
    grad, last, denominator, out, residual, fresh, nonfinite, scale, bits, size, beta, rest, decay,
    STAT: tl.constexpr, RULE: tl.constexpr, KEEP: tl.constexpr, MASKED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, WIDTH // 8)
    at = row[:, None] * 8 + tl.arange(0, 8)[None, :]
    live = at < size
    x, following, bad = averaged(grad, residual, last, denominator, at, live, beta, rest, decay, RULE, MASKED)
    if KEEP:
        put(out, at, following, live, MASKED)
    if RULE != READ:
        report(bad, nonfinite)
    found = scale_of(x, size, STAT)
    tl.store(scale, found)
    if RULE != READ:
        put(fresh, at, x - tl.where(x >= 0, found, -found), live, MASKED)
    store_codes(bits, row, (x >= 0).to(tl.int32), live, 1, MASKED)


@triton.jit
def _blocks(
    grad, last, denominator, out, residual, fresh, nonfinite, scales, bits, starts, beta, rest, decay,
    STAT: tl.constexpr, RULE: tl.constexpr, KEEP: tl.constexpr, HOW: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Each program has one block, which starts at a multiple of eight. HOW: how the gradient lies, see `places`.

    KEEP: the next momentum goes to ``out``.
    """
    block = tl.program_id(0)
    start = tl.multiple_of(tl.load(starts + block), 8)
    size = (tl.load(starts + block + 1) - start).to(tl.int32)
    scale, byte, grad = scales + block, bits + start // 8, place_of(grad, block, start, HOW)
    if size == WIDTH:
        _block(
            grad, last + start, denominator + start, out + start, residual + start, fresh + start, nonfinite,
            scale, byte, size, beta, rest, decay, STAT, RULE, KEEP, False, WIDTH,
        )  # fmt: skip
    elif size > 0:
        _block(
            grad, last + start, denominator + start, out + start, residual + start, fresh + start, nonfinite,
            scale, byte, size, beta, rest, decay, STAT, RULE, KEEP, True, WIDTH,
        )  # fmt: skip
    else:
        tl.store(scale, 0.0)


def are_blocks(where: Grid) -> bool:
    """Whether one program can hold any segment, and most of them are about as long as the longest."""
    short = _NARROWEST <= where.widest <= _WIDEST
    return short and where.eights and 4 * where.n >= (where.starts.numel() - 1) * where.widest


def encode_blocks(
    x: Tensor,
    where: Grid,
    norm: bool,
    entering: Entering | None = None,
    momentum: Momentum | None = None,
    out: Tensor | None = None,
    how: int = int(TOGETHER.value),
) -> Tensor:
    """The message of ``x``, or of what feedback makes of it and a gradient; ``x`` then keeps the rest.

    With ``momentum``, the gradient enters it first; what that makes enters ``x``, and goes to ``out``. ``how`` the
    gradient lies, see `places`.
    """
    blocks = where.starts.numel() - 1
    data, scales, bits = message(blocks, where.n, 1, x.device)
    grad, nonfinite, decay, before = entering or Entering(x, data)
    rule, last, denominator, beta = int((PLAIN if entering else READ).value), x, x, 0.0
    if momentum is not None:
        rule, last, beta = rule_of(momentum), momentum.last, momentum.beta
        denominator = last if momentum.denominator is None else momentum.denominator
    width = triton.next_power_of_2(where.widest)
    _blocks[(blocks,)](
        grad, last, denominator, last if out is None else out, x if before is None else before, x, nonfinite, scales,
        bits, where.starts, beta, 1.0 - beta, decay, (ROOT if norm else MEAN).value, rule, out is not None, how, width,
        num_warps=max(1, width // EACH), maxnreg=REGISTERS if momentum is None else _MOMENTUM_REGISTERS,
        enable_fp_fusion=False,
    )  # fmt: skip
    return data


@triton.jit
def _pack(x, bits, tile, n, TILE: tl.constexpr):
    """The signs of a tile, in which blocks may begin anywhere."""
    base = tile.to(tl.int64) * TILE
    row = tl.arange(0, TILE // 8)
    at = row[:, None] * 8 + tl.arange(0, 8)[None, :]
    live = at < n - base
    signs = tl.load(x + base + at, mask=live, other=0.0).to(tl.float32) >= 0
    store_codes(bits + base // 8, row, signs.to(tl.int32), live, 1, True)


@triton.jit
def _scales(x, scales, starts, block, blocks, STAT: tl.constexpr, WIDTH: tl.constexpr):
    """The scales of some blocks."""
    there = block < blocks
    start = tl.load(starts + block, mask=there, other=0)
    size = (tl.load(starts + block + 1, mask=there, other=0) - start).to(tl.int32)
    at = tl.arange(0, WIDTH)[None, :]
    wide = tl.load(x + start[:, None] + at, mask=at < size[:, None], other=0.0).to(tl.float32)
    wide = tl.abs(wide).to(tl.float64)
    wide = wide if STAT == MEAN else wide * wide
    mean = tl.sum(wide, 1) / tl.maximum(size, 1).to(tl.float64)
    tl.store(scales + block, mean.to(tl.float32) if STAT == MEAN else tl.sqrt(mean).to(tl.float32), mask=there)


@triton.jit
def _short_blocks(
    x, scales, bits, starts, blocks, n, tiles,
    STAT: tl.constexpr, WIDTH: tl.constexpr, TOGETHER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Some programs pack signs, the others find scales: neither waits for the other."""
    number = tl.program_id(0)
    if number < tiles:
        _pack(x, bits, number, n, TILE)
    else:
        block = (number - tiles) * TOGETHER + tl.arange(0, TOGETHER)
        _scales(x, scales, starts, block, blocks, STAT, WIDTH)


def are_short(where: Grid) -> bool:
    """Whether a program can hold several of any segments."""
    return 0 < where.widest <= _SHORT


def encode_short(x: Tensor, where: Grid, norm: bool) -> Tensor:
    """The message of short blocks."""
    blocks = where.starts.numel() - 1
    data, scales, bits = message(blocks, where.n, 1, x.device)
    width = triton.next_power_of_2(where.widest)
    together = BLOCK // width
    tiles = -(-where.n // BLOCK)
    _short_blocks[(tiles + -(-blocks // together),)](
        x, scales, bits, where.starts, blocks, where.n, tiles, (ROOT if norm else MEAN).value, width, together, BLOCK,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return data


@placed
def momentum_sign_(
    grad: Flat,
    residual: Tensor,
    momentum: Momentum,
    decay: float,
    lengths: tuple[int, ...],
    norm: bool,
    before: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    where, place = grid(lengths, residual.device), by_block(grad, lengths) or end_to_end(grad)
    fits = readable(vector_of(place), residual, momentum.last, momentum.denominator, out)
    if not (fits and are_blocks(where)):
        return definition(definitions.momentum_sign_)(grad, residual, momentum, decay, lengths, norm, before, out)
    source, how = place
    entering = Entering(source, no_report(source.device), decay, memory_of(residual, before))
    return encode_blocks(residual, where, norm, entering, momentum, out, how), entering.nonfinite.view(torch.bool)
