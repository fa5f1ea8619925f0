"""Codes in bytes, and the random numbers that round them: what quantizing kernels share."""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.core.graph_refs import cached_on_device
from gradwire.core.keys import Key
from gradwire.core.payload import with_spare_byte

_MASK = 0xFFFFFFFF
_TO_FLOAT = tl.constexpr(0x4B000000)  # 2^23: a small number in its lower bits makes it that much larger
_TWO_23 = tl.constexpr(8388608.0)


@triton.jit
def store_codes(out, row, codes, live, BITS: tl.constexpr, MASKED: tl.constexpr):
    """Store eight codes to a row, [N, 8]; rows are counted from ``out``, whose type is `word` of BITS."""
    place = tl.arange(0, 8)[None, :]
    if BITS == 8:
        if MASKED:
            tl.store(out + row[:, None] * 8 + place, codes.to(tl.uint8), mask=live)
        else:
            tl.store(out + row[:, None] * 8 + place, codes.to(tl.uint8))
    else:
        some = row >= 0
        if MASKED:
            some = tl.max(live.to(tl.int32), 1) > 0
            codes = tl.where(live, codes, 0)
        if BITS == 1 or BITS == 2 or BITS == 4:
            tl.store(out + row, tl.sum(codes << place * BITS, 1).to(out.dtype.element_ty), mask=some)
        else:
            wide = tl.sum(codes.to(tl.int64) << place * BITS, 1)
            byte = (wide[:, None] >> place * 8).to(tl.uint8)
            tl.store(out + row[:, None] * BITS + place, byte, mask=some[:, None] & (place < BITS))
            if BITS == 9:  # of the last code, all but one bit are left
                top = tl.sum(tl.where(place == 7, codes, 0), 1) >> 1
                tl.store(out + row * 9 + 8, top.to(tl.uint8), mask=some)


@triton.jit
def merge_codes(words, at, codes, live, BITS: tl.constexpr):
    """Set codes wherever they lie in zeroed 32-bit words."""
    bit = at * BITS
    shift = (bit & 31).to(tl.int32)
    tl.atomic_or(words + (bit >> 5), codes << shift, mask=live, sem="relaxed")
    if 32 % BITS != 0:
        over = live & (shift + BITS > 32)
        tl.atomic_or(words + (bit >> 5) + 1, codes >> tl.where(over, 32 - shift, 0), mask=over, sem="relaxed")


@triton.jit
def load_codes(data, at, size, live, BITS: tl.constexpr):
    """Code ``at`` of a stream of ``size`` bytes; codes of 9 bits at most."""
    if BITS == 8:
        codes = tl.load(data + at, mask=live, other=0).to(tl.int32)
    else:
        bit = at * BITS
        byte = bit >> 3
        codes = tl.load(data + byte, mask=live, other=0).to(tl.int32)
        if BITS != 1 and BITS != 2 and BITS != 4:
            codes |= tl.load(data + byte + 1, mask=live & (byte + 1 < size), other=0).to(tl.int32) << 8
        codes = codes >> (bit & 7).to(tl.int32) & (1 << BITS) - 1
    return codes


