"""Exact top-k, with or without error feedback, in one pass over memory and three small launches.

`sweep` marks candidates, `collect` puts them aside, `narrow` finds the last winner of each segment, `emit` writes the
winners down. Where most entries would be candidates, `radix` reads them several times instead; it also stands by for
long segments whose candidates turn out to be too few or too many. Nothing waits for the device, and shapes are known
beforehand, so all of it can be captured in a graph.
"""

from typing import Any

import torch
from torch import Tensor

from gradwire.kernels import fused
from gradwire.kernels.cuda.bracket import guess, prove
from gradwire.kernels.cuda.census import sample
from gradwire.kernels.cuda.collect import collect
from gradwire.kernels.cuda.emit import emit
from gradwire.kernels.cuda.enter import READ, accumulate_, readable, rule_of
from gradwire.kernels.cuda.launch import form, launch
from gradwire.kernels.cuda.narrow import narrow
from gradwire.kernels.cuda.plan import Plan, Scratch, plan, stream_of
from gradwire.kernels.cuda.radix import DIGITS, tally, weigh, write
from gradwire.kernels.cuda.sweep import sweep
from gradwire.kernels.cuda.tables import BLOCK, definition, placed
from gradwire.kernels.fused import Accumulation, Selected

_STILL = Accumulation()
_LONG = 16  # chunks of a segment, from which on digits are worth a guess
_DEEP = 64  # chunks of a segment, from which on a second try is worth launches of its own
# Fewer registers than the compiler would take, so that more programs wait for memory side by side.
_STREAM = {"num_warps": 8, "maxnreg": 48, "enable_fp_fusion": False}
_COLLECT = {"num_warps": 4, "maxnreg": 80}
_NARROW = {"num_warps": 4, "maxnreg": 96}
_EMIT = {"num_warps": 4, "maxnreg": 80}
_RADIX = {"num_warps": 8, "maxnreg": 80}
_WRITE = {"num_warps": 4}
_WRITTEN = 1024  # entries that `write` looks at together


Memories = tuple[Tensor, Tensor | None]  # the residual, and the momentum if there is one


@placed
def topk(x: Tensor, lengths: tuple[int, ...], counts: tuple[int, ...]) -> Tensor:
    chosen = plan(lengths, counts, x.device)
    if chosen.total == 0 or not readable(x):
        return definition(fused.topk)(x, lengths, counts)
    return _Selection((x, None), (x, None), chosen).run(None, _STILL, None, values=False).indices


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
    memories = residual, momentum
    return _Selection(memories, memories, chosen).run(grad, rule, edge)


@placed
def carry_topk_(
    grad: Tensor,
    before: Memories,
    after: Memories,
    rule: Accumulation,
    lengths: tuple[int, ...],
    counts: tuple[int, ...],
    edge: Tensor | None,
) -> Selected:
    chosen = plan(lengths, counts, grad.device)
    if chosen.total == 0 or not readable(grad, *before, *after):
        return definition(fused.carry_topk_)(grad, before, after, rule, lengths, counts, edge)
    return _Selection(before, after, chosen).run(grad, rule, edge)


@placed
def send_topk_(
    grad: Tensor,
    before: Memories,
    after: Memories,
    mask: bool,
    rule: Accumulation,
    lengths: tuple[int, ...],
    counts: tuple[int, ...],
    edge: Tensor | None,
) -> Selected:
    chosen = plan(lengths, counts, grad.device)
    if chosen.total == 0 or not readable(grad, *before, *after):
        return definition(fused.send_topk_)(grad, before, after, mask, rule, lengths, counts, edge)
    settle = 2 if mask and after[1] is not None else 1
    return _Selection(before, after, chosen).run(grad, rule, edge, settle=settle)


