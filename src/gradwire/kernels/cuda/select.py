"""Exact top-k, with or without error feedback, in one pass over memory and two small launches.

`sweep` puts candidates aside, `narrow` finds the last winner of each segment, `emit` writes the winners down. Nothing
waits for the device, and shapes are known beforehand, so all of it can be captured in a graph.
"""

import torch
from torch import Tensor

from gradwire.kernels import fused
from gradwire.kernels.cuda.census import regather, sample
from gradwire.kernels.cuda.emit import emit
from gradwire.kernels.cuda.enter import READ, accumulate_, readable, rule_of
from gradwire.kernels.cuda.narrow import narrow
from gradwire.kernels.cuda.plan import Plan, Scratch, plan
from gradwire.kernels.cuda.sweep import sweep
from gradwire.kernels.cuda.tables import BLOCK, definition, placed
from gradwire.kernels.fused import Accumulation, Selected

_STILL = Accumulation()
_DEEP = 32  # chunks of a segment, from which on a second try is worth two launches of its own
# Fewer registers than the compiler would take, so that more programs wait for memory side by side.
_OPTIONS = {"num_warps": 8, "maxnreg": 56, "enable_fp_fusion": False}


@placed
def topk(x: Tensor, lengths: tuple[int, ...], counts: tuple[int, ...]) -> Tensor:
    chosen = plan(lengths, counts, x.device)
    if chosen.total == 0 or not readable(x):
        return definition(fused.topk)(x, lengths, counts)
    return _select(x, chosen, False).indices


@placed
def accumulate_topk_(
    grad: Tensor,
    residual: Tensor,
    momentum: Tensor | None,
    rule: Accumulation,
    lengths: tuple[int, ...],
    counts: tuple[int, ...],
    edge: Tensor | None,
) -> Selected:
    chosen = plan(lengths, counts, grad.device)
    if chosen.total == 0 or not readable(grad, residual, momentum):
        return definition(fused.accumulate_topk_)(grad, residual, momentum, rule, lengths, counts, edge)
    if edge is None or edge.shape != (len(lengths),):
        broken = accumulate_(grad, residual, momentum, rule)
        return _select(residual, chosen, True)._replace(broken=broken)
    scratch = chosen.pool.take(chosen)
    spare = residual if momentum is None else momentum
    _sweep(grad, residual, spare, rule, rule_of(momentum, rule), chosen, scratch, edge, chosen.slack)
    found = _finish(residual, chosen, scratch, edge, chosen.slack, True)
    chosen.pool.give(scratch)
    return found


def _select(x: Tensor, chosen: Plan, values: bool) -> Selected:
    """Top-k without a hint: a sample says where candidates begin."""
    scratch = chosen.pool.take(chosen)
    hint = torch.empty_like(chosen.slack)
    sample[(chosen.chunks,)](
        x, chosen.table, chosen.chunk_segment, hint, scratch.state, scratch.hist, BLOCK, num_warps=8
    )
    # The sample has left its own slack.
    _sweep(x, x, x, _STILL, int(READ.value), chosen, scratch, hint, chosen.whole)
    found = _finish(x, chosen, scratch, hint, chosen.whole, values)
    chosen.pool.give(scratch)
    return found


def _sweep(
    grad: Tensor,
    residual: Tensor,
    momentum: Tensor,
    rule: Accumulation,
    kind: int,
    chosen: Plan,
    scratch: Scratch,
    hint: Tensor,
    slack: Tensor,
) -> None:
    sweep[(chosen.grid.tiles,)](
        grad,
        residual,
        momentum,
        scratch.broken,
        chosen.grid.n,
        rule.momentum,
        rule.decay,
        chosen.grid.tile_row,
        chosen.grid.row_segment,
        chosen.table,
        hint,
        slack,
        scratch.state,
        scratch.hist,
        scratch.row_base,
        scratch.row_count,
        scratch.key,
        scratch.place,
        kind,
        BLOCK,
        **_OPTIONS,
    )


def _finish(x: Tensor, chosen: Plan, scratch: Scratch, hint: Tensor, slack: Tensor, values: bool) -> Selected:
    device = x.device
    edge = torch.empty_like(chosen.slack)
    indices = torch.empty(chosen.total, dtype=torch.int64, device=device)
    found = torch.empty(chosen.total if values else 0, dtype=x.dtype, device=device)
    broken = torch.empty((), dtype=torch.uint8, device=device)
    _narrow(x, chosen, scratch, hint, slack, edge, True)
    if chosen.deepest > _DEEP:
        regather[(chosen.chunks,)](
            x,
            chosen.table,
            chosen.chunk_segment,
            scratch.state,
            scratch.hist,
            scratch.row_base,
            scratch.row_count,
            scratch.key,
            scratch.place,
            BLOCK,
            num_warps=8,
        )
        _narrow(x, chosen, scratch, hint, slack, edge, False)
    emit[(chosen.chunks,)](
        x,
        chosen.table,
        chosen.chunk_segment,
        chosen.slack.numel(),
        edge,
        scratch.state,
        scratch.row_base,
        scratch.row_count,
        scratch.key,
        scratch.place,
        scratch.out,
        scratch.broken,
        indices,
        found,
        broken,
        values,
        BLOCK,
        num_warps=8,
    )
    return Selected(indices, found, broken.view(torch.bool), edge)


def _narrow(x: Tensor, chosen: Plan, scratch: Scratch, hint: Tensor, slack: Tensor, edge: Tensor, first: bool) -> None:
    narrow[(chosen.chunks,)](
        x,
        chosen.table,
        chosen.chunk_segment,
        hint,
        slack,
        chosen.slack,
        edge,
        scratch.state,
        scratch.hist,
        scratch.row_base,
        scratch.row_count,
        scratch.key,
        scratch.place,
        scratch.bound_key,
        scratch.bound_place,
        scratch.sure,
        scratch.out,
        first,
        BLOCK,
        num_warps=8,
    )
