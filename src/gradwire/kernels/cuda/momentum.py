"""Momentum that a gradient enters, over AdamW's denominators."""

import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels import momentum as definitions
from gradwire.kernels.cuda.accumulate import MOMENTUM, READ, entered, fetch, launch_tiles, put, readable, report
from gradwire.kernels.cuda.tables import definition, placed
from gradwire.kernels.momentum import Momentum

AVERAGE = tl.constexpr(4)  # beside the rules of `accumulate`: the next momentum enters the residual
DIVIDED = tl.constexpr(5)  # the same, of the gradient over the denominator


@triton.jit
def _next(g, last, denominator, beta, rest, DIVIDES: tl.constexpr):
    """The next momentum, and where the gradient is not finite."""
    x = tl.div_rn(g, tl.where(denominator > 0, denominator, 1.0)) if DIVIDES else g
    finite = tl.abs(x) < float("inf")
    return beta * last + rest * tl.where(finite, x, 0.0), ~finite


@triton.jit
def fetched(
    grad, residual, last, denominator, at, live, RULE: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Gradient, residual, momentum and denominator at these places; the residual for what the rule does not read.

    All is asked for before anything is divided: a division has branches, which no load is moved across.
    """
    v = fetch(residual, at, live, MASKED)
    g = v if RULE == READ else fetch(grad, at, live, MASKED)
    u = fetch(last, at, live, MASKED) if RULE >= MOMENTUM else v
    d = fetch(denominator, at, live, MASKED) if RULE == DIVIDED else v
    return g, v, u, d


@triton.jit
def target_from(g, v, u, d, m, rest, decay, RULE: tl.constexpr):
    """Of what `fetched` gives: the target, the next momentum, and where the gradient is not finite."""
    if RULE >= AVERAGE:
        u, bad = _next(g, u, d, m, rest, RULE == DIVIDED)
        return tl.where(tl.abs(u) < float("inf"), u, 0.0) + decay * v, u, bad
    else:
        return entered(g, v, u, m, decay, RULE)


@triton.jit
def averaged(
    grad, residual, last, denominator, at, live, beta, rest, decay, RULE: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """The target at these places, the next momentum, and where the gradient is not finite; nothing is written."""
    g, v, u, d = fetched(grad, residual, last, denominator, at, live, RULE, MASKED)
    return target_from(g, v, u, d, beta, rest, decay, RULE)


def rule_of(momentum: Momentum) -> int:
    """Which of the rules above this is."""
    return int((AVERAGE if momentum.denominator is None else DIVIDED).value)


@triton.jit
def _advance_tile(
    grad, last, denominator, out, nonfinite, left, beta, rest, RULE: tl.constexpr, MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    x, _, m, d = fetched(grad, last, last, denominator, at, at < left, RULE, MASKED)
    u, bad = _next(x, m, d, beta, rest, RULE == DIVIDED)
    put(out, at, u, at < left, MASKED)
    report(bad, nonfinite)


@triton.jit
def _advance(
    grad, last, denominator, out, nonfinite, n, beta, rest, RULE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    base = tl.program_id(0).to(tl.int64) * BLOCK
    grad, last, denominator, out = grad + base, last + base, denominator + base, out + base
    if base + BLOCK <= n:
        _advance_tile(grad, last, denominator, out, nonfinite, n - base, beta, rest, RULE, False, BLOCK)
    else:
        _advance_tile(grad, last, denominator, out, nonfinite, n - base, beta, rest, RULE, True, BLOCK)


@placed
def next_momentum_(grad: Tensor, momentum: Momentum, out: Tensor) -> Tensor:
    last, denominator, beta = momentum
    if grad.numel() == 0 or not readable(grad, last, denominator, out):
        return definition(definitions.next_momentum_)(grad, momentum, out)
    vectors = grad, last, last if denominator is None else denominator, out
    return launch_tiles(_advance, vectors, (beta, 1.0 - beta), rule_of(momentum))