class _Selection:
    """One selection in flight: the memories that it reads, and those that it writes and selects from."""

    def __init__(self, before: Memories, after: Memories, chosen: Plan) -> None:
        self.before, self.after = before, after
        self.x = after[0]
        self.spare = self.x if after[1] is None else after[1]
        self.plan = chosen
        self.facts: tuple[Any, ...] = (chosen.serial, *form(self.x, self.spare))

    def run(
        self, grad: Tensor | None, rule: Accumulation, edge: Tensor | None, values: bool = True, settle: int = 0
    ) -> Selected:
        stream = stream_of(self.x.device)
        scratch = self.plan.pool.take(self.plan, stream)
        if self.plan.dense:
            broken = None if grad is None else self._accumulate(grad, rule)
            found = self._by_digits(scratch, values, settle)
        else:
            broken, hint, slack = self._mark(scratch, grad, rule, edge)
            found = self._finish(scratch, hint, slack, values, settle)
        self.plan.pool.give(scratch, stream)
        return found if broken is None else found._replace(broken=broken)

    def _mark(
        self, scratch: Scratch, grad: Tensor | None, rule: Accumulation, edge: Tensor | None
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Sweep. Gives whether the gradient was broken, if that is known already, and what candidates had to reach."""
        broken = None
        if grad is not None and edge is not None and edge.shape == self.plan.slack.shape:
            hint, slack = edge, self.plan.slack
            self._sweep(scratch, grad, self.before, rule, rule_of(self.after[1], rule), hint, slack)
        else:  # no hint: a sample says where candidates begin, and has left its own slack
            if grad is not None:
                broken = self._accumulate(grad, rule)
            hint, slack = torch.zeros_like(self.plan.slack), self.plan.whole
            self._sample(scratch, hint)
            self._sweep(scratch, self.x, self.after, _STILL, int(READ.value), hint, slack)
        return broken, hint, slack

    def _accumulate(self, grad: Tensor, rule: Accumulation) -> Tensor:
        for old, new in zip(self.before, self.after, strict=True):
            if old is not None and new is not None and old is not new:
                new.copy_(old)
        return accumulate_(grad, *self.after, rule)

    def _sample(self, scratch: Scratch, hint: Tensor) -> None:
        p = self.plan
        rest = (p.table, p.chunk_segment, scratch.state, scratch.coarse, BLOCK)
        launch(sample, p.chunks, (self.facts, scratch.serial), (self.x, hint), rest, num_warps=8)

    def _sweep(
        self,
        scratch: Scratch,
        grad: Tensor,
        memories: Memories,
        rule: Accumulation,
        kind: int,
        hint: Tensor,
        slack: Tensor,
    ) -> None:
        p, tiles = self.plan, self.plan.grid
        residual, momentum = memories
        spare = residual if momentum is None else momentum
        facts = (self.facts, scratch.serial, rule, kind, *form(grad, residual, spare, hint))
        fresh = (grad, residual, spare, self.x, self.spare, hint)
        rest = (
            scratch.broken, tiles.n, rule.momentum, rule.decay, tiles.tile_row, tiles.row_segment, p.table, slack,
            scratch.words, kind, p.silent, BLOCK,
        )  # fmt: skip
        launch(sweep, tiles.tiles, facts, fresh, rest, **_STREAM)

    def _finish(self, scratch: Scratch, hint: Tensor, slack: Tensor, values: bool, settle: int) -> Selected:
        p, x = self.plan, self.x
        facts = (self.facts, scratch.serial, slack is p.slack, *form(hint))
        edge = torch.empty_like(p.slack)
        indices = torch.empty(p.total, dtype=torch.int64, device=x.device)
        found = torch.empty(p.total if values else 0, dtype=x.dtype, device=x.device)
        broken = torch.empty((), dtype=torch.bool, device=x.device)
        kept = (scratch.words, scratch.base, scratch.number, scratch.key, scratch.place, scratch.bound_place)
        rest = (p.table, p.chunk_segment, slack, scratch.state, scratch.fine, scratch.broken, *kept, BLOCK)
        launch(collect, p.chunks, facts, (x, hint), rest, **_COLLECT)
        deep = p.deepest > _DEEP and p.grid.n < 2**32  # digits are counted in 32 bits
        narrowed = (
            p.table, p.chunk_segment, slack, p.slack, scratch.state, scratch.fine, scratch.coarse, scratch.base,
            scratch.number, scratch.key, scratch.place, scratch.bound_key, scratch.bound_place, scratch.sure,
            scratch.out, deep, BLOCK,
        )  # fmt: skip
        launch(narrow, p.chunks, (facts, deep), (x, hint, edge), narrowed, **_NARROW)
        if deep:
            self._count_digits(scratch, edge)
        fresh = (x, self.spare, edge, indices, found, broken)
        last = (
            p.table, p.chunk_segment, p.slack.numel(), scratch.state, *kept, scratch.sure, scratch.out, scratch.broken,
            p.grid.n, deep, values, settle, BLOCK,
        )  # fmt: skip
        launch(emit, p.chunks, (self.facts, scratch.serial, deep, values, settle), fresh, last, **_EMIT)
        return Selected(indices, found, broken, edge)

    def _count_digits(self, scratch: Scratch, edge: Tensor) -> None:
        """Find the last winners of all segments, or of those whose candidates were of no use."""
        p, facts = self.plan, (self.facts, scratch.serial)
        around, n = (p.table, p.chunk_segment, scratch.state), p.grid.n
        for digit in DIGITS:
            counted = (*around, scratch.coarse, n, *digit, BLOCK)
            launch(tally, p.chunks, (facts, digit), (self.x, edge), counted, **_RADIX)
        weighed = (*around, scratch.number, scratch.sure, scratch.out, n, BLOCK)
        launch(weigh, p.chunks, facts, (self.x,), weighed, **_RADIX)

    def _guess(self, scratch: Scratch, edge: Tensor) -> None:
        """Find the last winners where a sample says enough of them; digits then have nothing to do."""
        p, x, facts = self.plan, self.x, (self.facts, scratch.serial)
        around = (p.table, p.chunk_segment, scratch.state, scratch.coarse)
        for second in (False, True):
            launch(guess, p.chunks, (facts, second), (x,), (*around, second, BLOCK), num_warps=4)
        for second in (False, True):
            launch(prove, p.chunks, (facts, second), (x, edge), (*around, p.grid.n, second, BLOCK), **_RADIX)

    def _by_digits(self, scratch: Scratch, values: bool, settle: int) -> Selected:
        p, x = self.plan, self.x
        edge = torch.empty_like(p.slack)
        indices = torch.empty(p.total, dtype=torch.int64, device=x.device)
        found = torch.empty(p.total if values else 0, dtype=x.dtype, device=x.device)
        if p.deepest > _LONG:
            self._guess(scratch, edge)
        self._count_digits(scratch, edge)
        written = (
            p.table, p.chunk_segment, p.slack.numel(), scratch.state, scratch.sure, scratch.out, p.grid.n, values,
            settle, _WRITTEN, BLOCK,
        )  # fmt: skip
        facts = (self.facts, scratch.serial, values, settle)
        launch(write, p.chunks, facts, (x, self.spare, edge, indices, found), written, **_WRITE)
        return Selected(indices, found, torch.zeros((), dtype=torch.bool, device=x.device), edge)
