"""Momentum that a gradient enters, over AdamW's denominators."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels import momentum as definitions
from gradwire.kernels.cuda.accumulate import fetch, put, readable, report
from gradwire.kernels.cuda.tables import BLOCK, definition, placed
from gradwire.kernels.momentum import Momentum

AVERAGE = tl.constexpr(4)  # beside the rules of `accumulate`: the next momentum enters the residual
DIVIDED = tl.constexpr(5)  # the same, of the gradient over the denominator


@triton.jit
def advanced(
    grad, last, denominator, at, live, beta, rest, DIVIDES: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """The next momentum at these places, and where the gradient is not finite."""
    # All is asked for before anything is divided: a division has branches, which no load is moved across.
    x, m = fetch(grad, at, live, MASKED), fetch(last, at, live, MASKED)
    if DIVIDES:
        d = fetch(denominator, at, live, MASKED)
        x = tl.div_rn(x, tl.where(d > 0, d, 1.0))
    finite = tl.abs(x) < float("inf")
    return beta * m + rest * tl.where(finite, x, 0.0), ~finite


@triton.jit
def averaged(
    grad, residual, last, denominator, at, live, beta, rest, decay, RULE: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """The target at these places, the next momentum, and where the gradient is not finite; nothing is written."""
    v = fetch(residual, at, live, MASKED)
    u, bad = advanced(grad, last, denominator, at, live, beta, rest, RULE == DIVIDED, MASKED)
    return tl.where(tl.abs(u) < float("inf"), u, 0.0) + decay * v, u, bad


def rule_of(momentum: Momentum) -> int:
    """Which of the rules above this is."""
    return int((AVERAGE if momentum.denominator is None else DIVIDED).value)


@triton.jit
def _advance(
    grad, last, denominator, out, nonfinite, n, beta, rest, DIVIDES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    base = tl.program_id(0).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    live = at < n - base
    if base + BLOCK <= n:
        u, bad = advanced(grad + base, last + base, denominator + base, at, live, beta, rest, DIVIDES, False)
        put(out + base, at, u, live, False)
        report(bad, nonfinite)
    else:
        u, bad = advanced(grad + base, last + base, denominator + base, at, live, beta, rest, DIVIDES, True)
        put(out + base, at, u, live, True)
        report(bad, nonfinite)


@placed
def next_momentum_(grad: Tensor, momentum: Momentum, out: Tensor) -> Tensor:
    n, (last, denominator, beta) = grad.numel(), momentum
    if n == 0 or not readable(grad, last, denominator, out):
        return definition(definitions.next_momentum_)(grad, momentum, out)
    nonfinite = torch.zeros((), dtype=torch.uint8, device=grad.device)
    _advance[(-(-n // BLOCK),)](
        grad,
        last,
        last if denominator is None else denominator,
        out,
        nonfinite,
        n,
        beta,
        1.0 - beta,
        denominator is not None,
        BLOCK,
        num_warps=8,
        enable_fp_fusion=False,
    )
    return nonfinite.view(torch.bool)
