"""Batched pass: one forward and backward for all workers of a process, which `torch.func` maps over their batches.

Workers share one model, so every parameter is expanded, without a copy, to one for each worker; what is derived is each
worker's own gradient. Where a worker makes several passes in a step, and how much they differ is asked for, these are
mapped over as well.

Random numbers (dropout) are drawn for all workers at once: they depend on (seed, step), but are not those that a worker
by itself would draw.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from gradwire.core.segments import Segments
from gradwire_lab.train.cuda_graphs import CapturedPass
from gradwire_lab.train.data import Batch
from gradwire_lab.train.local_workers import Grads, LocalWorkers
from gradwire_lab.train.models import State
from gradwire_lab.train.vmap_layers import WideLayers, interleave_channels

States = list[list[State]]  # by worker
# (model, examples, targets, what a recurrent model remembers) -> the mean loss, and the memory after.
Objective = Callable[[Callable[..., Any], Tensor, Tensor, State | None], tuple[Tensor, State | None]]


class Unsupported(ValueError):
    """`torch.func` cannot map this model over workers."""


@dataclass
class BatchedPass:
    """One pass for all.

    Attributes:
        objective: What to derive.
        scaled: Multiplies a loss by the scale of a GradScaler.
        tables: The parameters of each lane.
        rows: Where their gradients are wanted, [workers, ...], lane by lane.
        max_norm: The longest gradient that a worker may have; None: any.
        graphs: Whether passes may be captured as CUDA graphs.
        parts: How many passes a worker makes in a step.
        scale: What the loss was scaled by, if it is asked for how much the passes of a worker differ.
        moments: By worker and name, the sum over its passes of (gradient / parts)^2; the next pass overwrites it.
    """

    workers: LocalWorkers
    objective: Objective
    scaled: Callable[[Tensor], Tensor]
    tables: Sequence[Segments]
    rows: Sequence[Tensor]
    max_norm: Callable[[], Tensor | float] | None
    graphs: bool
    parts: int = 1
    scale: Callable[[], Tensor | float] | None = None

    def __post_init__(self) -> None:
        self.num_batches = len(self.workers.wires) * self.parts
        self._runs: dict[torch.Size, Callable[[Tensor, Tensor], Tensor]] = {}
        self._stacked = self.workers.stacked_buffers()
        self._state: State | None = None
        self._shown: States = []
        self._grads: list[Grads] = [{**own} for own in self._by_worker(self.rows)]
        self._apart = self.rows if self.parts == 1 else [x.new_empty(self.num_batches, x.shape[1]) for x in self.rows]
        self._seen = [] if self.scale is None else [torch.empty_like(rows) for rows in self.rows]
        self.moments = [] if self.scale is None else self._by_worker(self._seen)
        self._into = self._by_name(self._apart)
        named = self.workers.wire.parameters
        for p in named.values():
            p.data = p.data.contiguous()  # as gradients are: an optimizer then takes them all at once
        self._leaves = {
            name: named[name].detach().expand(self.num_batches, *named[name].shape).requires_grad_()
            for name in self._into
        }

    def __call__(self, batch: Batch, states: States) -> tuple[list[Grads], Tensor, States]:
        """Every worker's gradients, which the next pass overwrites, the mean of their losses, and their memories.

        Raises:
            Unsupported: The first pass failed; nothing has changed.
        """
        inputs, targets = batch
        self._recall(len(inputs), states)
        if inputs.shape not in self._runs:
            self._runs[inputs.shape] = self._prepared(inputs, targets)
        return self._grads, self._runs[inputs.shape](inputs, targets), self._shown

    def _recall(self, columns: int, states: States) -> None:
        """Let the memory be what the caller has; nothing has to be done where it still has ours."""
        start: Callable[[int], State] | None = getattr(self.workers.model, "start", None)
        if start is None or (states is self._shown and self._state is not None):
            return
        if self._state is None:
            self._state = start(columns)
            apart = list(zip(*(part.chunk(self.num_batches, 1) for part in self._state), strict=True))
            self._shown = [apart[i : i + self.parts] for i in range(0, self.num_batches, self.parts)]
        pairs = [pair for own in states for pair in own]
        given = tuple(torch.cat(parts, 1) for parts in zip(*pairs, strict=True)) if pairs else start(columns)
        for part, new in zip(self._state, given, strict=True):
            part.copy_(new)

    def _prepared(self, inputs: Tensor, targets: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """Try a pass, and capture it; that leaves no trace in statistics and memories."""
        changing = [*self._stacked.values(), *(self._state or ())]
        before = [x.clone() for x in changing]
        try:
            self._pass(inputs, targets)
            return CapturedPass(self._pass, inputs, targets) if self.graphs else self._pass
        except RuntimeError as wrong:
            why = " ".join(str(wrong).split())
            raise Unsupported(f"workers cannot pass together ({why}); use train.passes = 'sequential'") from None
        finally:
            for x, old in zip(changing, before, strict=True):
                x.copy_(old)

    def _pass(self, inputs: Tensor, targets: Tensor) -> Tensor:
        model = self.workers.model.train()
        x, y = (each.unflatten(0, (self.num_batches, -1)) for each in (inputs, targets))
        x = interleave_channels(x) if x.dim() == 5 else x
        state = [part.unflatten(1, (self.num_batches, -1)) for part in self._state or ()]

        def one(parameters: Any, buffers: Any, x: Tensor, y: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
            def call(*arguments: Any) -> Any:
                return functional_call(model, (parameters, buffers), arguments)

            loss, after = self.objective(call, x, y, (state[0], state[1]) if state else None)
            return loss, *(after or ())

        columns = (1,) * len(state)
        with WideLayers():
            mapped = vmap(one, (0, 0, 0, 0, *columns), (0, *columns), randomness="different")
            losses, *after = mapped(self._leaves, self._stacked, x, y, *state)
        grads = torch.autograd.grad(self.scaled(losses).sum() / self.parts, list(self._leaves.values()))
        for into, grad in zip(self._into.values(), grads, strict=True):
            into.copy_(grad)
        self._close([part.flatten(1, 2) for part in after])
        return losses.detach().mean()

    @torch.no_grad()
    def _close(self, after: Sequence[Tensor]) -> None:
        for part, new in zip(self._state or (), after, strict=True):
            part.copy_(new)
        self._add_up()
        if self.max_norm is not None:
            norms = torch.stack([rows.norm(dim=1) for rows in self.rows]).norm(dim=0)
            factors = (self.max_norm() / (norms + 1e-6)).clamp(max=1.0)
            for rows in self.rows:
                rows.mul_(factors[:, None])
            for seen in self._seen:
                seen.mul_(factors[:, None].square())

    def _add_up(self) -> None:
        """Each worker's gradient from those of its passes, and how much these differ."""
        for rows, apart in zip(self.rows, self._apart, strict=True):
            if apart is not rows:
                torch.sum(apart.unflatten(0, (-1, self.parts)), 1, out=rows)
        for seen, apart in zip(self._seen, self._apart, strict=False):
            assert self.scale is not None
            torch.sum((apart / self.scale()).square_().unflatten(0, (-1, self.parts)), 1, out=seen)

    def _by_name(self, lanes: Sequence[Tensor]) -> dict[str, Tensor]:
        """Each parameter's part of rows such as those of gradients: views."""
        return {
            name: part.view(len(rows), *shape)
            for table, rows in zip(self.tables, lanes, strict=True)
            for name, shape, part in zip(table.names, table.shapes, rows.split(list(table.lengths), dim=1), strict=True)
        }

    def _by_worker(self, lanes: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        views = self._by_name(lanes)
        return [{name: view[i] for name, view in views.items()} for i in range(len(self.workers.wires))]