@triton.jit
def _unit(word):
    return (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _product(word, factor):
    """Both halves of a product of 32-bit words; one instruction, unlike a high and a low product."""
    wide = word.to(tl.uint64) * factor
    return (wide >> 32).to(tl.uint32), wide.to(tl.uint32)


@triton.jit
def _counter_word(word):
    """A word of the step: itself, or, in captured steps, where it lies in memory."""
    if word.dtype.is_ptr():
        return tl.load(word).to(tl.uint32)
    else:
        return word.to(tl.uint32)


@triton.jit
def philox_words(block, seed, low, high):
    """Philox4x32-10 of counter (block, step)."""
    c0, c1 = block.to(tl.uint32), (block >> 32).to(tl.uint32)
    c2, c3 = tl.zeros_like(c0) + _counter_word(low), tl.zeros_like(c0) + _counter_word(high)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = _product(c0, 0xD2511F53)
        high1, low1 = _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9).to(tl.uint32), (k1 + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def uniform(i, seed, low, high):
    """Element i's number in [0, 1), each from its own Philox block."""
    a, b, c, d = philox_words(i >> 2, seed, low, high)
    word = i & 3
    return _unit(tl.where(word == 0, a, tl.where(word == 1, b, tl.where(word == 2, c, d))))


@triton.jit
def uniform_fours(block, seed, low, high):
    """The numbers of elements 4 * block, ..., 4 * block + 3. [N] -> [N, 4]."""
    a, b, c, d = philox_words(block, seed, low, high)
    fours = tl.join(tl.join(a, c), tl.join(b, d))
    return _unit(tl.reshape(fours, [block.shape[0], 4]))


@triton.jit
def inverse(scale):
    """1 / scale, for `quotient`; 1 where that is zero."""
    wide = tl.where(scale != 0, scale, 1.0).to(tl.float64)
    return 1.0 / wide


@triton.jit
def quotient(x, inverse):
    """A float32, given as float64, over another, given by its `inverse`: the float32 that a division would give.

    The product is good to 52 bits, and no quotient of two float32 lies that close to the middle between two others.
    One of less than 2^-126 may, but no number that is a multiple of 2^-24 lies between the two that it may become.
    """
    return (x * inverse).to(tl.float32)


@triton.jit
def part_of(q, high, low):
    """``q / levels``, rounded as a division would round it; ``high`` and ``low`` are `reciprocal` of the levels.

    A whole number of 8 bits times ``high`` is exact, so that only one rounding matters: that of the sum. And one
    instruction does both, without a difference.
    """
    return tl.fma(q, tl.zeros_like(q) + high, q * low)


@triton.jit
def step_of(code, high, low, LEVELS: tl.constexpr):
    """``(code - LEVELS) / LEVELS``. To make a float of a code by its bits is faster."""
    q = (code | _TO_FLOAT).to(tl.float32, bitcast=True) - (_TWO_23 + LEVELS)
    return part_of(q, high, low)


@triton.jit
def load_eights(data, row, size, BITS: tl.constexpr, WIDE: tl.constexpr):
    """Eight codes of 1, 2, 4 or 8 bits for each row, as two numbers: the lowest bits of each hold four of them.

    ``data`` has ``size`` bytes. WIDE: it lies at a multiple of four, and all rows are there.
    """
    if WIDE:
        if BITS == 1:
            low = tl.load(data + row).to(tl.int32)
        elif BITS == 2:
            low = tl.load(data.to(tl.pointer_type(tl.int16)) + row).to(tl.int32)
        elif BITS == 4:
            low = tl.load(data.to(tl.pointer_type(tl.int32)) + row)
        else:
            low = tl.load(data.to(tl.pointer_type(tl.int32)) + row * 2)
            high = tl.load(data.to(tl.pointer_type(tl.int32)) + row * 2 + 1)
    else:
        low = _bytes(data, row * BITS, size, BITS if BITS < 4 else 4)
        if BITS == 8:
            high = _bytes(data, row * 8 + 4, size, 4)
    if BITS != 8:
        high = low >> 4 * BITS
    return low, high


@triton.jit
def load_float(data, at, live, WIDE: tl.constexpr):
    """The float32 at these bytes. WIDE: at multiples of four, and all there."""
    if WIDE:
        return tl.load((data + at).to(tl.pointer_type(tl.float32)))
    else:
        return _bytes(data, at, tl.where(live, at + 4, 0), 4).to(tl.float32, bitcast=True)


@triton.jit
def _bytes(data, at, size, COUNT: tl.constexpr):
    """COUNT bytes, up to four, as one number; beyond ``size`` are zeros."""
    number = tl.load(data + at, mask=at < size, other=0).to(tl.int32)
    for i in tl.static_range(1, COUNT):
        number |= tl.load(data + at + i, mask=at + i < size, other=0).to(tl.int32) << 8 * i
    return number


@triton.jit
def eight(a, b, c, d, e, f, g, h):
    """Eight columns side by side. 8 x [N] -> [N, 8]."""
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    return tl.reshape(tl.join(even, odd), [a.shape[0], 8])


@lru_cache(maxsize=256)
def reciprocal(levels: int) -> tuple[float, float]:
    """1 / levels as a sum of two float32, of which the first has 15 bits. Good for `part_of` of up to 255 levels."""
    assert 0 < levels < 256
    whole = torch.tensor(1.0 / levels)
    high = float((whole.view(torch.int32) & -512).view(torch.float32))
    return high, float(torch.tensor(1.0 / levels - high))


def word(bits: int) -> torch.dtype:
    """What `store_codes` stores at once."""
    return {2: torch.int16, 4: torch.int32}.get(bits, torch.uint8)


def message(
    scales: int, codes: int, bits: int, device: torch.device, zero: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """An unwritten message of float32 scales and codes: whole, its scales, its codes with some bytes to spare."""
    head, body = 4 * scales, (codes * bits + 7) // 8
    make = torch.zeros if zero else torch.empty
    data = make(head + (body + 15) // 8 * 8, dtype=torch.uint8, device=device)
    return with_spare_byte(data, head + body), data[:head].view(torch.float32), data[head:]


def step_words(key: Key) -> tuple[int, int] | tuple[Tensor, ...]:
    """The step, as two words of the counter; of a captured step, where they lie in memory."""
    return key.counter() if key.device_counter is None else key.device_counter.split(1)


def seeds(key: Key, names: tuple[str, ...], device: torch.device) -> Tensor:
    """The Philox keys of the units' streams; int64 holds their bits."""
    return _seeds(key.seed, key.rank, key.purpose, names, device)


@cached_on_device(256)
def _seeds(seed: int, rank: int, purpose: str, names: tuple[str, ...], device: torch.device) -> Tensor:
    pairs = [Key(seed, 0, rank, purpose).words(name) for name in names]
    # Two's complement: the upper word may have its highest bit set.
    numbers = [low | (high - (1 << 32) if high >> 31 else high) << 32 for low, high in pairs]
    return torch.tensor(numbers, dtype=torch.int64, device=device)
