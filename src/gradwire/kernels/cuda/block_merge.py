"""The server's part of two legs of signs of short blocks, in one pass; see `block_signs` and `merge`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.cuda import merge
from gradwire.kernels.cuda.accumulate import fetch, put
from gradwire.kernels.cuda.block_signs import EACH, REGISTERS, are_blocks, scale_of
from gradwire.kernels.cuda.codes import load_float, message, store_codes
from gradwire.kernels.cuda.launch import form, launch
from gradwire.kernels.cuda.merge import _fit, _mean, _sum_signs, _together, _wide
from gradwire.kernels.cuda.segment_stats import MEAN, ROOT
from gradwire.kernels.cuda.tables import grid, placed


@triton.jit
def _signed(bits, scale, row, live, MASKED: tl.constexpr):
    """One rank's values. They are laid out as the error is, so that no thread waits for another's."""
    byte = tl.load(bits + row, mask=tl.max(live.to(tl.int32), 1) > 0, other=0) if MASKED else tl.load(bits + row)
    x = tl.where(byte.to(tl.int32)[:, None] >> tl.arange(0, 8)[None, :] & 1 == 1, scale, -scale)
    return x + 0.0  # a sum begins with zero, and so has no negative one


@triton.jit
def _block(
    messages, error, left, scale, bits, starts, block, start, size, head, stride, share,
    STAT: tl.constexpr, HAS_ERROR: tl.constexpr, RANKS: tl.constexpr, TOGETHER: tl.constexpr, WIDE: tl.constexpr,
    MASKED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, WIDTH // 8)
    at = row[:, None] * 8 + tl.arange(0, 8)[None, :]
    live = at < size
    if RANKS == 1:
        x = _signed(messages + head + start // 8, load_float(messages, block * 4, True, WIDE), row, live, MASKED)
    else:  # as a tile of its own, the first of its segment
        total = _sum_signs(
            messages, head + start // 8, stride, size, 0, 0, 1, block, starts, starts,
            True, RANKS, TOGETHER, WIDE, MASKED, WIDTH,
        )  # fmt: skip
        x = _mean(total, share, RANKS)
    if HAS_ERROR:
        x = x + fetch(error + start, at, live, MASKED)
    if MASKED:
        x = tl.where(live, x, 0.0)
    found = scale_of(x, size, STAT)
    tl.store(scale, found)
    if HAS_ERROR:
        put(left + start, at, x - tl.where(x >= 0, found, -found), live, MASKED)
    store_codes(bits, row, (x >= 0).to(tl.int32), live, 1, MASKED)


@triton.jit
def _merge_blocks_of_signs(
    messages, error, left, scales, bits, starts, head, stride, share,
    STAT: tl.constexpr, HAS_ERROR: tl.constexpr, RANKS: tl.constexpr, TOGETHER: tl.constexpr, WIDE: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Each program has one block, which starts at a multiple of eight."""
    block = tl.program_id(0)
    start = tl.multiple_of(tl.load(starts + block), 8)
    size = (tl.load(starts + block + 1) - start).to(tl.int32)
    scale, byte = scales + block, bits + start // 8
    if size == WIDTH:
        _block(
            messages, error, left, scale, byte, starts, block, start, size, head, stride, share,
            STAT, HAS_ERROR, RANKS, TOGETHER, WIDE, False, WIDTH,
        )  # fmt: skip
    elif size > 0:
        _block(
            messages, error, left, scale, byte, starts, block, start, size, head, stride, share,
            STAT, HAS_ERROR, RANKS, 1, WIDE, True, WIDTH,
        )  # fmt: skip
    else:
        tl.store(scale, 0.0)


@placed
def merge_sign(
    messages: Tensor, error: Tensor | None, lengths: tuple[int, ...], norm: bool, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    where, ranks, blocks = grid(lengths, messages.device), messages.shape[0], len(lengths)
    if not are_blocks(where) or not _fit(messages, error, out):
        return merge.merge_sign(messages, error, lengths, norm, out)
    left = None if error is None else torch.empty_like(error) if out is None else out
    data, scales, bits = message(blocks, where.n, 1, messages.device)
    before, after = (scales, scales) if error is None or left is None else (error, left)
    fresh = (messages, before, after, scales, bits, where.starts)
    facts = (lengths, norm, ranks, messages.stride(0), _wide(messages), error is None, *form(*fresh))
    width = triton.next_power_of_2(where.widest)
    rest = (
        4 * blocks, messages.stride(0), 1 / ranks, (ROOT if norm else MEAN).value, error is not None, ranks,
        _together(ranks), _wide(messages), width,
    )  # fmt: skip
    options = {"num_warps": max(1, width // EACH), "maxnreg": REGISTERS, "enable_fp_fusion": False}
    launch(_merge_blocks_of_signs, blocks, facts, fresh, rest, **options)
    return data, left
