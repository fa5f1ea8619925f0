"""Rice codes back to positions: several messages at once, and all their blocks in parallel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.core.payload import CorruptMessageError
from gradwire.kernels.cuda.launch import form, launch
from gradwire.kernels.cuda.rice_writer import (
    BITS,
    BLOCK,
    CAP,
    GROUP,
    WIDE,
    header_at,
    num_groups,
    split,
    sum_groups,
    sum_to,
    sums_to,
)
from gradwire.kernels.cuda.tables import placed
from gradwire.kernels.rice import LIMIT, Found, gaps_of, num_blocks, width_of


@triton.jit
def _sizes(data, at, live, count):
    """The bits of quotients and of remainders that these blocks have; none beyond the last."""
    bits, _, excess = split(header_at(data, at, live))
    size = tl.minimum(tl.maximum(count - at.to(tl.int64) * BLOCK, 0), BLOCK)
    return tl.where(live, size + excess, 0), tl.where(live, size * bits, 0)


@triton.jit
def _sum_headers(data, sums, stride, count, blocks, groups, messages):
    """Add up the sizes of a group of blocks."""
    message, group = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups
    at = group * GROUP + tl.arange(0, GROUP)
    quotients, remainders = _sizes(data + message * stride, at, at < blocks, count)
    tl.store(sums + tl.program_id(0), tl.sum(quotients, 0))
    tl.store(sums + messages * groups + tl.program_id(0), tl.sum(remainders, 0))


@triton.jit
def _layout(data, sums, message, block, count, blocks, groups, messages):
    """Where a block's quotients and remainders start, in bits of their parts, and how long those parts are."""
    begin, end = block * 0, blocks
    quotients = tl.zeros([], tl.int64)
    remainders, all_quotients, all_remainders = quotients, quotients, quotients
    if groups > 0:  # then those of the other groups are known
        begin = block // GROUP * GROUP
        end = tl.minimum(begin + GROUP, blocks)
        quotients, all_quotients = sum_to(sums + message * groups, block // GROUP, groups)
        remainders, all_remainders = sum_to(sums + (messages + message) * groups, block // GROUP, groups)
    for i in range(begin, end, WIDE):
        at = i + tl.arange(0, WIDE)
        some, others = _sizes(data, at, at < end, count)
        quotients += tl.sum(tl.where(at < block, some, 0), 0)
        remainders += tl.sum(tl.where(at < block, others, 0), 0)
        if groups == 0:
            all_quotients += tl.sum(some, 0)
            all_remainders += tl.sum(others, 0)
    return quotients, remainders, all_quotients, all_remainders


@triton.jit
def _read_remainders(data, bits, size, limit):
    """The remainders of a block that starts at ``data``; ``limit`` bytes are there."""
    start = tl.arange(0, BLOCK) * bits
    byte = start >> 3
    live = tl.arange(0, BLOCK) < size
    wide = tl.zeros([BLOCK], tl.int64)
    for i in tl.static_range(5):  # 31 bits reach into five bytes at most
        some = live & (byte + i < limit)
        wide |= tl.load(data + byte + i, mask=some, other=0).to(tl.int64) << 8 * i
    return wide >> (start & 7) & (1 << bits) - 1


@triton.jit
def _read(data, gaps, zeros, notes, meta, sums, stride, limit, count, blocks, messages, groups):
    """Decode a block but for its escapes, which are counted."""
    escapes, faults = notes, notes + messages * blocks
    message, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    data += message * stride
    start, remainders, all_quotients, all_remainders = _layout(
        data, sums, message, block, count, blocks, groups, messages
    )  # fmt: skip
    middle = 2 * blocks + (all_quotients + 7) // 8
    stop = middle + (all_remainders + 7) // 8
    bits, capped, excess = split(header_at(data, block, True))
    size = tl.minimum(count - block.to(tl.int64) * BLOCK, BLOCK)
    lane = tl.arange(0, BITS)
    at = 2 * blocks + (start + lane >> 3)
    one = tl.load(data + at, mask=(lane < size + excess) & (at < limit), other=0).to(tl.int32)
    one = one >> (start + lane & 7).to(tl.int32) & 1
    rank = tl.cumsum(one, 0) - 1
    mine = message * count + block.to(tl.int64) * BLOCK
    tl.store(zeros + mine + rank, lane - rank, mask=(one > 0) & (rank < size))
    tl.debug_barrier()
    j = tl.arange(0, BLOCK)
    passed = tl.load(zeros + mine + j, mask=j < size, other=0)
    quotients = passed - tl.load(zeros + mine + j - 1, mask=(j > 0) & (j < size), other=0)
    last = tl.load(zeros + mine + size - 1)
    fault = (tl.sum(one, 0) != size) | (last != excess) | (stop > limit)
    rest = _read_remainders(data + middle + remainders // 8, bits, size, limit - middle - remainders // 8)
    tl.store(gaps + mine + j, (quotients.to(tl.int64) << bits) + rest, mask=j < size)
    number = tl.sum(((quotients == CAP) & (j < size)).to(tl.int32), 0)
    tl.store(escapes + tl.program_id(0), tl.where(capped > 0, number, 0))
    tl.store(faults + tl.program_id(0), fault.to(tl.int32))
    if block == 0:
        tl.store(meta + message, stop)


@triton.jit
def _patch(data, gaps, notes, meta, group_sums, stride, limit, count, blocks, messages, groups, WIDTH: tl.constexpr):
    """Add a block's escapes, and its gaps up."""
    escapes, faults = notes, notes + messages * blocks
    used, sums = meta + messages, meta + 2 * messages
    message, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    data += message * stride
    bits, capped, _ = split(header_at(data, block, True))
    size = tl.minimum(count - block.to(tl.int64) * BLOCK, BLOCK)
    j = tl.arange(0, BLOCK)
    mine = message * count + block.to(tl.int64) * BLOCK
    gap = tl.load(gaps + mine + j, mask=j < size, other=0)
    stop = tl.load(meta + message)
    before, whole = sums_to(escapes, group_sums, message, block, blocks, groups)
    if block == 0:
        tl.store(used + message, stop + WIDTH * whole)
    if capped > 0:
        escaped = (gap >> bits == CAP) & (j < size)
        at = stop + (before + tl.cumsum(escaped.to(tl.int32), 0) - 1) * WIDTH
        value = tl.zeros([BLOCK], tl.int64)
        for i in tl.static_range(WIDTH):
            some = escaped & (at + i >= 0) & (at + i < limit)
            value |= tl.load(data + at + i, mask=some, other=0).to(tl.int64) << 8 * i
        gap += value << bits
        tl.store(gaps + mine + j, gap, mask=escaped)
    if stop + WIDTH * whole > limit:
        tl.store(faults + tl.program_id(0), 1)
    tl.store(sums + tl.program_id(0), tl.sum(tl.where(j < size, gap + 1, 0), 0))


@triton.jit
def _place(gaps, notes, meta, group_sums, count, blocks, messages, groups, n):
    """Turn a block's gaps into positions."""
    faults, sums = notes + messages * blocks, meta + 2 * messages
    message, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    before, _ = sums_to(sums, group_sums, message, block, blocks, groups)
    size = tl.minimum(count - block.to(tl.int64) * BLOCK, BLOCK)
    j = tl.arange(0, BLOCK)
    mine = gaps + message * count + block.to(tl.int64) * BLOCK + j
    at = before + tl.cumsum(tl.where(j < size, tl.load(mine, mask=j < size, other=0) + 1, 0), 0) - 1
    wrong = (j < size) & ((at < 0) | (at >= n))
    if tl.sum(wrong.to(tl.int32), 0) > 0:
        tl.store(faults + tl.program_id(0), 1)
    # A corrupt message may say anything, but nothing may be written outside the buffer for it.
    tl.store(mine, tl.minimum(tl.maximum(at, 0), n - 1), mask=j < size)


@placed
def rice_decode(data: Tensor, count: int, n: int) -> Found:
    return _decode(data, count, n, width_of(n))


@placed
def decode_blocks(data: Tensor, count: int, width: int) -> tuple[Tensor, int]:
    found = _decode(data[None], count, LIMIT, width)
    used, faulty = torch.stack((found.used[0], found.faults.any().long())).tolist()
    if faulty or used > data.numel():
        raise CorruptMessageError(f"{count} positions need more than {data.numel()} bytes, or other quotients")
    return gaps_of(found.indices[0]), used


def _decode(data: Tensor, count: int, n: int, width: int) -> Found:
    """As `rice_decode`; an escape takes ``width``."""
    messages, limit = data.shape
    device = data.device
    found = torch.empty(messages, count, dtype=torch.int64, device=device)
    if count == 0 or limit < 2 * num_blocks(count):
        none = torch.zeros(messages, 1, dtype=torch.int64, device=device)
        return Found(found.zero_(), none[:, 0], none + int(count > 0))
    blocks = num_blocks(count)
    zeros = torch.empty(messages * count, dtype=torch.int32, device=device)
    # Of each block: its escapes, then whether it is faulty. Of each message: where escapes start, and how many bytes
    # are used; then the sum of each block.
    notes = torch.empty(2, messages, blocks, dtype=torch.int32, device=device)
    meta = torch.empty(messages * (2 + blocks), dtype=torch.int64, device=device)
    groups = num_groups(blocks)
    # By group: the bits of quotients and of remainders, escapes, and gaps.
    sums = torch.empty(4, messages * groups, dtype=torch.int64, device=device)
    programs, stride = messages * blocks, data.stride(0)
    facts = (count, n, messages, limit, stride, groups, *form(data))
    about = (stride, limit, count, blocks, messages, groups)
    if groups:
        launch(_sum_headers, sums.shape[1], facts, (data, sums), (stride, count, blocks, groups, messages), num_warps=2)
    launch(_read, programs, facts, (data, found, zeros, notes, meta, sums), about, num_warps=4)
    if groups:
        launch(sum_groups, sums.shape[1], (facts, "escapes"), (notes, sums[2]), (blocks, groups), num_warps=1)
    launch(_patch, programs, facts, (data, found, notes, meta, sums[2]), (*about, width), num_warps=4)
    if groups:
        launch(
            sum_groups, sums.shape[1], (facts, "gaps"), (meta[2 * messages :], sums[3]), (blocks, groups), num_warps=1
        )
    launch(_place, programs, facts, (found, notes, meta, sums[3]), (count, blocks, messages, groups, n), num_warps=4)
    return Found(found, meta[messages : 2 * messages], notes[1])
