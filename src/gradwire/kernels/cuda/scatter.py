"""Several ranks' sparse messages into one dense mean, in rank order: no sum depends on which thread came first."""

from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels import fused
from gradwire.kernels.cuda.enter import readable
from gradwire.kernels.cuda.tables import definition, placed

_BLOCK = 1024


@triton.jit
def _add(values, indices, out, start, stop, BLOCK: tl.constexpr):
    j = start + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = j < stop
    at = tl.load(indices + j, mask=live, other=0)
    tl.store(out + at, tl.load(out + at, mask=live) + tl.load(values + j, mask=live), mask=live)


@triton.jit
def _divide(indices, out, quotients, k, world, BLOCK: tl.constexpr):
    j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(out + tl.load(indices + j, mask=j < k, other=0), mask=j < k, other=0.0)
    tl.store(quotients + j, tl.div_rn(x, tl.zeros_like(x) + world), mask=j < k)


@triton.jit
def _put(indices, out, quotients, k, BLOCK: tl.constexpr):
    j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(indices + j, mask=j < k, other=0)
    tl.store(out + at, tl.load(quotients + j, mask=j < k), mask=j < k)


@placed
def scatter_mean(values: Tensor, indices: Tensor, bounds: tuple[int, ...], n: int, world: int) -> Tensor:
    """As defined, for positions that differ within a rank's message. Only entries that were sent are divided."""
    if values.dtype != torch.float32 or not (readable(values) and indices.is_contiguous()):
        return definition(fused.scatter_mean)(values, indices, bounds, n, world)
    out = torch.zeros(n, device=values.device)
    for start, stop in pairwise(bounds):
        if start < stop:
            _add[(triton.cdiv(stop - start, _BLOCK),)](values, indices, out, start, stop, _BLOCK)
    first, last = bounds[0] if bounds else 0, bounds[-1] if bounds else 0
    if world != 1 and first < last:
        # Where ranks met, all of them read the sum before any writes the quotient.
        used = indices[first:last]
        quotients = torch.empty(last - first, device=values.device)
        programs = (triton.cdiv(last - first, _BLOCK),)
        _divide[programs](used, out, quotients, last - first, world, _BLOCK)
        _put[programs](used, out, quotients, last - first, _BLOCK)
    return out
