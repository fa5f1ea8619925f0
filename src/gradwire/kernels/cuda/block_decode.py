"""Signs of short blocks back to floats, and their product with a vector, in one pass; see `block_signs`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.core.layout import Flat
from gradwire.core.segments import known
from gradwire.kernels import momentum as definitions
from gradwire.kernels.cuda.accumulate import fetch, put, readable
from gradwire.kernels.cuda.block_signs import EACH, are_blocks
from gradwire.kernels.cuda.places import by_block, place_of
from gradwire.kernels.cuda.tables import definition, grid, placed
from gradwire.kernels.quantize import scales_and_codes


@triton.jit
def _block(bits, scale, out, factor, product, size, MASKED: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.arange(0, WIDTH // 8)
    place = tl.arange(0, 8)[None, :]
    at = row[:, None] * 8 + place
    live = at < size
    times = fetch(factor, at, live, MASKED)
    byte = tl.load(bits + row, mask=row * 8 < size, other=0) if MASKED else tl.load(bits + row)
    x = tl.where(byte.to(tl.int32)[:, None] >> place & 1 == 1, scale, -scale)
    put(out, at, x, live, MASKED)
    put(product, at, x * times, live, MASKED)


@triton.jit
def _decode_times(bits, scales, out, factor, product, starts, HOW: tl.constexpr, WIDTH: tl.constexpr):
    """Each program has one block, which starts at a multiple of eight. HOW: how the product lies, see `places`."""
    block = tl.program_id(0)
    start = tl.multiple_of(tl.load(starts + block), 8)
    size = (tl.load(starts + block + 1) - start).to(tl.int32)
    scale, byte, product = tl.load(scales + block), bits + start // 8, place_of(product, block, start, HOW)
    if size == WIDTH:
        _block(byte, scale, out + start, factor + start, product, size, False, WIDTH)
    else:
        _block(byte, scale, out + start, factor + start, product, size, True, WIDTH)


@placed
def sign_decode_times_(data: Tensor, lengths: Tensor, out: Tensor, factor: Tensor, product: Flat) -> None:
    where, place = grid(known(lengths), data.device), by_block(product, known(lengths))
    fits = not isinstance(product, Tensor) or (product.dtype == torch.float32 and readable(product))
    fits = fits and out.dtype == torch.float32 and data.is_contiguous() and readable(out, factor)
    if place is None:
        dense = torch.empty_like(factor)
        sign_decode_times_(data, lengths, out, factor, dense)
        product.copy_(dense)
        return
    if not (fits and are_blocks(where)):
        definition(definitions.sign_decode_times_)(data, lengths, out, factor, product)
        return
    scales, bits = scales_and_codes(data, lengths.numel())
    width = triton.next_power_of_2(where.widest)
    _decode_times[(lengths.numel(),)](
        bits, scales, out, factor, place[0], where.starts, place[1], width,
        num_warps=max(1, width // EACH), enable_fp_fusion=False,
    )  # fmt: skip
