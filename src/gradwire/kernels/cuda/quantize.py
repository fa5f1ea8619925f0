"""Quantizers by their names: integers, QSGD, ternary and natural; and error feedback with integers."""

import torch
from torch import Tensor

from gradwire.core.keys import Key
from gradwire.core.segments import known
from gradwire.kernels import fused
from gradwire.kernels import quantize as plain
from gradwire.kernels.cuda.accumulate import Entering, memory_of, no_report, readable
from gradwire.kernels.cuda.blockwise import INTEGER, QSGD, quantize, slabs
from gradwire.kernels.cuda.codes import message, word
from gradwire.kernels.cuda.decode import LEVEL, POWER, SLAB, TRIT, decode, decode_blocks
from gradwire.kernels.cuda.segment_stats import NORM, PEAK, survey
from gradwire.kernels.cuda.stochastic_round import LEVELED, NATURAL, dither, trits
from gradwire.kernels.cuda.tables import definition, grid, placed
from gradwire.kernels.groups import block_sizes

_WIDEST = 8192  # a larger block does not fit into one program
_MOST_BITS = 9


@placed
def integer_encode(values: Tensor, lengths: Tensor, bits: int, block: int) -> Tensor:
    if block > _WIDEST or not readable(values):
        return definition(plain.integer_encode)(values, lengths, bits, block)
    where = slabs(known(lengths), block, values.device)
    return quantize(values, where, block, INTEGER, _levels(bits), bits)


@placed
def integer_decode(data: Tensor, lengths: Tensor, bits: int, block: int, out: Tensor | None = None) -> Tensor:
    flat, where = grid(known(lengths), data.device), slabs(known(lengths), block, data.device, SLAB)
    scales, body = plain.scales_and_codes(data, where.groups)
    return decode_blocks(body, scales, flat, where, bits, _levels(bits), block, out)


@placed
def feedback_integer_(
    grad: Tensor,
    residual: Tensor,
    decay: float,
    lengths: tuple[int, ...],
    bits: int,
    block: int,
    before: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if grad.numel() == 0 or block > _WIDEST or not readable(grad, residual):
        return definition(fused.feedback_integer_)(grad, residual, decay, lengths, bits, block, before)
    entering = Entering(grad, no_report(grad.device), decay, memory_of(residual, before))
    where = slabs(lengths, block, grad.device)
    data = quantize(residual, where, block, INTEGER, _levels(bits), bits, entering=entering)
    return data, entering.nonfinite.view(torch.bool)


@placed
def qsgd_encode(
    values: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key, levels: int, bucket: int | None
) -> Tensor:
    bits = (2 * levels).bit_length()
    if bits > _MOST_BITS or (bucket or 0) > _WIDEST or not readable(values):
        return definition(plain.qsgd_encode)(values, lengths, names, key, levels, bucket)
    if bucket is not None:
        where = slabs(known(lengths), bucket, values.device)
        return quantize(values, where, bucket, QSGD, levels, bits, names, key)
    flat = grid(known(lengths), values.device)
    data, norms, body = message(lengths.numel(), flat.n, bits, values.device)
    survey(values, flat, NORM, norms)
    dither(values, flat, LEVELED, norms, body.view(word(bits)), names, key, bits, levels)
    return data


@placed
def qsgd_decode(
    data: Tensor, lengths: Tensor, levels: int, bucket: int | None, biased: bool, out: Tensor | None = None
) -> Tensor:
    bits = (2 * levels).bit_length()
    if bits > _MOST_BITS:
        return definition(plain.qsgd_decode)(data, lengths, levels, bucket, biased, out)
    flat = grid(known(lengths), data.device)
    cut = slabs(known(lengths), bucket, data.device, SLAB) if bucket else None
    norms, body = plain.scales_and_codes(data, cut.groups if cut else lengths.numel())
    if biased:
        sizes = block_sizes(known(lengths), bucket, data.device)
        norms = (norms.double() / (1 + plain.omega(sizes, levels))).float()
    if cut is None or bucket is None:
        return decode(body, norms, flat, LEVEL, bits, levels, out=out)
    return decode_blocks(body, norms, flat, cut, bits, levels, bucket, out)


@placed
def ternary_encode(values: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key, clip: float) -> Tensor:
    if not readable(values):
        return definition(plain.ternary_encode)(values, lengths, names, key, clip)
    where, head = grid(known(lengths), values.device), 4 * lengths.numel()
    data = torch.empty(head + (where.n + 4) // 5, dtype=torch.uint8, device=values.device)
    scales = data[:head].view(torch.float32)
    limits = torch.empty_like(scales)
    survey(values, where, PEAK, scales, limits, clip=clip)
    trits(values, known(lengths), scales, limits, data[head:], names, key)
    return data


@placed
def ternary_decode(data: Tensor, lengths: Tensor) -> Tensor:
    scales, body = plain.scales_and_codes(data, lengths.numel())
    return decode(body, scales, grid(known(lengths), data.device), TRIT)


@placed
def natural_encode(values: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key) -> Tensor:
    if values.dtype != torch.float32 or not readable(values):
        return definition(plain.natural_encode)(values, lengths, names, key)
    where = grid(known(lengths), values.device)
    data, _, body = message(0, where.n, plain.NATURAL_BITS, values.device)
    dither(values, where, NATURAL, values, body, names, key, plain.NATURAL_BITS)
    return data


@placed
def natural_decode(data: Tensor, count: int) -> Tensor:
    return decode(data, data, grid((count,), data.device), POWER, plain.NATURAL_BITS)


def _levels(bits: int) -> int:
    return int((1 << bits - 1) - 1)
