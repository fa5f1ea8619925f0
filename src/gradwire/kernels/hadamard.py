"""Walsh-Hadamard rotations, block by block, in plain torch."""

import math

import torch
from torch import Tensor

from gradwire.core.keys import Key
from gradwire.core.segments import Segments
from gradwire.kernels.groups import spread
from gradwire.kernels.philox import words


def rotate(x: Tensor, lengths: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    """Rotate every segment in blocks of its own size, of which its length is a multiple."""
    pieces = list(x.split(lengths))
    for size in sorted(set(sizes)):  # segments of one block size are rotated together
        members = [i for i, b in enumerate(sizes) if b == size]
        rotated = walsh(torch.cat([pieces[i] for i in members]).view(-1, size)).flatten()
        parts = rotated.split([lengths[i] for i in members])
        for i, part in zip(members, parts, strict=True):
            pieces[i] = part
    return torch.cat(pieces) if pieces else x


def walsh(rows: Tensor) -> Tensor:
    """Each row times the orthonormal Walsh-Hadamard matrix. [r, b] -> [r, b], b a power of two."""
    r, b = rows.shape
    x = rows / math.sqrt(b)  # before the sums, which could overflow
    half = 1
    while half < b:
        pairs = x.view(r, b // (2 * half), 2, half)
        left, right = pairs.unbind(2)
        x = torch.stack((left + right, left - right), 2)
        half *= 2
    return x.view(r, b)


def widened_places(segments: Segments, wide: Segments, device: torch.device) -> Tensor:
    """Where each value of the buffer lies in the padded one."""
    shift = (wide.offsets_on(device) - segments.offsets_on(device))[:-1]
    return torch.arange(segments.total, device=device) + spread(shift, segments.lengths_on(device), segments.total)


def random_signs(table: Segments, key: Key, device: torch.device) -> Tensor:
    """One float32 of +-1 for each value; each random word gives 32 of them."""
    bit = torch.arange(32, device=device)
    drawn = [
        (words(key, name, (n + 31) // 32, device)[:, None] >> bit & 1).flatten()[:n]
        for name, n in zip(table.names, table.lengths, strict=True)
    ]
    return 1.0 - 2.0 * torch.cat(drawn) if drawn else torch.zeros(0, device=device)
