"""Quantize and pack, unpack and dequantize: the definitions, in plain torch.

``lengths`` (int64) says how many values each segment has; ``names`` and ``key`` name the segments' random streams.
"""

import math

import torch
from torch import Tensor

from gradwire.core.keys import Key
from gradwire.core.layout import Flat, in_one_place
from gradwire.core.payload import as_bytes, from_bytes
from gradwire.kernels.bits import pack, pack_trits, unpack, unpack_trits
from gradwire.kernels.dispatch import kernel
from gradwire.kernels.groups import blocks, largest, mean, over, spread, total
from gradwire.kernels.philox import uniform

NATURAL_BITS = 9
_LARGEST_FP8 = 448  # of E4M3
_TWO_BIT_LEVELS, _TWO_BIT_LIMIT = (1.0, 0.4528 / 1.5104), 0.9816  # what divides them is in standard deviations
_LARGEST = 254  # exponent bits of 2^127; 255 means infinity


@kernel
def cast_encode(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values in a shorter float format; finite ones beyond its range become its largest."""
    most = torch.finfo(dtype).max
    return torch.where(values.isinf(), values, values.clamp(-most, most)).to(dtype)


@kernel
def cast_decode(values: Tensor) -> Tensor:
    """Values of any float format as float32, which is never the same memory."""
    return values.to(torch.float32, copy=True)


def fp8_encode(values: Tensor, groups: Tensor) -> Tensor:
    """One scale per group, then E4M3 of each value over its scale; a group whose scale underflows is all zeros."""
    scales = over(largest(values.abs(), groups), _LARGEST_FP8)
    scaled = values / spread(scales.where(scales != 0, math.inf), groups, values.numel())
    # Beyond its range the format has NaN alone, and a scale of few bits may be too small.
    codes = scaled.clamp(-_LARGEST_FP8, _LARGEST_FP8).to(torch.float8_e4m3fn)
    return torch.cat((as_bytes(scales), codes.view(torch.uint8)))


def fp8_decode(data: Tensor, groups: Tensor) -> Tensor:
    scales, body = scales_and_codes(data, groups.numel())
    codes = body.view(torch.float8_e4m3fn).float()
    return codes * spread(scales, groups, codes.numel())


def twobit_encode(values: Tensor, groups: Tensor) -> Tensor:
    """One scale per group, then two bits per value: whether it is >= 0, and whether its magnitude is the larger one."""
    n, sizes = values.numel(), values.abs()
    square = total(values.double().square(), groups)  # in float64, where no float32 overflows
    limits = (square / groups.clamp(min=1)).sqrt() * _TWO_BIT_LIMIT
    large = sizes > spread(limits, groups, n)
    levels = torch.where(large, *_TWO_BIT_LEVELS).double()
    scales = total(sizes.double() * levels, groups) / total(levels.square(), groups).clamp(min=_TWO_BIT_LEVELS[1] ** 2)
    # Of finite values the scale is finite, even where rounding to float32 would make it infinite.
    scales = scales.where(scales.isinf(), scales.clamp(max=torch.finfo(torch.float32).max)).float()
    return torch.cat((as_bytes(scales), pack((values >= 0).int() + 2 * large.int(), 2)))


def twobit_decode(data: Tensor, groups: Tensor) -> Tensor:
    scales, body = _spread_scales(data, groups)
    codes = unpack(body, 2, scales.numel())
    levels = scales * torch.where(codes >= 2, *_TWO_BIT_LEVELS)
    return torch.where(codes % 2 == 1, levels, -levels)


@kernel
def sign_encode(values: Tensor, lengths: Tensor, norm: bool) -> Tensor:
    """One scale per segment, then one bit per value: whether it is >= 0."""
    if norm:  # squared in float64, where no float32 overflows
        scales = (total(values.double().square(), lengths) / lengths.clamp(min=1)).sqrt().float()
    else:
        scales = mean(values.abs(), lengths)
    return torch.cat((as_bytes(scales), pack(values >= 0, 1)))


@kernel
def sign_decode(data: Tensor, lengths: Tensor, out: Flat | None = None) -> Tensor:
    """The values, in new memory or in ``out``."""
    scales, body = _spread_scales(data, lengths)
    positive = unpack(body, 1, scales.numel()) == 1
    return _into(out, torch.where(positive, scales, -scales))


@kernel
def onebit_encode(values: Tensor, lengths: Tensor) -> Tensor:
    """The mean of each segment's values >= 0, and of those below; then one bit per value."""
    above = values >= 0
    upper, lower = (_mean_where(side, values, lengths) for side in (above, ~above))
    return torch.cat((as_bytes(upper), as_bytes(lower), pack(above, 1)))


@kernel
def onebit_decode(data: Tensor, lengths: Tensor) -> Tensor:
    sides, body = scales_and_codes(data, 2 * lengths.numel())
    upper, lower = (spread(side, lengths) for side in sides.view(2, -1))
    return torch.where(unpack(body, 1, upper.numel()) == 1, upper, lower)


@kernel
def ternary_encode(values: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key, clip: float) -> Tensor:
    """Clamp at ``clip`` standard deviations (0: nowhere), keep a sign with chance |x| / max|x|, five trits a byte."""
    y = _clamp(values, lengths, clip) if clip else values
    scales = largest(y.abs(), lengths)
    chance = y.abs() / spread(scales.where(scales != 0, 1.0), lengths)
    kept = uniform(key, names, lengths) < chance
    return torch.cat((as_bytes(scales), pack_trits(1 + y.sign() * kept)))


@kernel
def ternary_decode(data: Tensor, lengths: Tensor) -> Tensor:
    scales, body = _spread_scales(data, lengths)
    return scales * (unpack_trits(body, scales.numel()) - 1)


@kernel
def qsgd_encode(
    values: Flat, lengths: Tensor, names: tuple[str, ...], key: Key, levels: int, bucket: int | None
) -> Tensor:
    """Stochastic rounding to ``levels`` even parts of each bucket's l2 norm."""
    values, buckets = in_one_place(values), blocks(lengths, bucket)
    norms = _norms(values, buckets)
    level = values.abs() / spread(norms.where(norms != 0, 1.0), buckets) * levels
    low = level.floor()
    # floor(level + u) in other words; the sum itself could round up past the last level.
    q = low + (uniform(key, names, lengths) < level - low)
    codes = (values.sign() * q).int() + levels
    return torch.cat((as_bytes(norms), pack(codes, (2 * levels).bit_length())))


@kernel
def qsgd_decode(
    data: Tensor, lengths: Tensor, levels: int, bucket: int | None, biased: bool, out: Flat | None = None
) -> Tensor:
    """The values, in new memory or in ``out``."""
    buckets = blocks(lengths, bucket)
    norms, body = scales_and_codes(data, buckets.numel())
    if biased:
        norms = (norms.double() / (1 + omega(buckets, levels))).float()
    scales = spread(norms, buckets)
    codes = unpack(body, (2 * levels).bit_length(), scales.numel()) - levels
    return _into(out, scales * over(codes, levels))


@kernel
def integer_encode(values: Tensor, lengths: Tensor, bits: int, block: int) -> Tensor:
    """Round to the nearest of 2^bits - 1 even steps between -max|x| and max|x| of each block."""
    cut = blocks(lengths, block)
    scales = largest(values.abs(), cut)
    levels = (1 << bits - 1) - 1
    # Divide first: levels * x could overflow, and x / s never exceeds 1.
    q = (values / spread(scales.where(scales != 0, 1.0), cut) * levels).round().int()
    return torch.cat((as_bytes(scales), pack(q + levels, bits)))


@kernel
def integer_decode(data: Tensor, lengths: Tensor, bits: int, block: int, out: Flat | None = None) -> Tensor:
    """The values, in new memory or in ``out``."""
    cut = blocks(lengths, block)
    levels = (1 << bits - 1) - 1
    scales, body = _spread_scales(data, cut)
    q = unpack(body, bits, scales.numel()) - levels
    return _into(out, scales * over(q, levels))


@kernel
def natural_encode(values: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key) -> Tensor:
    """Sign and exponent; the mantissa is the chance that the exponent goes up by one."""
    raw = values.view(torch.int32)
    exponent = raw >> 23 & 0xFF
    # Subnormals are mantissa * 2^-126 with exponent bits 0: the same rule suits them.
    mantissa = (raw & 0x7FFFFF) * 2.0**-23
    up = uniform(key, names, lengths) < mantissa
    # No finite value becomes infinite, yet an infinite one stays so.
    rounded = torch.maximum(exponent, (exponent + up).clamp(max=_LARGEST))
    return pack(rounded + ((raw < 0).int() << 8), NATURAL_BITS)


@kernel
def natural_decode(data: Tensor, count: int) -> Tensor:
    codes = unpack(data, NATURAL_BITS, count)
    power = ((codes & 0xFF) << 23).view(torch.float32)
    return torch.where(codes > 0xFF, -power, power)


def scales_and_codes(data: Tensor, scales: int) -> tuple[Tensor, Tensor]:
    """The two parts of a message of so many scales."""
    return from_bytes(data[: 4 * scales], torch.float32), data[4 * scales :]


def _spread_scales(data: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """A message's scale for each value, and its codes."""
    scales, codes = scales_and_codes(data, groups.numel())
    return spread(scales, groups), codes


def omega(lengths: Tensor, levels: int) -> Tensor:
    """QSGD's variance bound, for vectors of these lengths."""
    b = lengths.double()
    return torch.minimum(over(b, levels**2), over(b.sqrt(), levels))


def _into(out: Flat | None, values: Tensor) -> Tensor:
    written = values if out is None else out.copy_(values)
    return written if isinstance(written, Tensor) else values


def _norms(values: Tensor, buckets: Tensor) -> Tensor:
    norms = total(values.double().square(), buckets).sqrt()
    # Only an infinite input has an infinite norm in float64, and that one must be sent on.
    return norms.clamp(max=torch.finfo(torch.float32).max).where(norms.isfinite(), norms).float()


def _mean_where(mask: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    counts = total(mask, lengths).clamp(min=1)
    return (total(torch.where(mask, values, 0.0), lengths) / counts).float()


def _clamp(values: Tensor, lengths: Tensor, clip: float) -> Tensor:
    # About zero, not about the mean: kept values of one sign would otherwise be clamped to nearly nothing.
    sigma = (total(values.double().square(), lengths) / lengths.clamp(min=1)).sqrt()
    limit = spread((clip * sigma).where(sigma != 0, math.inf).float(), lengths)
    return values.clamp(-limit, limit)
