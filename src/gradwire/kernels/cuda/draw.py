"""Random distinct numbers: each unit's Feistel network, walked by one thread per number.

Two launches, whatever the number of units: one writes the random words of all networks, about sqrt(n) a round, and one
walks. See `gradwire.kernels.select` for the permutation itself.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.core.keys import Key
from gradwire.kernels.cuda.codes import philox_words, seeds, step_words
from gradwire.kernels.cuda.tables import placed
from gradwire.kernels.select import HEAD, ROUNDS, sides_of, words_of

_BLOCK = 1024
_HEAD = tl.constexpr(HEAD)
_ROUNDS = tl.constexpr(ROUNDS)


class Networks(NamedTuple):
    """The networks of all units; every tensor is int64 and on the device."""

    table: Tensor  # [units, 4]: n, a, b, and where the words begin
    word_blocks: Tensor  # [units + 1], where a unit's blocks of four words begin
    first: Tensor  # [units + 1], where its numbers begin
    blocks: int
    total: int


@lru_cache(maxsize=64)
def networks(lengths: tuple[int, ...], counts: tuple[int, ...], device: torch.device) -> Networks:
    """Lay out the words and the results of these units."""
    sides = [sides_of(n) for n in lengths]
    blocks = torch.tensor([0, *((words_of(a) + 3) // 4 for a, _ in sides)]).cumsum(0)
    rows = [(n, a, b, 4 * at) for n, (a, b), at in zip(lengths, sides, blocks.tolist(), strict=False)]
    first = torch.tensor([0, *counts]).cumsum(0)
    table = torch.tensor(rows, dtype=torch.int64).view(-1, 4)
    return Networks(table.to(device), blocks.to(device), first.to(device), int(blocks[-1]), sum(counts))


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
    tl.store(to, a.to(tl.int64), mask=live)
    tl.store(to + 1, b.to(tl.int64), mask=live)
    tl.store(to + 2, c.to(tl.int64), mask=live)
    tl.store(to + 3, d.to(tl.int64), mask=live)


@triton.jit
def _feistel(x, a, b, words):
    left, right = x // b, x % b
    table = words + _HEAD
    for turn in tl.static_range(_ROUNDS):
        if turn % 2 == 0:
            left = (left + (tl.load(table + right) * a >> 32)) % a
        else:
            right = (right + (tl.load(table + left) * b >> 32)) % b
        table += a
    return left * b + right


@triton.jit
def _walk(words, table, first, out, units, total, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = i < total
    i = tl.minimum(i, total - 1)
    unit = _owner(first, units, i)
    row = table + unit.to(tl.int64) * 4
    n, a, b = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    own = words + tl.load(row + 3)
    y = _feistel(i - tl.load(first + unit), a, b, own)
    while tl.max((y >= n).to(tl.int32), 0) > 0:
        y = tl.where(y >= n, _feistel(y, a, b, own), y)
    rotation = ((tl.load(own) << 31) ^ tl.load(own + 1)) % n
    tl.store(out + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), (y + rotation) % n, mask=live)


@placed
def permute(
    sizes: Tensor, names: tuple[str, ...], key: Key, lengths: tuple[int, ...], counts: tuple[int, ...]
) -> Tensor:
    net = networks(lengths, counts, sizes.device)
    out = torch.empty(net.total, dtype=torch.int64, device=sizes.device)
    if not net.total:
        return out
    words = torch.empty(4 * net.blocks, dtype=torch.int64, device=sizes.device)
    low, high = step_words(key)
    _write_words[(triton.cdiv(net.blocks, _BLOCK),)](
        words, net.word_blocks, seeds(key, names, sizes.device), len(names), net.blocks, low, high, _BLOCK
    )
    _walk[(triton.cdiv(net.total, _BLOCK),)](words, net.table, net.first, out, len(names), net.total, _BLOCK)
    return out
