"""Exact top-k, as it is launched; the package's docstring explains the passes."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.core.layout import Flat
from gradwire.kernels import fused
from gradwire.kernels import momentum as definitions
from gradwire.kernels.cuda.accumulate import READ, readable, rule_of
from gradwire.kernels.cuda.launch import form, launch
from gradwire.kernels.cuda.momentum import AVERAGE
from gradwire.kernels.cuda.momentum import rule_of as averaging_of
from gradwire.kernels.cuda.places import TOGETHER, by_tile, end_to_end, vector_of
from gradwire.kernels.cuda.tables import BLOCK, definition, placed
from gradwire.kernels.cuda.topk.compact import compact
from gradwire.kernels.cuda.topk.mark import mark
from gradwire.kernels.cuda.topk.radix_fallback import DIGITS, PROGRAMS, count_digits, count_ties
from gradwire.kernels.cuda.topk.sample import refine, sample
from gradwire.kernels.cuda.topk.threshold import narrow, threshold
from gradwire.kernels.cuda.topk.workspace import LONG_RUN, PARTS, SHORT_RUN, Scratch, SelectionPlan, plan, stream_of
from gradwire.kernels.cuda.topk.write import write
from gradwire.kernels.fused import Accumulation, Selected
from gradwire.kernels.momentum import Momentum

# Fewer registers than the compiler would take, so that more programs wait for memory side by side.
_MARK = {"num_warps": 1, "maxnreg": 96, "enable_fp_fusion": False}
_AVERAGE = {"num_warps": 1, "maxnreg": 128, "enable_fp_fusion": False}  # of one more vector
_COMPACT = {"num_warps": 8, "maxnreg": 80}
_SAMPLE = {SHORT_RUN: {"num_warps": 2, "maxnreg": 96}, LONG_RUN: {"num_warps": 8}}
_NARROW = {"num_warps": 4, "maxnreg": 96}
_THRESHOLD = {"num_warps": 8, "maxnreg": 64}
_RADIX = {"num_warps": 8, "maxnreg": 80}
_WRITE = {"num_warps": 4, "maxnreg": 96}

Numbers = tuple[int, ...]
Memories = tuple[Tensor, Tensor | None]  # the residual, and the momentum if there is one


@placed
def topk(x: Tensor, lengths: Numbers, counts: Numbers) -> Tensor:
    chosen = plan(lengths, counts, x.device)
    if chosen.total == 0 or not readable(x):
        return definition(fused.topk)(x, lengths, counts)
    reads = Read((x, x, x, x), int(READ.value))
    return _Selection((x, None), chosen).run(reads, values=False).indices


@placed
def carry_topk_(
    grad: Flat,
    before: Memories,
    after: Memories,
    rule: Accumulation,
    lengths: Numbers,
    counts: Numbers,
    subtract: int = 0,
) -> Selected:
    chosen, place = plan(lengths, counts, after[0].device), by_tile(grad, BLOCK) or end_to_end(grad)
    if chosen.total == 0 or not readable(vector_of(place), *before, *after):
        return definition(fused.carry_topk_)(grad, before, after, rule, lengths, counts, subtract)
    subtract = subtract if after[1] is not None else min(subtract, 1)  # there is nothing to mask
    residual, last = before
    spare = residual if last is None else last
    read = Read((place[0], residual, spare, spare), rule_of(last, rule), (rule.momentum, 0.0, rule.decay), place[1])
    return _Selection(after, chosen).run(read, subtract=subtract)


@placed
def momentum_topk_(
    grad: Flat,
    residuals: tuple[Tensor, Tensor],
    momentum: Momentum,
    out: Tensor | None,
    subtract: int,
    decay: float,
    lengths: Numbers,
    counts: Numbers,
) -> Selected:
    last, denominator, beta = momentum
    chosen, place = plan(lengths, counts, last.device), by_tile(grad, BLOCK) or end_to_end(grad)
    if chosen.total == 0 or not readable(vector_of(place), *residuals, last, denominator, out):
        defined = definition(definitions.momentum_topk_)
        return defined(grad, residuals, momentum, out, subtract, decay, lengths, counts)
    following = torch.empty_like(residuals[1]) if out is None else out
    vectors = place[0], residuals[0], last, last if denominator is None else denominator
    read = Read(vectors, averaging_of(momentum), (beta, 1.0 - beta, decay), place[1])
    return _Selection((residuals[1], following), chosen).run(read, subtract=subtract)


class Read(NamedTuple):
    """What a selection is made of.

    Attributes:
        vectors: Gradient, residual, momentum and denominators; another of them for one that is not read.
        rule: How a gradient enters the others.
        numbers: Momentum's factor, the gradient's, and the decay of the residual.
        how: How the gradient lies, see `places`.
    """

    vectors: tuple[Tensor, Tensor, Tensor, Tensor]
    rule: int
    numbers: tuple[float, float, float] = (0.0, 0.0, 1.0)
    how: int = int(TOGETHER.value)


class _Selection:
    """One selection in flight, and the memories that it writes and selects from."""

    def __init__(self, after: Memories, chosen: SelectionPlan) -> None:
        self.x = after[0]
        self.spare = self.x if after[1] is None else after[1]
        self.plan = chosen
        self.facts: tuple[Any, ...] = (chosen.serial, *form(self.x, self.spare))

    def run(self, read: Read, values: bool = True, subtract: int = 0) -> Selected:
        stream = stream_of(self.x.device)
        scratch = self.plan.pool.take(self.plan, stream)
        self.facts = (*self.facts, scratch.serial)
        self._mark(scratch, read)
        selected = self._finish(scratch, values, subtract)
        self.plan.pool.give(scratch, stream)
        return selected

    def _mark(self, scratch: Scratch, read: Read) -> None:
        """Find ranges; then accumulate and mark."""
        p, tiles, (vectors, rule, numbers, how) = self.plan, self.plan.grid, read
        facts = (self.facts, rule, numbers, how, *form(*vectors))
        sampled = (
            p.sampled, p.table, p.chunk_segment, scratch.state, scratch.coarse, *numbers, rule, how, p.run, BLOCK,
        )  # fmt: skip
        for kernel in (sample, refine):
            launch(kernel, p.sampled.numel(), facts, vectors, sampled, **_SAMPLE[p.run])
        marked = (
            scratch.flags, tiles.n, *numbers, tiles.tile_row, tiles.tile_segment, tiles.row_segment, p.table,
            scratch.state, scratch.words, scratch.slot_bits, scratch.slot_at, rule, how, p.dense, p.slots,
        )  # fmt: skip
        options = _AVERAGE if rule >= AVERAGE.value else _MARK
        launch(mark, tiles.tiles * PARTS.value, facts, (*vectors, self.x, self.spare), marked, **options)

    def _finish(self, scratch: Scratch, values: bool, subtract: int) -> Selected:
        p, x, facts, n = self.plan, self.x, self.facts, self.plan.grid.n
        indices = torch.empty(p.total, dtype=torch.int64, device=x.device)
        chosen = torch.empty(p.total if values else 0, dtype=x.dtype, device=x.device)
        nonfinite = torch.empty((), dtype=torch.bool, device=x.device)
        around = (p.table, p.chunk_segment, scratch.state)
        candidates = (scratch.base, scratch.number, scratch.kept, scratch.place)
        winners = (scratch.sure, scratch.out)
        counted = (
            *around, scratch.fine, scratch.words, scratch.slot_bits, scratch.slot_at, *candidates, scratch.sure,
            p.slots, BLOCK,
        )  # fmt: skip
        launch(compact, p.chunks, facts, (x,), counted, **_COMPACT)
        launch(narrow, p.chunks, facts, (p.table,), (*around[1:], scratch.fine, *candidates[:3]), **_NARROW)
        searched = (*around, *candidates, scratch.bound_key, scratch.bound_place, *winners, scratch.flags, BLOCK)
        launch(threshold, p.chunks, facts, (x,), searched, **_THRESHOLD)
        programs, over = min(p.chunks, PROGRAMS), (scratch.number, *winners, scratch.flags, n, p.chunks)
        for digit in DIGITS:
            again = (*around, scratch.digits, *over, *digit, BLOCK)
            launch(count_digits, programs, (facts, digit), (x,), again, **_RADIX)
        launch(count_ties, programs, facts, (x,), (*around, *over, BLOCK), **_RADIX)
        fresh = (x, self.spare, indices, chosen, nonfinite)
        written = (
            p.table, p.chunk_segment, scratch.state, *candidates, *winners, scratch.flags, n,
            values, subtract, BLOCK,
        )  # fmt: skip
        launch(write, p.chunks, (facts, values, subtract), fresh, written, **_WRITE)
        return Selected(indices, chosen, nonfinite)
