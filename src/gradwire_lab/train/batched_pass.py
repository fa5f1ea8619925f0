"""Batched pass: one forward and backward for all workers of a process, which `torch.func` maps over their batches.

Parameters are one for each worker: workers that share a model expand them, without a copy. What is derived is each
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
from gradwire_lab.train.data.images import Batch
from gradwire_lab.train.models.lstm import State
from gradwire_lab.train.vmap_layers import WideLayers, interleave_channels
from gradwire_lab.train.workers import Grads, Workers, views

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
        tables: Parameters, as they lie in
        rows: where their gradients are wanted, [workers, ...].
        graphs: Whether passes may be captured as CUDA graphs.
        parts: How many passes a worker makes in a step.
        observed: Whether it is asked for how much the passes of a worker differ.
        moments: By worker and name, the sum over its passes of (gradient / parts)^2; the next pass overwrites it.
    """

    workers: Workers
    objective: Objective
    tables: Sequence[Segments]
    rows: Sequence[Tensor]
    graphs: bool
    parts: int = 1
    observed: bool = False

    def __post_init__(self) -> None:
        self.num_batches = len(self.workers.buffers) * self.parts
        self._runs: dict[torch.Size, Callable[..., Tensor]] = {}
        self._state: State | None = None
        self._shown: States = []
        self._grads: list[Grads] = [{**own} for own in self._by_worker(self.rows)]
        self._apart = self.rows if self.parts == 1 else [x.new_empty(self.num_batches, x.shape[1]) for x in self.rows]
        self._squares = [torch.empty_like(rows) for rows in self.rows] if self.observed else []
        self.moments = self._by_worker(self._squares) if self.observed else []
        self._into = self._by_name(self._apart)
        leaves = self.workers.leaves(self.num_batches)
        self._leaves = {name: leaves[name] for name in self._into}

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

    def _prepared(self, inputs: Tensor, targets: Tensor) -> Callable[..., Tensor]:
        """Try a pass, and capture it; that leaves no trace in statistics and memories."""
        changing = [*self.workers.stacked_buffers.values(), *(self._state or ())]
        before = [x.clone() for x in changing]
        try:
            self._pass(inputs, targets)
            return CapturedPass(self._pass, inputs, targets) if self.graphs else self._pass
        except RuntimeError as error:
            why = " ".join(str(error).split())
            raise Unsupported(
                f"workers cannot pass together ({why}); use train.passes = 'sequential', or with gossip gossip.passes"
            ) from None
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
            losses, *after = mapped(self._leaves, self.workers.stacked_buffers, x, y, *state)
        loss, leaves = self.workers.scaled(losses).sum() / self.parts, list(self._leaves.values())
        grads = torch.autograd.grad(loss, leaves, materialize_grads=self.workers.zero_missing)
        for into, grad in zip(self._into.values(), grads, strict=True):
            into.copy_(grad)
        self._close([part.flatten(1, 2) for part in after])
        return losses.detach().mean()

    @torch.no_grad()
    def _close(self, after: Sequence[Tensor]) -> None:
        for part, new in zip(self._state or (), after, strict=True):
            part.copy_(new)
        self._add_up()
        if self.workers.local_clip:
            max_norm = self.workers.local_clip * self.workers.loss_scale
            norms = torch.stack([rows.norm(dim=1) for rows in self.rows]).norm(dim=0)
            factors = (max_norm / (norms + 1e-6)).clamp(max=1.0)[:, None]
            for rows in self.rows:
                rows.mul_(factors)
            for squares in self._squares:
                squares.mul_(factors.square())

    def _add_up(self) -> None:
        """Each worker's gradient from those of its passes, and how much these differ."""
        for rows, apart in zip(self.rows, self._apart, strict=True):
            if apart is not rows:
                torch.sum(apart.unflatten(0, (-1, self.parts)), 1, out=rows)
        for squares, apart in zip(self._squares, self._apart, strict=False):
            each = (apart / self.workers.loss_scale).square_()
            torch.sum(each.unflatten(0, (-1, self.parts)), 1, out=squares)

    def _by_name(self, lanes: Sequence[Tensor]) -> dict[str, Tensor]:
        """Each parameter's part of rows such as those of gradients: views."""
        pairs = zip(self.tables, lanes, strict=True)
        return {name: view for table, rows in pairs for name, view in views(table, rows).items()}

    def _by_worker(self, lanes: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        by_name = self._by_name(lanes)
        return [{name: view[i] for name, view in by_name.items()} for i in range(len(self.workers.buffers))]
