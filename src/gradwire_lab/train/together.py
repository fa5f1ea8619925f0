"""Together: the pass of all workers of a process through their one model, `Abreast`, as one recorded batch.

Where a worker makes several passes in a step, and how much they differ is asked for, these go side by side as well.

Random numbers (dropout) are drawn for all workers at once: they depend on (seed, step), but are not those that a worker
by itself would draw.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.core.segments import Segments
from gradwire_lab.train.abreast import Abreast
from gradwire_lab.train.crew import Crew, Grads
from gradwire_lab.train.data import Batch
from gradwire_lab.train.graphs import Recording
from gradwire_lab.train.models import State

States = list[list[State]]  # by worker
# Examples, targets and what a recurrent model remembers -> the mean loss, the same scaled, and the memory after.
Objective = Callable[[Tensor, Tensor, State | None], tuple[Tensor, Tensor, State | None]]


class Strange(ValueError):
    """A model does something that is right only if each worker does it by itself."""


@dataclass
class Together:
    """One pass for all.

    Attributes:
        objective: What to derive.
        tables: The parameters of each lane.
        rows: Where their gradients are wanted, [workers, ...], lane by lane.
        longest: The longest gradient that a worker may have; None: any.
        graphs: Whether passes may be recorded.
        parts: How many passes a worker makes in a step; they go side by side as workers do.
        scale: What the loss was scaled by, if it is wanted how much the passes of a worker differ.
        moments: By worker and name, the sum over its passes of (gradient / parts)^2; the next pass overwrites it.
    """

    crew: Crew
    objective: Objective
    tables: Sequence[Segments]
    rows: Sequence[Tensor]
    longest: Callable[[], Tensor | float] | None
    graphs: bool
    parts: int = 1
    scale: Callable[[], Tensor | float] | None = None

    def __post_init__(self) -> None:
        self._runs: dict[torch.Size, Callable[[Tensor, Tensor], Tensor]] = {}
        self._stacked = self.crew.stacked_buffers()
        self._rectified: frozenset[int] = frozenset()
        self._state: State | None = None
        self._shown: States = []
        for p in self.crew.wire.parameters.values():
            p.data = p.data.contiguous()  # as gradients are: an optimizer then takes them all at once
        self._grads: list[Grads] = [{**own} for own in self._by_worker(self.rows)]
        self._apart = self.rows if self.parts == 1 else [_taller(rows, self.parts) for rows in self.rows]
        self._seen = [] if self.scale is None else [torch.empty_like(rows) for rows in self.rows]
        self.moments = [] if self.scale is None else self._by_worker(self._seen)
        self._by_identity = {id(self.crew.wire.parameters[name]): x for name, x in self._places(self._apart).items()}

    @property
    def workers(self) -> int:
        return len(self.crew.wires)

    @property
    def voices(self) -> int:
        """All passes of all workers."""
        return self.workers * self.parts

    def __call__(self, batch: Batch, states: States) -> tuple[list[Grads], Tensor, States]:
        """Every worker's gradients, which the next pass overwrites, the mean of their losses, and their memories.

        Raises:
            Strange: The first pass met something that it cannot do; nothing has changed.
        """
        inputs, targets = batch
        self._recall(len(inputs), states)
        if inputs.shape not in self._runs:
            self._runs[inputs.shape] = self._prepared(inputs, targets)
        return self._grads, self._runs[inputs.shape](inputs, targets), self._shown

    def _recall(self, columns: int, states: States) -> None:
        """Let the memory be what the caller has; nothing has to be done where it still has ours."""
        start: Callable[[int], State] | None = getattr(self.crew.model, "start", None)
        if start is None or (states is self._shown and self._state is not None):
            return
        if self._state is None:
            self._state = start(columns)
            apart = list(zip(*(part.chunk(self.voices, 1) for part in self._state), strict=True))
            self._shown = [apart[i : i + self.parts] for i in range(0, self.voices, self.parts)]
        for part, given in zip(self._state, _joined(states) or start(columns), strict=True):
            part.copy_(given)

    def _prepared(self, inputs: Tensor, targets: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """Try a pass, and record it; that leaves no trace in statistics and memories."""
        changing = [*self._stacked.values(), *(self._state or ())]
        kept = [x.clone() for x in changing]
        try:
            self._pass(inputs, targets, tries=True)
            return Recording(self._pass, inputs, targets) if self.graphs else self._pass
        except torch.OutOfMemoryError:
            raise Strange("there is no memory for all workers at once; use train.passes = 'in turn'") from None
        finally:
            for x, old in zip(changing, kept, strict=True):
                x.copy_(old)

    def _pass(self, inputs: Tensor, targets: Tensor, tries: bool = False) -> Tensor:
        self.crew.model.train()
        self.crew.model.zero_grad(set_to_none=True)
        kept = {id(self.crew.buffers[0][name]): x for name, x in self._stacked.items()}
        with Abreast(self.voices, self._by_identity, kept, frozenset() if tries else self._rectified) as mode:
            loss, scaled, after = self.objective(inputs, targets, self._state)
        self._check(mode)
        if tries:
            self._rectified = mode.rectifiable
        # The mean over all is the workers' mean over their number; that of a worker is a sum over its parts.
        (scaled * self.workers).backward()
        self._check_grads()
        self._close(after)
        return loss.detach()

    @torch.no_grad()
    def _close(self, after: State | None) -> None:
        for x in self._stacked.values():
            if not x.is_floating_point():
                x[1:] = x[:1]  # counters: all workers count the same passes
        for part, new in zip(self._state or (), after or (), strict=True):
            part.copy_(new)
        self._add_up()
        if self.longest is not None:
            norms = torch.stack([rows.norm(dim=1) for rows in self.rows]).norm(dim=0)
            factors = (self.longest() / (norms + 1e-6)).clamp(max=1.0)
            for rows in self.rows:
                rows.mul_(factors[:, None])
            for seen in self._seen:
                seen.mul_(factors[:, None].square())

    def _add_up(self) -> None:
        """Each worker's gradient from those of its passes, and how much these differ."""
        for rows, apart in zip(self.rows, self._apart, strict=True):
            if apart is not rows:
                torch.sum(apart.unflatten(0, (self.workers, self.parts)), 1, out=rows)
        for seen, apart in zip(self._seen, self._apart, strict=False):
            assert self.scale is not None
            torch.sum((apart / self.scale()).square_().unflatten(0, (self.workers, self.parts)), 1, out=seen)

    def _check(self, mode: Abreast) -> None:
        missed = [name for name, p in self.crew.wire.parameters.items() if id(p) not in mode.served]
        if mode.strange or missed:
            met = sorted(mode.strange) or [f"{missed[0]}, which is used in none of the known ways"]
            raise Strange(f"workers cannot pass together through {met[0]}; use train.passes = 'in turn'")

    def _check_grads(self) -> None:
        for name, p in self.crew.wire.parameters.items():
            if p.grad is not None:
                raise Strange(f"{name} is used in more ways than one; use train.passes = 'in turn'")

    def _places(self, lanes: Sequence[Tensor]) -> dict[str, Tensor]:
        """Each parameter's part of rows such as those of gradients: views."""
        return {
            name: part.view(len(rows), *shape)
            for table, rows in zip(self.tables, lanes, strict=True)
            for name, shape, part in zip(table.names, table.shapes, rows.split(list(table.lengths), dim=1), strict=True)
        }

    def _by_worker(self, lanes: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        places = self._places(lanes)
        return [{name: place[i] for name, place in places.items()} for i in range(self.workers)]


def _taller(rows: Tensor, times: int) -> Tensor:
    return rows.new_empty(len(rows) * times, rows.shape[1])


def _joined(states: States) -> State | None:
    """All workers' memories side by side."""
    if not states:
        return None
    h, c = (torch.cat([pair[i] for own in states for pair in own], 1) for i in range(2))
    return h, c
