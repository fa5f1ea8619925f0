"""Plain: compression as a person would write it with torch's own calls and its random numbers.

These are what kernels are compared with, beside their definitions: a definition must say the same bits on every device,
and takes its time for that. Here nothing must.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

_SAMPLED = 0.01  # of the entries, by which the threshold of a selection is guessed


def dgc_(grad: Tensor, momentum: Tensor, residual: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Accumulate with momentum 0.9, keep about the ``k`` largest by a sampled threshold, and mask them."""
    momentum.mul_(0.9).add_(grad)
    residual.add_(momentum)
    size = residual.abs()
    found = (size >= _sampled_edge(size, k)).nonzero().flatten()
    if found.numel() > k:
        found = found[size[found].topk(k, sorted=False).indices]
    values = residual[found]
    residual[found] = 0.0
    momentum[found] = 0.0
    return found, values


def _sampled_edge(size: Tensor, k: int) -> Tensor:
    n = size.numel()
    some = max(1, int(_SAMPLED * n))
    sample = size[torch.randint(n, (some,), device=size.device)]
    return sample.topk(max(1, k * some // n), sorted=False).values.min()


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest magnitudes, in any order."""
    found = x.abs().topk(k, sorted=False).indices
    return found, x[found]


def sign(x: Tensor) -> tuple[Tensor, Tensor]:
    """The mean magnitude, and eight signs to a byte."""
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=x.device)
    bits = _rows(x, 8) >= 0
    return x.abs().mean(), (bits * weights).sum(1, dtype=torch.uint8)


def qsgd(x: Tensor, levels: int = 127, bucket: int = 512) -> tuple[Tensor, Tensor]:
    """Norms of buckets, and levels rounded by chance, a byte each."""
    rows = _rows(x, bucket)
    norms = rows.norm(dim=1, keepdim=True).clamp(min=1e-30)
    level = rows.abs() / norms * levels
    low = level.floor()
    rounded = low + (torch.rand_like(level) < level - low)
    return norms, (rounded * rows.sign()).to(torch.int8)


def int4(x: Tensor, block: int = 256) -> tuple[Tensor, Tensor]:
    """Scales of blocks, and two rounded values to a byte."""
    rows = _rows(x, block)
    scales = rows.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 7
    codes = (rows / scales).round().clamp(-7, 7).to(torch.int8).add(8).view(torch.uint8)
    return scales, codes[:, ::2] | codes[:, 1::2] << 4


def _rows(x: Tensor, width: int) -> Tensor:
    missing = -x.numel() % width
    return (F.pad(x, (0, missing)) if missing else x).view(-1, width)
