"""Rice codes, block by block in parallel: positions to bytes, and several messages back to positions.

Where a block's bits lie follows from the sizes of all blocks before it. Every program adds those up for itself: they
are a few bytes for each 512 positions, and a launch of its own would take longer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels import rice
from gradwire.kernels.cuda.launch import form, launch
from gradwire.kernels.cuda.tables import placed
from gradwire.kernels.rice import Found, most_bytes, num_blocks, width_of

_BLOCK = tl.constexpr(rice.BLOCK)
_CAP = tl.constexpr(rice.CAP)
_MOST_BITS = tl.constexpr(31)
_MOST_EXCESS = tl.constexpr(1023)
_CAPPED = tl.constexpr(32)  # in a header
_NEVER = tl.constexpr(1 << 62)
_WIDE = tl.constexpr(1024)  # blocks whose sizes are added up together
_BITS = tl.constexpr(2048)  # hold a block's quotients, wherever in a byte they start


# -- writing -----------------------------------------------------------------------------------------------------------


@triton.jit
def _gaps(indices, first, count, SIZE: tl.constexpr):
    """Gaps ``first``, ..., of the message; 0 beyond its end."""
    j = first + tl.arange(0, SIZE)
    at = tl.load(indices + j, mask=j < count, other=0)
    before = tl.load(indices + j - 1, mask=(j > 0) & (j < count), other=-1)
    return tl.where(j < count, at - before - 1, 0)


@triton.jit
def _bit_length(x):
    """The bits of a number below 2^53; none for 0."""
    exponent = (x.to(tl.float64).to(tl.int64, bitcast=True) >> 52) - 1022
    return tl.where(x > 0, exponent, 0)


@triton.jit
def _plain_cost(gaps, size, bits):
    return tl.sum(gaps >> bits, 0) + size * bits


@triton.jit
def _capped_cost(gaps, size, bits, WIDTH: tl.constexpr):
    quotients = gaps >> bits
    excess = tl.sum(tl.minimum(quotients, _CAP), 0)
    cost = excess + size * bits + 8 * WIDTH * tl.sum((quotients >= _CAP).to(tl.int64), 0)
    return tl.where(excess <= _MOST_EXCESS, cost, _NEVER)


@triton.jit
def _near(center, step: tl.constexpr):
    return tl.minimum(tl.maximum(center + step, 0), _MOST_BITS)


@triton.jit
def _choose(indices, data, sizes, before, count, blocks, WIDTH: tl.constexpr):
    """Find a block's parameter, and write its header and sizes: bits of quotients and of remainders, and escapes."""
    block = tl.program_id(0)
    out = data + before
    first = block.to(tl.int64) * _BLOCK
    gaps = _gaps(indices, first, count, _BLOCK)
    size = tl.minimum(count - first, _BLOCK)
    center = _bit_length(tl.sum(gaps, 0) // size) - 1
    bits, capped = _near(center, 1), size * 0
    cost = _plain_cost(gaps, size, bits)
    for step in tl.static_range(2):
        other = _near(center, -step)
        price = _plain_cost(gaps, size, other)
        bits = tl.where(price < cost, other, bits)
        cost = tl.minimum(cost, price)
    center = tl.sum(_bit_length(gaps), 0) // size
    for step in tl.static_range(4):
        other = _near(center, 1 - step)
        price = _capped_cost(gaps, size, other, WIDTH)
        bits = tl.where(price < cost, other, bits)
        capped = tl.where(price < cost, 1, capped)
        cost = tl.minimum(cost, price)
    quotients = gaps >> bits
    escaped = (quotients >= _CAP) & (capped > 0)
    excess = tl.sum(tl.where(escaped, _CAP, quotients), 0)
    header = bits | capped * _CAPPED | excess << 6
    tl.store(out + 2 * block, header.to(tl.uint8))
    tl.store(out + 2 * block + 1, (header >> 8).to(tl.uint8))
    tl.store(sizes + block, (size + excess).to(tl.int32))
    tl.store(sizes + blocks + block, (size * bits).to(tl.int32))
    tl.store(sizes + 2 * blocks + block, tl.sum(escaped.to(tl.int32), 0))


@triton.jit
def _header(data, block, live):
    """A header from two bytes, which may lie anywhere."""
    low = tl.load(data + 2 * block, mask=live, other=0).to(tl.int32)
    return low | tl.load(data + 2 * block + 1, mask=live, other=0).to(tl.int32) << 8


@triton.jit
def _split(header):
    """The parameter, whether the block is capped, and the sum of its quotients."""
    return (header & 31).to(tl.int64), header & _CAPPED, header >> 6


@triton.jit
def _sum_to(sizes, block, blocks):
    """The sum of sizes before ``block``, and that of all."""
    before = tl.zeros([_WIDE], tl.int64)
    whole = tl.zeros([_WIDE], tl.int64)
    for i in range(0, blocks, _WIDE):
        at = i + tl.arange(0, _WIDE)
        size = tl.load(sizes + at, mask=at < blocks, other=0).to(tl.int64)
        before += tl.where(at < block, size, 0)
        whole += size
    return tl.sum(before, 0), tl.sum(whole, 0)


@triton.jit
def _sent(gaps, header):
    """The quotients as they are sent, and which of them are escapes."""
    bits, capped, _ = _split(header)
    quotients = gaps >> bits
    escaped = (capped > 0) & (quotients >= _CAP)
    return tl.where(escaped, _CAP, quotients).to(tl.int32), escaped, quotients


@triton.jit
def _write_quotients(out, start, length, sent, size, after, more, flags):
    """Write the bytes that begin in a block; the last one also holds what the next block begins with.

    ``flags`` is scratch: a byte for each bit.
    """
    shift = (start & 7).to(tl.int32)
    tl.store(flags + tl.arange(0, _BITS), tl.zeros([_BITS], tl.uint8))
    tl.debug_barrier()
    one = tl.full([_BLOCK], 1, tl.uint8)
    tl.store(flags + shift + tl.cumsum(sent + 1, 0) - 1, one, mask=tl.arange(0, _BLOCK) < size)
    beyond = shift + length + tl.cumsum(after + 1, 0) - 1
    tl.store(flags + beyond, tl.full([8], 1, tl.uint8), mask=(tl.arange(0, 8) < more) & (beyond < _BITS))
    tl.debug_barrier()
    byte, bit = tl.arange(0, _BITS // 8), tl.arange(0, 8)[None, :]
    value = tl.sum(tl.load(flags + byte[:, None] * 8 + bit).to(tl.int32) << bit, 1)
    mine = (byte * 8 >= shift) & (byte * 8 < shift + length)
    tl.store(out + (start >> 3) + byte, value.to(tl.uint8), mine)


@triton.jit
def _write_remainders(out, indices, first, size, bits):
    """Write a block's remainders, a word from all codes that reach into it at a time."""
    word = tl.arange(0, _BLOCK)
    bits, total = bits.to(tl.int32), (size * bits).to(tl.int32)
    live = word * 32 < total
    divisor = tl.maximum(bits, 1)
    j = word * 32 // divisor
    value = tl.zeros([_BLOCK], tl.int64)
    for _ in range(32 // divisor + 2):
        some = live & (j < size)
        at = tl.load(indices + first + j, mask=some, other=0)
        before = tl.load(indices + first + j - 1, mask=some & (first + j > 0), other=-1)
        code = tl.where(some, (at - before - 1) & (1 << bits.to(tl.int64)) - 1, 0)
        shift = j * bits - word * 32
        value |= code << tl.minimum(tl.maximum(shift, 0), 32) >> tl.maximum(-shift, 0)
        j += 1
    part = tl.arange(0, 4)[None, :]
    byte = word[:, None] * 4 + part
    tl.store(out + byte, (value[:, None] >> part * 8).to(tl.uint8), live[:, None] & (byte * 8 < total))


@triton.jit
def _clear(out, start, stop, block, blocks):
    """A block's share of zeros from ``start`` to ``stop``: a launch of their own would take longer."""
    share = (stop - start + blocks - 1) // blocks
    for i in range(0, share, _WIDE):
        at = i + tl.arange(0, _WIDE)
        to = start + block * share + at
        tl.store(out + to, tl.zeros([_WIDE], tl.uint8), mask=(at < share) & (to < stop))


@triton.jit
def _write(indices, data, sizes, flags, used, before, room, count, blocks, WIDTH: tl.constexpr):
    """Write a block's codes, and zeros wherever no code is."""
    block = tl.program_id(0)
    out = data + before
    first = block.to(tl.int64) * _BLOCK
    size = tl.minimum(count - first, _BLOCK)
    start, all_quotients = _sum_to(sizes, block, blocks)
    remainders, all_remainders = _sum_to(sizes + blocks, block, blocks)
    escape, all_escapes = _sum_to(sizes + 2 * blocks, block, blocks)
    middle = 2 * blocks + (all_quotients + 7) // 8
    stop = middle + (all_remainders + 7) // 8
    end = stop + WIDTH * all_escapes
    if block == 0:
        tl.store(used, end)
    _clear(out, end, room, block, blocks)
    _clear(data, end * 0, end * 0 + before, block, blocks)
    header = _header(out, block, True)
    gaps = _gaps(indices, first, count, _BLOCK)
    sent, escaped, quotients = _sent(gaps, header)
    after, _, _ = _sent(_gaps(indices, first + _BLOCK, count, 8), _header(out, block + 1, block + 1 < blocks))
    length = tl.load(sizes + block)
    _write_quotients(out + 2 * blocks, start, length, sent, size, after, count - first - _BLOCK, flags + block * _BITS)
    bits, capped, _ = _split(header)
    _write_remainders(out + middle + remainders // 8, indices, first, size, bits)
    if capped > 0:
        rank = escape + tl.cumsum(escaped.to(tl.int32), 0) - 1
        for byte in tl.static_range(WIDTH):
            value = (quotients - _CAP >> 8 * byte).to(tl.uint8)
            tl.store(out + stop + rank * WIDTH + byte, value, mask=escaped != 0)


@placed
def rice_encode(indices: Tensor, n: int, before: int = 0, after: int = 0) -> tuple[Tensor, Tensor]:
    count, device = indices.numel(), indices.device
    room = most_bytes(count, n - count) + after
    data = torch.empty(before + room, dtype=torch.uint8, device=device)
    if count == 0:
        return data.zero_(), torch.zeros((), dtype=torch.int64, device=device)
    blocks, width = num_blocks(count), width_of(n)
    sizes = torch.empty(3 * blocks, dtype=torch.int32, device=device)
    flags = torch.empty(blocks * _BITS.value, dtype=torch.uint8, device=device)
    used = torch.empty((), dtype=torch.int64, device=device)
    indices = indices.contiguous()
    facts, codes = (before, room, count, width, *form(indices)), (count, blocks, width)
    launch(_choose, blocks, facts, (indices, data, sizes), (before, *codes), num_warps=2)
    launch(_write, blocks, facts, (indices, data, sizes, flags, used), (before, room, *codes), num_warps=4)
    return data, used


# -- reading -----------------------------------------------------------------------------------------------------------


@triton.jit
def _layout(data, block, blocks, count):
    """Where a block's quotients and remainders start, in bits of their parts, and how long those parts are."""
    quotients = tl.zeros([_WIDE], tl.int64)
    remainders = tl.zeros([_WIDE], tl.int64)
    all_quotients = tl.zeros([_WIDE], tl.int64)
    all_remainders = tl.zeros([_WIDE], tl.int64)
    for i in range(0, blocks, _WIDE):
        at = i + tl.arange(0, _WIDE)
        bits, _, excess = _split(_header(data, at, at < blocks))
        size = tl.minimum(tl.maximum(count - at.to(tl.int64) * _BLOCK, 0), _BLOCK)
        all_quotients += size + excess
        all_remainders += size * bits
        quotients += tl.where(at < block, size + excess, 0)
        remainders += tl.where(at < block, size * bits, 0)
    return tl.sum(quotients, 0), tl.sum(remainders, 0), tl.sum(all_quotients, 0), tl.sum(all_remainders, 0)


@triton.jit
def _read_remainders(data, bits, size, limit):
    """The remainders of a block that starts at ``data``; ``limit`` bytes are there."""
    start = tl.arange(0, _BLOCK) * bits
    byte = start >> 3
    live = tl.arange(0, _BLOCK) < size
    wide = tl.zeros([_BLOCK], tl.int64)
    for i in tl.static_range(5):  # 31 bits reach into five bytes at most
        some = live & (byte + i < limit)
        wide |= tl.load(data + byte + i, mask=some, other=0).to(tl.int64) << 8 * i
    return wide >> (start & 7) & (1 << bits) - 1


@triton.jit
def _read(data, gaps, zeros, notes, meta, stride, limit, count, blocks, messages):
    """Decode a block but for its escapes, which are counted."""
    escapes, faults = notes, notes + messages * blocks
    message, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    data += message * stride
    start, remainders, all_quotients, all_remainders = _layout(data, block, blocks, count)
    middle = 2 * blocks + (all_quotients + 7) // 8
    stop = middle + (all_remainders + 7) // 8
    bits, capped, excess = _split(_header(data, block, True))
    size = tl.minimum(count - block.to(tl.int64) * _BLOCK, _BLOCK)
    lane = tl.arange(0, _BITS)
    at = 2 * blocks + (start + lane >> 3)
    one = tl.load(data + at, mask=(lane < size + excess) & (at < limit), other=0).to(tl.int32)
    one = one >> (start + lane & 7).to(tl.int32) & 1
    rank = tl.cumsum(one, 0) - 1
    mine = message * count + block.to(tl.int64) * _BLOCK
    tl.store(zeros + mine + rank, lane - rank, mask=(one > 0) & (rank < size))
    tl.debug_barrier()
    j = tl.arange(0, _BLOCK)
    passed = tl.load(zeros + mine + j, mask=j < size, other=0)
    quotients = passed - tl.load(zeros + mine + j - 1, mask=(j > 0) & (j < size), other=0)
    last = tl.load(zeros + mine + size - 1)
    fault = (tl.sum(one, 0) != size) | (last != excess) | (stop > limit)
    rest = _read_remainders(data + middle + remainders // 8, bits, size, limit - middle - remainders // 8)
    tl.store(gaps + mine + j, (quotients.to(tl.int64) << bits) + rest, mask=j < size)
    number = tl.sum(((quotients == _CAP) & (j < size)).to(tl.int32), 0)
    tl.store(escapes + tl.program_id(0), tl.where(capped > 0, number, 0))
    tl.store(faults + tl.program_id(0), fault.to(tl.int32))
    if block == 0:
        tl.store(meta + message, stop)


@triton.jit
def _patch(data, gaps, notes, meta, stride, limit, count, blocks, messages, WIDTH: tl.constexpr):
    """Add a block's escapes, and its gaps up."""
    escapes, faults = notes, notes + messages * blocks
    used, sums = meta + messages, meta + 2 * messages
    message, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    data += message * stride
    bits, capped, _ = _split(_header(data, block, True))
    size = tl.minimum(count - block.to(tl.int64) * _BLOCK, _BLOCK)
    j = tl.arange(0, _BLOCK)
    mine = message * count + block.to(tl.int64) * _BLOCK
    gap = tl.load(gaps + mine + j, mask=j < size, other=0)
    stop = tl.load(meta + message)
    before, whole = _sum_to(escapes + message * blocks, block, blocks)
    if block == 0:
        tl.store(used + message, stop + WIDTH * whole)
    if capped > 0:
        escaped = (gap >> bits == _CAP) & (j < size)
        at = stop + (before + tl.cumsum(escaped.to(tl.int32), 0) - 1) * WIDTH
        value = tl.zeros([_BLOCK], tl.int64)
        for i in tl.static_range(WIDTH):
            some = escaped & (at + i >= 0) & (at + i < limit)
            value |= tl.load(data + at + i, mask=some, other=0).to(tl.int64) << 8 * i
        gap += value << bits
        tl.store(gaps + mine + j, gap, mask=escaped)
    if stop + WIDTH * whole > limit:
        tl.store(faults + tl.program_id(0), 1)
    tl.store(sums + tl.program_id(0), tl.sum(tl.where(j < size, gap + 1, 0), 0))


@triton.jit
def _place(gaps, notes, meta, count, blocks, messages, n):
    """Turn a block's gaps into positions."""
    faults, sums = notes + messages * blocks, meta + 2 * messages
    message, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    before, _ = _sum_to(sums + message * blocks, block, blocks)
    size = tl.minimum(count - block.to(tl.int64) * _BLOCK, _BLOCK)
    j = tl.arange(0, _BLOCK)
    mine = gaps + message * count + block.to(tl.int64) * _BLOCK + j
    at = before + tl.cumsum(tl.where(j < size, tl.load(mine, mask=j < size, other=0) + 1, 0), 0) - 1
    wrong = (j < size) & ((at < 0) | (at >= n))
    if tl.sum(wrong.to(tl.int32), 0) > 0:
        tl.store(faults + tl.program_id(0), 1)
    # A damaged message may say anything, but nobody may write outside the buffer for it.
    tl.store(mine, tl.minimum(tl.maximum(at, 0), n - 1), mask=j < size)


@placed
def rice_decode(data: Tensor, count: int, n: int) -> Found:
    messages, limit = data.shape
    device = data.device
    found = torch.empty(messages, count, dtype=torch.int64, device=device)
    if count == 0 or limit < 2 * num_blocks(count):
        none = torch.zeros(messages, 1, dtype=torch.int64, device=device)
        return Found(found.zero_(), none[:, 0], none + int(count > 0))
    blocks, width = num_blocks(count), width_of(n)
    zeros = torch.empty(messages * count, dtype=torch.int32, device=device)
    # Of each block: its escapes, then whether it is faulty. Of each message: where escapes start, and how many bytes
    # are used; then the sum of each block.
    notes = torch.empty(2, messages, blocks, dtype=torch.int32, device=device)
    meta = torch.empty(messages * (2 + blocks), dtype=torch.int64, device=device)
    programs, stride = messages * blocks, data.stride(0)
    facts = (count, n, messages, limit, stride, *form(data))
    about = (stride, limit, count, blocks, messages)
    launch(_read, programs, facts, (data, found, zeros, notes, meta), about, num_warps=4)
    launch(_patch, programs, facts, (data, found, notes, meta), (*about, width), num_warps=4)
    launch(_place, programs, facts, (found, notes, meta), (count, blocks, messages, n), num_warps=4)
    return Found(found, meta[messages : 2 * messages], notes[1])
