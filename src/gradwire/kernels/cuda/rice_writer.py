"""Rice codes, block by block in parallel: positions to bytes; `rice_reader` reads them.

Where a block's bits lie follows from the sizes of all blocks before it. Every program adds those up for itself: they
are a few bytes for each 512 positions, and a launch of its own would take longer. Only where there are very many blocks
is there one more launch, which adds up groups of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels import rice
from gradwire.kernels.cuda.launch import form, launch
from gradwire.kernels.cuda.tables import placed
from gradwire.kernels.rice import most_bytes, num_blocks, width_of

BLOCK = tl.constexpr(rice.BLOCK)
CAP = tl.constexpr(rice.CAP)
_MOST_BITS = tl.constexpr(31)
_MOST_EXCESS = tl.constexpr(1023)
_CAPPED = tl.constexpr(32)  # in a header
_NEVER = tl.constexpr(1 << 62)
WIDE = tl.constexpr(1024)  # blocks whose sizes are added up together
GROUP = tl.constexpr(256)  # blocks of a group,
_MANY = 4096  # if there are more than so many
BITS = tl.constexpr(2048)  # hold a block's quotients, wherever in a byte they start


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
    excess = tl.sum(tl.minimum(quotients, CAP), 0)
    cost = excess + size * bits + 8 * WIDTH * tl.sum((quotients >= CAP).to(tl.int64), 0)
    return tl.where(excess <= _MOST_EXCESS, cost, _NEVER)


@triton.jit
def _near(center, step: tl.constexpr):
    return tl.minimum(tl.maximum(center + step, 0), _MOST_BITS)


@triton.jit
def _choose(indices, out, sizes, count, blocks, WIDTH: tl.constexpr):
    """Find a block's parameter, and write its header and sizes: bits of quotients and of remainders, and escapes."""
    block = tl.program_id(0)
    first = block.to(tl.int64) * BLOCK
    gaps = _gaps(indices, first, count, BLOCK)
    size = tl.minimum(count - first, BLOCK)
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
    escaped = (quotients >= CAP) & (capped > 0)
    excess = tl.sum(tl.where(escaped, CAP, quotients), 0)
    header = bits | capped * _CAPPED | excess << 6
    tl.store(out + 2 * block, header.to(tl.uint8))
    tl.store(out + 2 * block + 1, (header >> 8).to(tl.uint8))
    tl.store(sizes + block, (size + excess).to(tl.int32))
    tl.store(sizes + blocks + block, (size * bits).to(tl.int32))
    tl.store(sizes + 2 * blocks + block, tl.sum(escaped.to(tl.int32), 0))


@triton.jit
def header_at(data, block, live):
    """A header from two bytes, which may lie anywhere."""
    low = tl.load(data + 2 * block, mask=live, other=0).to(tl.int32)
    return low | tl.load(data + 2 * block + 1, mask=live, other=0).to(tl.int32) << 8


@triton.jit
def split(header):
    """The parameter, whether the block is capped, and the sum of its quotients."""
    return (header & 31).to(tl.int64), header & _CAPPED, header >> 6


@triton.jit
def sum_to(sizes, block, blocks):
    """The sum of sizes before ``block``, and that of all."""
    before = tl.zeros([WIDE], tl.int64)
    whole = tl.zeros([WIDE], tl.int64)
    for i in range(0, blocks, WIDE):
        at = i + tl.arange(0, WIDE)
        size = tl.load(sizes + at, mask=at < blocks, other=0).to(tl.int64)
        before += tl.where(at < block, size, 0)
        whole += size
    return tl.sum(before, 0), tl.sum(whole, 0)


@triton.jit
def sum_groups(sizes, sums, blocks, groups):
    """Add up the sizes of a group, of one of several kinds."""
    kind, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    at = group * GROUP + tl.arange(0, GROUP)
    size = tl.load(sizes + kind * blocks + at, mask=at < blocks, other=0)
    tl.store(sums + kind * groups + group, tl.sum(size, 0))


