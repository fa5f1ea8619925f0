"""Batch norm in training, for many channels side by side, by Triton: each pass reads memory once, as wide as it can.

torch's own kernel takes about four times as long on bfloat16 whose channels lie next to each other, and stacked models
have little else to wait for but convolutions.

    y = (x - mean) / sqrt(var + eps) * w + b;  mean, var: of each channel, over batch and pixels

A ReLU may follow in the same pass. A batch may be that of several groups, one after the other, each with a mean and a
variance of its own.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ENTRIES = 4096  # that a program holds at once
_WIDE = 128  # channels among them, at most
_PARTS = 512  # programs that share the rows of a channel, in all groups together


@triton.jit
def _tile(x, row, channel, P, D):
    live = (row < P)[:, None] & (channel < D)[None, :]
    return tl.load(x + row[:, None].to(tl.int64) * D + channel[None, :], mask=live, other=0.0).to(tl.float32), live


@triton.jit
def _of_channels(x, channel, D):
    return tl.load(x + channel, mask=channel < D, other=0.0)[None, :]


@triton.jit
def _sums(
    x, dy, mean, scale, w, b, out, P, D, BACK: tl.constexpr, RELU: tl.constexpr, TURNS: tl.constexpr,
    TILE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Of some rows: the sums of x and x^2, or, backwards, of dy and dy times the normalized x. out: [parts, 2, D]."""
    part, channel = tl.program_id(0), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    group = tl.program_id(2).to(tl.int64)
    x += group * P * D
    dy += group * P * D
    out += group * tl.num_programs(0) * 2 * D
    first, second = tl.zeros([TILE, WIDE], tl.float32), tl.zeros([TILE, WIDE], tl.float32)
    if BACK:
        middle, factor = _of_channels(mean + group * D, channel, D), _of_channels(scale + group * D, channel, D)
        gain, shift = _of_channels(w, channel, D), _of_channels(b, channel, D)
    for turn in range(TURNS):
        row = (part * TURNS + turn) * TILE + tl.arange(0, TILE)
        a, _ = _tile(x, row, channel, P, D)
        if BACK:
            g, _ = _tile(dy, row, channel, P, D)
            normal = (a - middle) * factor
            if RELU:
                g = tl.where(normal * gain + shift > 0, g, 0.0)
            first += g
            second += g * normal
        else:
            first += a
            second += a * a
    tl.store(out + part * 2 * D + channel, tl.sum(first, 0), mask=channel < D)
    tl.store(out + part * 2 * D + D + channel, tl.sum(second, 0), mask=channel < D)


@triton.jit
def _total(parts, which, channel, known, D, PARTS: tl.constexpr, ROWS: tl.constexpr):
    part = tl.arange(0, ROWS)
    live = (part < PARTS)[:, None] & known[None, :]
    return tl.sum(tl.load(parts + (part[:, None] * 2 + which) * D + channel[None, :], mask=live, other=0.0), 0)


