"""Codes in bytes, and the random numbers that round them: what quantizing kernels share."""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.core.keys import Key

_MASK = 0xFFFFFFFF


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
def philox_words(block, seed, low, high):
    """Philox4x32-10 of counter (block, step)."""
    c0, c1 = block.to(tl.uint32), (block >> 32).to(tl.uint32)
    c2, c3 = tl.zeros_like(c0) + low.to(tl.uint32), tl.zeros_like(c0) + high.to(tl.uint32)
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
def part_of(q, high, low):
    """``q / levels``, rounded as a division would round it; ``high`` and ``low`` are `reciprocal` of the levels.

    A whole number of 8 bits times ``high`` is exact, so that only one rounding matters: that of the sum.
    """
    return q * high + q * low


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
    return data[: head + body], data[:head].view(torch.float32), data[head:]


def step_words(key: Key) -> tuple[int, int]:
    """The step, as two words of the counter."""
    return key.step & _MASK, key.step >> 32


def seeds(key: Key, names: tuple[str, ...], device: torch.device) -> Tensor:
    """The Philox keys of the units' streams; int64 holds their bits."""
    return _seeds(key.seed, key.rank, key.purpose, names, device)


@lru_cache(maxsize=256)
def _seeds(seed: int, rank: int, purpose: str, names: tuple[str, ...], device: torch.device) -> Tensor:
    pairs = [Key(seed, 0, rank, purpose).words(name) for name in names]
    # Two's complement: the upper word may have its highest bit set.
    numbers = [low | (high - (1 << 32) if high >> 31 else high) << 32 for low, high in pairs]
    return torch.tensor(numbers, dtype=torch.int64, device=device)