@triton.jit
def sums_to(sizes, sums, kind, block, blocks, groups):
    """`sum_to`, of one of several kinds of sizes; by groups, if there are any."""
    sizes += kind * blocks
    if groups > 0:
        before, whole = sum_to(sums + kind * groups, block // GROUP, groups)
        at = block // GROUP * GROUP + tl.arange(0, GROUP)
        before += tl.sum(tl.load(sizes + at, mask=at < block, other=0), 0)
    else:
        before, whole = sum_to(sizes, block, blocks)
    return before, whole


@triton.jit
def _sent(gaps, header):
    """The quotients as they are sent, and which of them are escapes."""
    bits, capped, _ = split(header)
    quotients = gaps >> bits
    escaped = (capped > 0) & (quotients >= CAP)
    return tl.where(escaped, CAP, quotients).to(tl.int32), escaped, quotients


@triton.jit
def _write_quotients(out, start, length, sent, size, after, more, flags):
    """Write the bytes that begin in a block; the last one also holds what the next block begins with.

    ``flags`` is scratch: a byte for each bit.
    """
    shift = (start & 7).to(tl.int32)
    tl.store(flags + tl.arange(0, BITS), tl.zeros([BITS], tl.uint8))
    tl.debug_barrier()
    one = tl.full([BLOCK], 1, tl.uint8)
    tl.store(flags + shift + tl.cumsum(sent + 1, 0) - 1, one, mask=tl.arange(0, BLOCK) < size)
    beyond = shift + length + tl.cumsum(after + 1, 0) - 1
    tl.store(flags + beyond, tl.full([8], 1, tl.uint8), mask=(tl.arange(0, 8) < more) & (beyond < BITS))
    tl.debug_barrier()
    byte, bit = tl.arange(0, BITS // 8), tl.arange(0, 8)[None, :]
    value = tl.sum(tl.load(flags + byte[:, None] * 8 + bit).to(tl.int32) << bit, 1)
    mine = (byte * 8 >= shift) & (byte * 8 < shift + length)
    tl.store(out + (start >> 3) + byte, value.to(tl.uint8), mine)


@triton.jit
def _write_remainders(out, indices, first, size, bits):
    """Write a block's remainders, a word from all codes that reach into it at a time."""
    word = tl.arange(0, BLOCK)
    bits, total = bits.to(tl.int32), (size * bits).to(tl.int32)
    live = word * 32 < total
    divisor = tl.maximum(bits, 1)
    j = word * 32 // divisor
    value = tl.zeros([BLOCK], tl.int64)
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
    for i in range(0, share, WIDE):
        at = i + tl.arange(0, WIDE)
        to = start + block * share + at
        tl.store(out + to, tl.zeros([WIDE], tl.uint8), mask=(at < share) & (to < stop))


@triton.jit
def _write(indices, out, sizes, sums, flags, used, groups, room, count, blocks, WIDTH: tl.constexpr):
    """Write a block's codes, and zeros wherever no code is."""
    block = tl.program_id(0)
    first = block.to(tl.int64) * BLOCK
    size = tl.minimum(count - first, BLOCK)
    start, all_quotients = sums_to(sizes, sums, 0, block, blocks, groups)
    remainders, all_remainders = sums_to(sizes, sums, 1, block, blocks, groups)
    escape, all_escapes = sums_to(sizes, sums, 2, block, blocks, groups)
    middle = 2 * blocks + (all_quotients + 7) // 8
    stop = middle + (all_remainders + 7) // 8
    end = stop + WIDTH * all_escapes
    if block == 0:
        tl.store(used, end)
    _clear(out, end, room, block, blocks)
    header = header_at(out, block, True)
    gaps = _gaps(indices, first, count, BLOCK)
    sent, escaped, quotients = _sent(gaps, header)
    after, _, _ = _sent(_gaps(indices, first + BLOCK, count, 8), header_at(out, block + 1, block + 1 < blocks))
    length = tl.load(sizes + block)
    _write_quotients(out + 2 * blocks, start, length, sent, size, after, count - first - BLOCK, flags + block * BITS)
    bits, capped, _ = split(header)
    _write_remainders(out + middle + remainders // 8, indices, first, size, bits)
    if capped > 0:
        rank = escape + tl.cumsum(escaped.to(tl.int32), 0) - 1
        for byte in tl.static_range(WIDTH):
            value = (quotients - CAP >> 8 * byte).to(tl.uint8)
            tl.store(out + stop + rank * WIDTH + byte, value, mask=escaped != 0)


@placed
def rice_encode(indices: Tensor, n: int) -> tuple[Tensor, Tensor]:
    return _encode(indices, most_bytes(indices.numel(), n - indices.numel()), width_of(n))


@placed
def encode_blocks(gaps: Tensor, width: int) -> Tensor:
    data, used = _encode((gaps + 1).cumsum(0) - 1, most_bytes(gaps.numel(), 256**width), width)
    return data[: int(used)]


def num_groups(blocks: int) -> int:
    """How many groups of blocks are added up first; 0: none."""
    return -(-blocks // GROUP.value) if blocks > _MANY else 0


def _encode(indices: Tensor, room: int, width: int) -> tuple[Tensor, Tensor]:
    """Positions as codes, in so much room, and how many bytes those take. An escape takes ``width``."""
    count, device = indices.numel(), indices.device
    data = torch.empty(room, dtype=torch.uint8, device=device)
    if count == 0:
        return data.zero_(), torch.zeros((), dtype=torch.int64, device=device)
    blocks = num_blocks(count)
    groups = num_groups(blocks)
    sizes, sums = torch.empty(3 * (blocks + groups), dtype=torch.int32, device=device).split((3 * blocks, 3 * groups))
    flags = torch.empty(blocks * BITS.value, dtype=torch.uint8, device=device)
    used = torch.empty((), dtype=torch.int64, device=device)
    indices = indices.contiguous()
    facts, codes = (room, count, width, groups, *form(indices)), (count, blocks, width)
    launch(_choose, blocks, facts, (indices, data, sizes), codes, num_warps=2)
    if groups:
        launch(sum_groups, 3 * groups, facts, (sizes, sums), (blocks, groups), num_warps=1)
    fresh = (indices, data, sizes, sums, flags, used)
    launch(_write, blocks, facts, fresh, (groups, room, *codes), num_warps=4)
    return data, used