@triton.jit
def _settle(
    parts, mean, scale, running_mean, running_var, P, D, momentum, eps, PARTS: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """The mean and 1 / deviation of each channel, and what is kept of them."""
    channel = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    known = channel < D
    group = tl.program_id(1)
    parts += group * PARTS * 2 * D
    mean += group * D
    scale += group * D
    running_mean += group * D
    running_var += group * D
    middle = _total(parts, 0, channel, known, D, PARTS, ROWS) / P
    var = tl.maximum(_total(parts, 1, channel, known, D, PARTS, ROWS) / P - middle * middle, 0.0)
    tl.store(mean + channel, middle, mask=known)
    tl.store(scale + channel, 1.0 / tl.sqrt(var + eps), mask=known)
    old_mean = tl.load(running_mean + channel, mask=known)
    old_var = tl.load(running_var + channel, mask=known)
    tl.store(running_mean + channel, old_mean + momentum * (middle - old_mean), mask=known)
    tl.store(running_var + channel, old_var + momentum * (var * P / (P - 1.0) - old_var), mask=known)


@triton.jit
def _settle_back(parts, dw, db, D, PARTS: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr):
    channel = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    known = channel < D
    group = tl.program_id(1)
    parts += group * PARTS * 2 * D
    tl.store(db + group * D + channel, _total(parts, 0, channel, known, D, PARTS, ROWS), mask=known)
    tl.store(dw + group * D + channel, _total(parts, 1, channel, known, D, PARTS, ROWS), mask=known)


@triton.jit
def _write(
    x, dy, y, mean, scale, w, b, dw, db, P, D, BACK: tl.constexpr, RELU: tl.constexpr, TILE: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """The normalized x, or, backwards, the gradient of x."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    channel = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    group = tl.program_id(2).to(tl.int64)
    a, live = _tile(x + group * P * D, row, channel, P, D)
    factor, gain = _of_channels(scale + group * D, channel, D), _of_channels(w, channel, D)
    normal = (a - _of_channels(mean + group * D, channel, D)) * factor
    out = normal * gain + _of_channels(b, channel, D)
    if BACK:
        g, _ = _tile(dy + group * P * D, row, channel, P, D)
        if RELU:
            g = tl.where(out > 0, g, 0.0)
        still, along = _of_channels(db + group * D, channel, D) / P, _of_channels(dw + group * D, channel, D) / P
        out = (g - still - normal * along) * factor * gain
    elif RELU:
        out = tl.where(out < 0, 0.0, out)  # what is no number stays none
    y += group * P * D
    tl.store(y + row[:, None].to(tl.int64) * D + channel[None, :], out.to(y.dtype.element_ty), mask=live)


def forward(
    x: Tensor, kept: tuple[Tensor, Tensor], w: Tensor, b: Tensor, momentum: float, eps: float, groups: int = 1,
    relu: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Normalize [groups * batch, channels, height, width] in channels-last order.

    What is kept, [groups, channels], changes in place. All groups share ``w`` and ``b``. Also gives the mean and
    1 / deviation, [groups, channels].
    """
    p, d, tile, wide = _shape(x, groups)
    middle, scale = (torch.empty(groups, d, device=x.device) for _ in range(2))
    y = torch.empty_like(x)
    parts, turns = _cut(p, tile, groups)
    partial = torch.empty(groups, parts, 2, d, device=x.device)
    columns = triton.cdiv(d, wide)
    _sums[(parts, columns, groups)](x, x, x, x, w, b, partial, p, d, False, relu, turns, tile, wide, num_warps=8)
    _settle[(columns, groups)](partial, middle, scale, *kept, p, d, momentum, eps, parts, _rows(parts), wide)
    _write[(triton.cdiv(p, tile), columns, groups)](
        x, x, y, middle, scale, w, b, middle, middle, p, d, False, relu, tile, wide, num_warps=8
    )
    return y, middle, scale


def backward(
    dy: Tensor, x: Tensor, middle: Tensor, scale: Tensor, w: Tensor, b: Tensor, groups: int = 1, relu: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, and of w and b in each group, [groups, channels]."""
    p, d, tile, wide = _shape(x, groups)
    dy = dy.contiguous(memory_format=torch.channels_last)
    dw, db, dx = torch.empty_like(middle), torch.empty_like(middle), torch.empty_like(x)
    parts, turns = _cut(p, tile, groups)
    partial = torch.empty(groups, parts, 2, d, device=x.device)
    columns = triton.cdiv(d, wide)
    _sums[(parts, columns, groups)](
        x, dy, middle, scale, w, b, partial, p, d, True, relu, turns, tile, wide, num_warps=8
    )
    _settle_back[(columns, groups)](partial, dw, db, d, parts, _rows(parts), wide)
    _write[(triton.cdiv(p, tile), columns, groups)](
        x, dy, dx, middle, scale, w, b, dw, db, p, d, True, relu, tile, wide, num_warps=8
    )
    return dx, dw, db


class Norm(torch.autograd.Function):
    """Of [batch, channels, height, width] in channels-last order; running statistics change in place."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, var: Tensor, w: Tensor, b: Tensor, momentum: float, eps: float
    ) -> Tensor:
        y, middle, scale = forward(x, (mean, var), w, b, momentum, eps)
        ctx.save_for_backward(x, middle, scale, w, b)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        dx, dw, db = backward(dy, *ctx.saved_tensors)
        return dx, None, None, dw[0], db[0], None, None


def norm(x: Tensor, mean: Tensor, var: Tensor, w: Tensor, b: Tensor, momentum: float, eps: float) -> Tensor:
    """As ``F.batch_norm(..., training=True)``."""
    made: Tensor = Norm.apply(x.contiguous(memory_format=torch.channels_last), mean, var, w, b, momentum, eps)
    return made


def _shape(x: Tensor, groups: int) -> tuple[int, int, int, int]:
    """Rows of a group, channels, and how many of both a program holds."""
    d = x.shape[1]
    wide = min(_WIDE, int(triton.next_power_of_2(d)))
    return x.numel() // (d * groups), d, _ENTRIES // wide, wide


def _cut(p: int, tile: int, groups: int) -> tuple[int, int]:
    """Into how many parts the rows of a group are cut, and how many tiles each has."""
    tiles = triton.cdiv(p, tile)
    turns = triton.cdiv(tiles, max(8, _PARTS // groups))
    return triton.cdiv(tiles, turns), turns


def _rows(parts: int) -> int:
    return int(triton.next_power_of_2(parts))
