"""How a gradient enters the memories: the arithmetic that several kernels begin with.

Products and sums are rounded one by one, as the definition's are: launch with ``enable_fp_fusion=False``.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels import fused
from gradwire.kernels.cuda.launch import form, launch
from gradwire.kernels.cuda.tables import BLOCK, WIDE, definition, placed
from gradwire.kernels.fused import Accumulation

READ = tl.constexpr(0)  # no gradient: the residual is the target already
PLAIN = tl.constexpr(1)
MOMENTUM = tl.constexpr(2)
NESTEROV = tl.constexpr(3)


@triton.jit
def fetch(pointer, at, live, MASKED: tl.constexpr):
    # A mask would keep the compiler from loading 16 bytes at a time, so only the last tile has one.
    x = tl.load(pointer + at, mask=live, other=0.0) if MASKED else tl.load(pointer + at)
    return x.to(tl.float32)


@triton.jit
def put(pointer, at, x, live, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointer + at, x, mask=live)
    else:
        tl.store(pointer + at, x)


@triton.jit
def entered(g, v, u, m, decay, RULE: tl.constexpr):
    """Of a gradient, a residual and a momentum: the target, the new momentum, and where the gradient is not finite."""
    finite = (tl.abs(g) < float("inf")) | (RULE == READ)
    g = tl.where(finite, g, 0.0)
    if RULE == PLAIN:
        v = g + decay * v
    elif RULE == NESTEROV:
        u = m * (u + g)
        v = v + u + g
    elif RULE == MOMENTUM:
        u = m * u + g
        v = v + u
    return v, u, ~finite


@triton.jit
def enter(
    grad, residual, momentum, new_residual, new_momentum, at, live, m, decay,
    RULE: tl.constexpr, KEEP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Write new memories at these places. Gives the target there, and where the gradient is not finite.

    Without KEEP, the caller stores the target.
    """
    v = fetch(residual, at, live, MASKED)
    g = v if RULE == READ else fetch(grad, at, live, MASKED)
    u = fetch(momentum, at, live, MASKED) if RULE >= MOMENTUM else v
    v, u, bad = entered(g, v, u, m, decay, RULE)
    if RULE != READ:
        if RULE != PLAIN:
            put(new_momentum, at, u, live, MASKED)
        if KEEP:
            put(new_residual, at, v, live, MASKED)
    return v, bad


@triton.jit
def report(bad, nonfinite):
    """Set ``nonfinite`` if any entry is bad. To ask all threads first would make them wait for each other."""
    tl.store(nonfinite + bad.to(tl.int32) * 0, 1, mask=bad)


@triton.jit
def _accumulate(grad, before, residual, momentum, nonfinite, n, m, decay, RULE: tl.constexpr, BLOCK: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    live = at < n - base
    old, v, u = before + base, residual + base, momentum + base
    if base + BLOCK <= n:
        _, bad = enter(grad + base, old, u, v, u, at, live, m, decay, RULE, True, False)
        report(bad, nonfinite)
    else:
        _, bad = enter(grad + base, old, u, v, u, at, live, m, decay, RULE, True, True)
        report(bad, nonfinite)


@triton.jit
def _finite_tile(x, out, nonfinite, at, live, MASKED: tl.constexpr):
    value = fetch(x, at, live, MASKED)
    finite = tl.abs(value) < float("inf")
    put(out, at, tl.where(finite, value, 0.0), live, MASKED)
    report(~finite, nonfinite)


@triton.jit
def _finite(x, out, nonfinite, n, BLOCK: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    if base + BLOCK <= n:
        _finite_tile(x + base, out + base, nonfinite, at, at < n - base, False)
    else:
        _finite_tile(x + base, out + base, nonfinite, at, at < n - base, True)


@triton.jit
def _subtract_sent(residual, momentum, indices, sent, k, MOMENTUM: tl.constexpr, BLOCK: tl.constexpr):
    j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = j < k
    at = tl.load(indices + j, mask=live, other=0)
    left = tl.load(residual + at, mask=live) - tl.load(sent + j, mask=live)
    tl.store(residual + at, left, mask=live)
    if MOMENTUM:
        tl.store(momentum + at, tl.zeros_like(left), mask=live)


def rule_of(momentum: Tensor | None, rule: Accumulation) -> int:
    """Which of the rules above this is."""
    found = PLAIN if momentum is None else NESTEROV if rule.nesterov else MOMENTUM
    return int(found.value)


def readable(*tensors: Tensor | None) -> bool:
    """Whether kernels can walk these tensors as they lie."""
    return all(x is None or (x.dtype in WIDE and x.is_contiguous()) for x in tensors)


def memory_of(residual: Tensor, before: Tensor | None) -> Tensor | None:
    """The memory to read instead of ``residual``, if there is one that kernels can walk; any other is copied there."""
    if before is None or (readable(before) and before.dtype == residual.dtype):
        return before
    residual.copy_(before)
    return None


class Entering(NamedTuple):
    """A gradient that enters the residual.

    Attributes:
        grad: Is added.
        nonfinite: Where what is not finite is reported.
        decay: Of the residual.
        before: What the residual was, if it lies elsewhere.
    """

    grad: Tensor
    nonfinite: Tensor
    decay: float = 1.0
    before: Tensor | None = None


def launch_tiles(kernel: Any, vectors: tuple[Tensor, ...], numbers: tuple[float, ...], rule: int) -> Tensor:
    """Run a kernel over the tiles of vectors, of which the first is a gradient. Returns whether it was nonfinite."""
    n, nonfinite = vectors[0].numel(), no_report(vectors[0].device)
    tiles = -(-n // BLOCK)
    kernel[(tiles,)](*vectors, nonfinite, n, *numbers, rule, BLOCK, num_warps=8, enable_fp_fusion=False)
    return nonfinite.view(torch.bool)


def no_report(device: torch.device) -> Tensor:
    """Where kernels report, before they do."""
    return torch.zeros((), dtype=torch.uint8, device=device)


@placed
def finite_or_zero(x: Tensor) -> tuple[Tensor, Tensor]:
    n, out, nonfinite = x.numel(), torch.empty_like(x), no_report(x.device)
    if n == 0 or not readable(x):
        return definition(fused.finite_or_zero)(x)
    fresh = (x, out, nonfinite)
    launch(_finite, -(-n // BLOCK), (n, *form(*fresh)), fresh, (n, BLOCK), num_warps=8)
    return out, nonfinite.view(torch.bool)


@placed
def accumulate_(
    grad: Tensor, residual: Tensor, momentum: Tensor | None, rule: Accumulation, before: Tensor | None = None
) -> Tensor:
    if grad.numel() == 0 or not readable(grad, residual, momentum):
        return definition(fused.accumulate_)(grad, residual, momentum, rule, before)
    old = memory_of(residual, before)
    vectors = grad, residual if old is None else old, residual, residual if momentum is None else momentum
    return launch_tiles(_accumulate, vectors, (rule.momentum, rule.decay), rule_of(momentum, rule))


@placed
def subtract_sent_(residual: Tensor, momentum: Tensor | None, indices: Tensor, sent: Tensor) -> None:
    """As defined, but for positions that all differ."""
    k = indices.numel()
    if not (readable(residual, momentum, sent) and indices.is_contiguous()):
        definition(fused.subtract_sent_)(residual, momentum, indices, sent)
    elif k:
        fresh = (residual, residual if momentum is None else momentum, indices, sent)
        facts = (k, momentum is None, *form(*fresh))
        launch(_subtract_sent, -(-k // 1024), facts, fresh, (k, momentum is not None, 1024), num_warps=4)
