"""Random distinct numbers: each unit's Feistel network, walked by one thread per number.

Two launches, whatever the number of units: one writes the random words of all networks, about sqrt(n) a round, and one
walks. See `gradwire.kernels.select` for the permutation itself. Where positions are wanted in their order, the walk
marks them instead, and two launches more write them down: nothing is sorted.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.core.graph_refs import cached_on_device
from gradwire.core.keys import Key
from gradwire.kernels import select
from gradwire.kernels.cuda.codes import philox_words, seeds, step_words
from gradwire.kernels.cuda.tables import definition, placed
from gradwire.kernels.groups import before
from gradwire.kernels.philox import ragged
from gradwire.kernels.select import HEAD, ROUNDS, sides_of, words_of

_BLOCK = 1024
_WALK = 256  # numbers of one program, all of one unit: when one goes round again, all of them do
_TILE = 16384  # marks of one program
_FEW = 32  # of so many entries fewer than one: to sort them is quicker than to look at all marks
_HEAD = tl.constexpr(HEAD)
_ROUNDS = tl.constexpr(ROUNDS)


class Networks(NamedTuple):
    """The networks of all units; every tensor is int64 and on the device."""

    table: Tensor  # [units, 6]: n, a, b, where the words begin, where the unit and its numbers begin
    word_blocks: Tensor  # [units + 1], where a unit's blocks of four words begin
    walks: Tensor  # [programs, 2]: the unit, and the first of its numbers
    ends: Tensor  # [units], where its numbers end
    blocks: int
    total: int
    small: bool  # whether all numbers are of 31 bits


@cached_on_device(64)
def networks(lengths: tuple[int, ...], counts: tuple[int, ...], device: torch.device) -> Networks:
    """Lay out the words and the results of these units."""
    size, count = torch.tensor(lengths, dtype=torch.int64), torch.tensor(counts, dtype=torch.int64)
    sides = torch.tensor([sides_of(n) for n in lengths], dtype=torch.int64).view(-1, 2)
    blocks = torch.tensor([0, *((words_of(a) + 3) // 4 for a in sides[:, 0].tolist())]).cumsum(0)
    ends = count.cumsum(0)
    columns = (size, *sides.unbind(1), 4 * blocks[:-1], before(size), ends - count)
    programs = (count + _WALK - 1) // _WALK
    unit = torch.arange(len(lengths)).repeat_interleave(programs)
    walks = torch.stack((unit, ragged(programs) * _WALK), 1)
    small = bool((sides.prod(1) < 2**31).all())
    table, word_blocks, walks, ends = (x.to(device) for x in (torch.stack(columns, 1), blocks, walks, ends))
    return Networks(table, word_blocks, walks, ends, int(blocks[-1]), int(count.sum()), small)


@triton.jit
def _owner(starts, units, i):
    """The unit whose stretch holds i: the last that starts no later, and is not empty."""
    low = tl.zeros_like(i).to(tl.int32)
    high = low + units
    width = units
    while width > 0:  # halving, as often as the number of units has bits
        middle = (low + high) // 2
        later = tl.load(starts + tl.minimum(middle + 1, units)) <= i
        searching = low < high
        low = tl.where(searching & later, middle + 1, low)
        high = tl.where(searching & (later == 0), middle, high)
        width = width // 2
    return tl.minimum(low, units - 1)


@triton.jit(do_not_specialize=["low", "high"])
def _write_words(out, starts, seeds, units, blocks, low, high, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = i < blocks
    unit = _owner(starts, units, tl.minimum(i, blocks - 1))
    a, b, c, d = philox_words(i - tl.load(starts + unit), tl.load(seeds + unit), low, high)
    to = out + 4 * i
    tl.store(to, a.to(tl.int32, bitcast=True), mask=live)
    tl.store(to + 1, b.to(tl.int32, bitcast=True), mask=live)
    tl.store(to + 2, c.to(tl.int32, bitcast=True), mask=live)
    tl.store(to + 3, d.to(tl.int32, bitcast=True), mask=live)


@triton.jit
def _moved(x, word, side):
    """(x + word * side / 2^32) mod side: both terms are below it, so that one subtraction is the remainder."""
    x += tl.umulhi(word.to(tl.uint32, bitcast=True), tl.zeros_like(word).to(tl.uint32) + side.to(tl.uint32)).to(x.dtype)
    return x - tl.where(x >= side, side, 0)


@triton.jit
def _feistel(x, a, b, words):
    left = x // b
    right = x - left * b
    table = words + _HEAD
    for turn in tl.static_range(_ROUNDS):
        if turn % 2 == 0:
            left = _moved(left, tl.load(table + right), a)
        else:
            right = _moved(right, tl.load(table + left), b)
        table += a
    return left * b + right


@triton.jit
def _rotation(words, n):
    high, low = tl.load(words).to(tl.int64) & 0xFFFFFFFF, tl.load(words + 1).to(tl.int64) & 0xFFFFFFFF
    return ((high << 31) ^ low) % n


@triton.jit
def _walk(words, table, walks, ends, out, SMALL: tl.constexpr, MARK: tl.constexpr, WALK: tl.constexpr):
    """Write numbers down in their order, or, MARK, mark where they point to."""
    walk = walks + 2 * tl.program_id(0)
    unit = tl.load(walk)
    row = table + unit * 6
    n, a, b, own = tl.load(row), tl.load(row + 1), tl.load(row + 2), words + tl.load(row + 3)
    to = tl.load(row + 5) + tl.load(walk + 1)
    live = tl.arange(0, WALK) < tl.load(ends + unit) - to
    turned = _rotation(own, n)
    x = tl.load(walk + 1) + tl.where(live, tl.arange(0, WALK), 0)
    if SMALL:
        n, a, b, turned = n.to(tl.int32), a.to(tl.int32), b.to(tl.int32), turned.to(tl.int32)
        x = x.to(tl.int32)
    y = _feistel(x, a, b, own)
    while tl.max((y >= n).to(tl.int32), 0) > 0:
        y = tl.where(y >= n, _feistel(y, a, b, own), y)
    y = y.to(tl.int64) + turned
    y -= tl.where(y >= n, n, 0)
    if MARK:
        tl.store(out + tl.load(row + 4) + y, tl.full([WALK], 1, tl.uint8), mask=live)
    else:
        tl.store(out + to + tl.arange(0, WALK), y, mask=live)


@triton.jit
def _count(marks, numbers, TILE: tl.constexpr):
    tile = tl.program_id(0)
    mark = tl.load(marks + tile.to(tl.int64) * TILE + tl.arange(0, TILE))
    tl.store(numbers + tile, tl.sum(mark.to(tl.int32), 0))


@triton.jit
def _list(marks, numbers, sums, out, TILE: tl.constexpr, STEP: tl.constexpr):
    """Write down where marks are; ``sums`` has how many there are up to the end of each tile."""
    tile = tl.program_id(0)
    to = tl.load(sums + tile) - tl.load(numbers + tile)
    for i in range(0, TILE, STEP):
        at = tile.to(tl.int64) * TILE + i + tl.arange(0, STEP)
        mark = tl.load(marks + at).to(tl.int32)
        tl.store(out + to + tl.cumsum(mark, 0) - 1, at, mask=mark > 0)
        to += tl.sum(mark, 0)


@placed
def permute(
    sizes: Tensor, names: tuple[str, ...], key: Key, lengths: tuple[int, ...], counts: tuple[int, ...]
) -> Tensor:
    net = networks(lengths, counts, sizes.device)
    out = torch.empty(net.total, dtype=torch.int64, device=sizes.device)
    if net.total:
        _launch(net, names, key, out, False)
    return out


@placed
def scattered(
    sizes: Tensor, names: tuple[str, ...], key: Key, lengths: tuple[int, ...], counts: tuple[int, ...]
) -> Tensor:
    net, n = networks(lengths, counts, sizes.device), sum(lengths)
    if net.total * _FEW < n or not net.total:
        return definition(select.scattered)(sizes, names, key, lengths, counts)
    tiles = triton.cdiv(n, _TILE)
    marks = torch.zeros(tiles * _TILE, dtype=torch.uint8, device=sizes.device)  # whole tiles: loads need no mask
    _launch(net, names, key, marks, True)
    numbers = torch.empty(tiles, dtype=torch.int32, device=sizes.device)
    _count[(tiles,)](marks, numbers, _TILE, num_warps=4)
    out = torch.empty(net.total, dtype=torch.int64, device=sizes.device)
    _list[(tiles,)](marks, numbers, numbers.cumsum(0), out, _TILE, 2048, num_warps=4)
    return out


def _launch(net: Networks, names: tuple[str, ...], key: Key, out: Tensor, mark: bool) -> None:
    words = torch.empty(4 * net.blocks, dtype=torch.int32, device=out.device)
    _write_words[(triton.cdiv(net.blocks, _BLOCK),)](
        words, net.word_blocks, seeds(key, names, out.device), len(names), net.blocks, *step_words(key), _BLOCK
    )
    _walk[(len(net.walks),)](words, net.table, net.walks, net.ends, out, net.small, mark, _WALK, num_warps=1)
