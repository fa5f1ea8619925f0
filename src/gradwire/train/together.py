"""Together: the pass of all workers of a process through their one model, `Abreast`, as one recorded batch.

Random numbers (dropout) are drawn for all workers at once: they depend on (seed, step), but are not those that a worker
by itself would draw.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.core.segments import Segments
from gradwire.train.abreast import Abreast
from gradwire.train.crew import Crew, Grads
from gradwire.train.data import Batch
from gradwire.train.graphs import Recording
from gradwire.train.models import State

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
    """

    crew: Crew
    objective: Objective
    tables: Sequence[Segments]
    rows: Sequence[Tensor]
    longest: Callable[[], Tensor | float] | None
    graphs: bool

    def __post_init__(self) -> None:
        self._runs: dict[torch.Size, Callable[[Tensor, Tensor], Tensor]] = {}
        self._stacked = self.crew.stacked_buffers()
        self._rectified: frozenset[int] = frozenset()
        self._state: State | None = None
        self._shown: States = []
        for p in self.crew.wire.parameters.values():
            p.data = p.data.contiguous()  # as gradients are: an optimizer then takes them all at once
        places = self._places()
        self._grads: list[Grads] = [{name: place[i] for name, place in places.items()} for i in range(self.workers)]
        self._by_identity = {id(self.crew.wire.parameters[name]): place for name, place in places.items()}

    @property
    def workers(self) -> int:
        return len(self.crew.wires)

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
            apart = [part.chunk(self.workers, 1) for part in self._state]
            self._shown = [[(h, c)] for h, c in zip(*apart, strict=True)]
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
        with Abreast(self.workers, self._by_identity, kept, frozenset() if tries else self._rectified) as mode:
            loss, scaled, after = self.objective(inputs, targets, self._state)
        self._check(mode)
        if tries:
            self._rectified = mode.rectifiable
        (scaled * self.workers).backward()  # the mean over all is the workers' mean over their number
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
        if self.longest is not None:
            norms = torch.stack([rows.norm(dim=1) for rows in self.rows]).norm(dim=0)
            factors = (self.longest() / (norms + 1e-6)).clamp(max=1.0)
            for rows in self.rows:
                rows.mul_(factors[:, None])

    def _check(self, mode: Abreast) -> None:
        missed = [name for name, p in self.crew.wire.parameters.items() if id(p) not in mode.served]
        if mode.strange or missed:
            met = sorted(mode.strange) or [f"{missed[0]}, which is used in none of the known ways"]
            raise Strange(f"workers cannot pass together through {met[0]}; use train.passes = 'in turn'")

    def _check_grads(self) -> None:
        for name, p in self.crew.wire.parameters.items():
            if p.grad is not None:
                raise Strange(f"{name} is used in more ways than one; use train.passes = 'in turn'")

    def _places(self) -> dict[str, Tensor]:
        """Each parameter's gradients, [workers, ...]: views of the rows."""
        return {
            name: part.view(len(rows), *shape)
            for table, rows in zip(self.tables, self.rows, strict=True)
            for name, shape, part in zip(table.names, table.shapes, rows.split(list(table.lengths), dim=1), strict=True)
        }


def _joined(states: States) -> State | None:
    """All workers' memories side by side."""
    if not states:
        return None
    h, c = (torch.cat([own[0][i] for own in states], 1) for i in range(2))
    return h, c
