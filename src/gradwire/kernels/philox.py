"""Philox4x32-10: counter-based random bits, the same on every device.

Paper: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

A unit's stream is words 0, 1, 2, ... of Philox under the unit's 64-bit key. Element i reads word i mod 4 of the block
whose counter is (i div 4, step).
"""

import torch
from torch import Tensor

from gradwire.core.graph_refs import cached_on_device
from gradwire.core.keys import Key
from gradwire.kernels.groups import before

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> Tensor:
    """Four words [4, ...] of each counter. All arithmetic is on int64 tensors that hold 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # int64 products wrap, but their 64 bits are right; the mask undoes the arithmetic shift.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return torch.stack((c0, c1, c2, c3))


def step_like(key: Key, block: Tensor) -> tuple[Tensor, Tensor]:
    """The words of the step, one of each for every block; in captured steps they are read from the device."""
    if key.device_counter is not None:
        low, high = key.device_counter
        return low.expand_as(block), high.expand_as(block)
    low, high = key.counter()
    return torch.full_like(block, low), torch.full_like(block, high)


def words(key: Key, unit: str, n: int, device: torch.device) -> Tensor:
    """The first ``n`` words of a unit's stream, as int64 in [0, 2**32)."""
    block = torch.arange((n + 3) // 4, device=device)
    k0, k1 = key.words(unit)
    counter = (block & _MASK, block >> 32, *step_like(key, block))
    keys = (torch.full_like(block, k0), torch.full_like(block, k1))
    return philox(counter, keys).T.reshape(-1)[:n]


def uniform(key: Key, names: tuple[str, ...], lengths: Tensor) -> Tensor:
    """One float32 in [0, 1) per element of a buffer that holds ``lengths[i]`` elements of unit ``names[i]``."""
    drawn, first = words_of_all(key, names, lengths)
    # 24 bits: every value is a float32, and 1.0 is never reached.
    return (drawn[first.repeat_interleave(lengths) + ragged(lengths)] >> 8).float() * 2.0**-24


def words_of_all(key: Key, names: tuple[str, ...], counts: Tensor) -> tuple[Tensor, Tensor]:
    """Every unit's first words, rounded up to whole Philox blocks, and where each unit's begin."""
    blocks = (counts + 3) // 4
    keys = _keys(tuple(map(key.words, names)), counts.device).repeat_interleave(blocks, dim=0)
    block = ragged(blocks)
    drawn = philox((block & _MASK, block >> 32, *step_like(key, block)), (keys[:, 0], keys[:, 1]))
    return drawn.T.reshape(-1), 4 * before(blocks)


def ragged(counts: Tensor) -> Tensor:
    """0, 1, ..., counts[0] - 1, 0, 1, ..., counts[1] - 1, and so on."""
    start = before(counts).repeat_interleave(counts)
    return torch.arange(start.numel(), device=counts.device) - start


@cached_on_device(64)
def _keys(words: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    # Cached, since a unit's key is the same at every step; it must not be written into.
    return torch.tensor(words, dtype=torch.int64, device=device).view(-1, 2)


def normal(key: Key, names: tuple[str, ...], n: int, device: torch.device) -> Tensor:
    """``n`` standard normal float32 for each name, by Box-Muller. -> [len(names), n]."""
    pairs = [words(key, name, 2 * n, device).view(n, 2) for name in names]
    u = ((torch.stack(pairs) >> 8).float() + 0.5) * 2.0**-24  # in (0, 1): the logarithm needs it
    return (-2.0 * u[..., 0].log()).sqrt() * (2.0 * torch.pi * u[..., 1]).cos()
