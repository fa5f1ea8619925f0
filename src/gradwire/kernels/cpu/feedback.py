"""Error feedback for the CPU: scale, bits and error with as few passes as the scale allows."""

from typing import NamedTuple

import numpy as np
import torch
from numba import prange
from numpy.typing import NDArray
from torch import Tensor

from gradwire.core.layout import Flat
from gradwire.kernels.bits import packed_bytes
from gradwire.kernels.cpu import scales
from gradwire.kernels.cpu.buffer_pool import pooled_message
from gradwire.kernels.cpu.codes import leave_rounding
from gradwire.kernels.cpu.halves import gradient, stretch
from gradwire.kernels.cpu.packing import join
from gradwire.kernels.cpu.pieces import blocked, whole
from gradwire.kernels.cpu.signs import message_of_signs
from gradwire.kernels.cpu.threads import compiled, in_turn, inlined
from gradwire.kernels.fused import Accumulation, PerSegment
from gradwire.kernels.groups import num_blocks

RESIDUAL, MOMENTUM, NESTEROV, AS_IT_IS = range(4)
_EXPONENT = np.int32(0x7F800000)
_LONG_TILE = 8192  # where nothing is read twice
_NONE = np.zeros(0, dtype=np.float32)

Memories = tuple[NDArray[np.float32], NDArray[np.float32]]  # residual and momentum
NOWHERE: Memories = _NONE, _NONE  # what was before memories that are changed where they lie


class CompiledRule(NamedTuple):
    """`Accumulation` as kernels take it."""

    kind: int
    momentum: np.float32
    decay: np.float32


def rule_of(rule: Accumulation, momentum: Tensor | None = None) -> CompiledRule:
    kind = RESIDUAL if momentum is None else NESTEROV if rule.nesterov else MOMENTUM
    return CompiledRule(kind, np.float32(rule.momentum), np.float32(rule.decay))


def memories(residual: Tensor, momentum: Tensor | None = None) -> Memories:
    """As kernels take them; the rule says whether there is a momentum."""
    v = residual.numpy()
    return v, v if momentum is None else momentum.numpy()


@inlined
def _finite(x, raw):
    return np.float32(0.0) if (raw & _EXPONENT) == _EXPONENT else x


@inlined
def add_gradient(g, old_v, old_u, v, u, rule):
    """Write new memories. Returns whether any of the gradient was not finite."""
    raw = g.view(np.int32)
    top = np.int32(0)
    if rule.kind == RESIDUAL:
        for j in range(g.size):
            top = max(top, raw[j] & _EXPONENT)
            v[j] = _finite(g[j], raw[j]) + rule.decay * old_v[j]
    elif rule.kind == NESTEROV:
        for j in range(g.size):
            top = max(top, raw[j] & _EXPONENT)
            x = _finite(g[j], raw[j])
            w = rule.momentum * (old_u[j] + x)
            u[j] = w
            v[j] = old_v[j] + w + x
    else:
        for j in range(g.size):
            top = max(top, raw[j] & _EXPONENT)
            w = rule.momentum * old_u[j] + _finite(g[j], raw[j])
            u[j] = w
            v[j] = old_v[j] + w
    return top == _EXPONENT


@inlined
def accumulate_tile(grad, a, b, before, after, rule):
    """Add the entries ``[a, b)`` of the gradient to the memories. Returns whether any of them was not finite.

    What is not finite counts as zero. What the memories were lies in ``before``, unless that is empty.
    """
    g, v, u = stretch(grad, a, b), after[0][a:b], after[1][a:b]
    if before[0].size == 0:  # written out, since loops over memories that may overlap would not become vectors
        return add_gradient(g, v, u, v, u, rule)
    return add_gradient(g, before[0][a:b], before[1][a:b], v, u, rule)


@compiled
def _accumulate(grad, before, after, rule, pieces, nonfinite):
    for t in prange(nonfinite.size):
        nonfinite[t] = accumulate_tile(grad, pieces.start[t], pieces.stop[t], before, after, rule)


@compiled
def _accumulate_and_sum(grad, before, after, rule, pieces, what, nonfinite, sums):
    for t in prange(nonfinite.size):
        a, b = pieces.start[t], pieces.stop[t]
        nonfinite[t] = accumulate_tile(grad, a, b, before, after, rule)
        target = after[0][a:b]
        sums[t] = scales.squares(target) if what == scales.SQUARES else scales.magnitudes(target)


@compiled
def _integers(grad, before, after, rule, pieces, block, levels, bits, nonfinite, group_scales, heads, out):
    """Accumulate, round the target to levels, pack them, and leave the rounding."""
    for t in prange(heads.size):
        a, b = pieces.start[t], pieces.stop[t]
        nonfinite[t] = accumulate_tile(grad, a, b, before, after, rule)
        target, codes = after[0][a:b], np.empty(b - a, dtype=np.uint32)
        heads[t] = leave_rounding(target, a, pieces.group[t], block, levels, bits, group_scales, codes, out)


@in_turn
def accumulate_(
    grad: Flat, residual: Tensor, momentum: Tensor | None, rule: Accumulation, before: Tensor | None = None
) -> Tensor:
    if before is not None and momentum is not None:
        residual, before = residual.copy_(before), None
    after, pieces = memories(residual, momentum), whole((residual.numel(),), _LONG_TILE)
    nonfinite = np.zeros(pieces.start.size, dtype=np.bool_)
    _accumulate(gradient(grad), _old(before), after, rule_of(rule, momentum), pieces, nonfinite)
    return torch.tensor(bool(nonfinite.any()))


@in_turn
def feedback_sign_(
    grad: Flat, residual: Tensor, decay: float, lengths: PerSegment, norm: bool, before: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    after, pieces = memories(residual), whole(lengths)
    what = scales.SQUARES if norm else scales.MAGNITUDES
    count = pieces.start.size
    nonfinite, sums = np.zeros(count, dtype=np.bool_), np.empty(count)
    rule = rule_of(Accumulation(decay=decay))
    _accumulate_and_sum(gradient(grad), _old(before), after, rule, pieces, what, nonfinite, sums)
    return message_of_signs(after[0], lengths, what, sums), torch.tensor(bool(nonfinite.any()))


@in_turn
def feedback_integer_(
    grad: Flat, residual: Tensor, decay: float, lengths: PerSegment, bits: int, block: int, before: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    pieces, groups = blocked(lengths, block), num_blocks(lengths, block)
    count = pieces.start.size
    nonfinite, heads = np.zeros(count, dtype=np.bool_), np.empty(count, dtype=np.uint8)
    message, head, body = pooled_message(groups, packed_bytes(residual.numel(), bits))
    inputs = gradient(grad), _old(before), memories(residual), rule_of(Accumulation(decay=decay)), pieces
    _integers(*inputs, block, (1 << bits - 1) - 1, bits, nonfinite, head, heads, body)
    join(pieces.start, bits, heads, body)
    return message, torch.tensor(bool(nonfinite.any()))


def _old(before: Tensor | None) -> Memories:
    return NOWHERE if before is None else memories(before.float())
