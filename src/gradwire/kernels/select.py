"""Choosing positions: exact top-k with stated ties, cutting to a budget, random draws.

A draw evaluates a random permutation of [0, n) at 0, 1, ..., k-1 and never writes the permutation
down. It is a Feistel network over pairs (left, right) in [0, a) x [0, b), where a = ceil(sqrt(n))
and b = ceil(n / a): a number is left * b + right, and results beyond n are sent through again until
they fall below it. Round functions are tables of about sqrt(n) Philox words each, so the work is
O(k + sqrt(n)).

Paper: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.core.keys import Key
from gradwire.core.segments import Segments, on
from gradwire.kernels.dispatch import kernel
from gradwire.kernels.groups import before
from gradwire.kernels.philox import ragged, words_of_all

ROUNDS = 8
HEAD = 2  # words before a unit's tables; they make the rotation


def share(ratio: float, n: int) -> int:
    """How many of ``n`` entries a ratio keeps: the nearest count, but at least one if any."""
    return min(n, max(1, round(ratio * n)))


def top(size: Tensor, k: int, pick: Callable[[int, int], Tensor] | None = None) -> Tensor:
    """Rising positions of the ``k`` largest.

    Args:
        size: Magnitudes, flat.
        k: How many to keep.
        pick: Which of ``m`` ties at the k-th place win the ``j`` places left; None: the first.
    """
    if k >= size.numel():
        return torch.arange(size.numel(), device=size.device)
    edge = size.topk(k, sorted=False).values.min() if k else math.inf
    above = (size > edge).nonzero().flatten()
    tied = (size == edge).nonzero().flatten()
    left = k - above.numel()
    won = tied[:left] if pick is None else tied[pick(tied.numel(), left)]
    return torch.cat((above, won)).sort().values


def each(size: Tensor, segments: Segments, choose: Callable[[Tensor, str], Tensor]) -> Tensor:
    """Rising flat positions, given those that ``choose`` takes from each segment and its name."""
    spans = zip(segments.names, segments.offsets[:-1], segments.offsets[1:], strict=True)
    chosen = [choose(size[a:b], name) + a for name, a, b in spans]
    return torch.cat(chosen) if chosen else torch.zeros(0, dtype=torch.int64, device=size.device)


def fair_ties(key: Key, unit: str, device: torch.device) -> Callable[[int, int], Tensor]:
    """Ties drawn at random for `top`, so that no place in memory is favored."""
    stream = key.fold("ties")
    return lambda m, j: draw(stream, (unit,), (m,), (j,), device)


def trim(passed: Tensor, size: Tensor, segments: Segments, most: tuple[int, ...], key: Key) -> Tensor:
    """Rising positions of what passed; of a segment with more than ``most``, its largest."""
    at = passed.nonzero().flatten()
    if most == segments.lengths:
        return at
    ends = torch.searchsorted(at, segments.offsets_on(at.device)).tolist()
    kept = []
    for i, name in enumerate(segments.names):
        piece = at[ends[i] : ends[i + 1]]
        if piece.numel() > most[i]:
            piece = piece[top(size[piece], most[i], fair_ties(key, name, at.device))]
        kept.append(piece)
    return torch.cat(kept) if kept else at


class _Network(NamedTuple):
    """One Feistel network per unit, or, spread, one per element; all int64.

    Attributes:
        n: The size of the set that is permuted.
        a: The size of the left half; also the length of each round's table.
        b: The size of the right half, at most ``a``.
        start: Where in the words the unit's stretch begins.
    """

    n: Tensor
    a: Tensor
    b: Tensor
    start: Tensor

    def at(self, where: Tensor) -> "_Network":
        return _Network(*(part[where] for part in self))


def draw(
    key: Key, names: tuple[str, ...], lengths: tuple[int, ...], counts: tuple[int, ...], device: torch.device
) -> Tensor:
    """``counts[i]`` distinct numbers below ``lengths[i]`` from ``names[i]``'s stream, for all i.

    Each number is exactly uniform. The order is random, and drawing more only appends.
    """
    assert all(k <= n for k, n in zip(counts, lengths, strict=True))
    return permute(on(lengths, device), names, key, lengths, counts)


def draw_places(key: Key, table: Segments, counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Rising positions of as many entries of each segment, drawn as `draw` does."""
    assert all(k <= n for k, n in zip(counts, table.lengths, strict=True))
    return scattered(on(table.lengths, device), table.names, key, table.lengths, counts)


@kernel
def permute(
    sizes: Tensor, names: tuple[str, ...], key: Key, lengths: tuple[int, ...], counts: tuple[int, ...]
) -> Tensor:
    """The first ``counts[i]`` numbers of ``names[i]``'s permutation. ``sizes`` is ``lengths`` on the device."""
    device = sizes.device
    sides = [sides_of(n) for n in lengths]
    needed = torch.tensor([words_of(a) for a, _ in sides], dtype=torch.int64, device=device)
    words, start = words_of_all(key, names, needed)
    a, b = torch.tensor(sides, dtype=torch.int64, device=device).view(-1, 2).unbind(1)
    taken = torch.tensor(counts, dtype=torch.int64, device=device)
    unit = torch.arange(len(names), device=device).repeat_interleave(taken)
    net = _Network(sizes, a, b, start).at(unit)
    return (_walk(ragged(taken), net, words) + _rotation(words, net)) % net.n


@kernel
def scattered(
    sizes: Tensor, names: tuple[str, ...], key: Key, lengths: tuple[int, ...], counts: tuple[int, ...]
) -> Tensor:
    """The numbers of `permute` as rising positions in a buffer in which the units lie end to end."""
    device = sizes.device
    starts = before(sizes).repeat_interleave(on(counts, device), output_size=sum(counts))
    return (permute(sizes, names, key, lengths, counts) + starts).sort().values


def sides_of(n: int) -> tuple[int, int]:
    """A = ceil(sqrt(n)), b = ceil(n / a)."""
    a = math.isqrt(max(n, 1) - 1) + 1
    return a, -(-max(n, 1) // a)


def words_of(a: int) -> int:
    """How many random words the network of a unit takes whose left half has ``a`` members."""
    return HEAD + ROUNDS * a


def _rotation(words: Tensor, net: _Network) -> Tensor:
    # Walking leaves numbers only nearly uniform where n is tiny; one uniform shift repairs that.
    return ((words[net.start] << 31) ^ words[net.start + 1]) % net.n


def _walk(x: Tensor, net: _Network, words: Tensor) -> Tensor:
    """Permute, and again, until below n. The cycle of x leads back to x < n, so this ends."""
    y = _feistel(x, net, words)
    while (out := (y >= net.n).nonzero().flatten()).numel():
        y[out] = _feistel(y[out], net.at(out), words)
    return y


def _feistel(x: Tensor, net: _Network, words: Tensor) -> Tensor:
    """A permutation of [0, a * b). Halves take turns in moving the other."""
    left, right = x // net.b, x % net.b
    table = net.start + HEAD
    for turn in range(ROUNDS):
        # A word in [0, 2**32) times a side, shifted down, is a number below that side.
        if turn % 2 == 0:
            left = (left + (words[table + right] * net.a >> 32)) % net.a
        else:
            right = (right + (words[table + left] * net.b >> 32)) % net.b
        table = table + net.a
    return left * net.b + right
