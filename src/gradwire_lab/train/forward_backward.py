"""Passes: forward and backward of every worker in this process, through one model: together, or one after another.

Random numbers of a pass (dropout) depend on (seed, step, rank) only, so a resumed run draws what it would have drawn,
and a simulated worker that passes by itself draws what a real one does. On a GPU, passes are captured once as CUDA
graphs and replayed: the host then has nothing to do but to compress.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradwire_lab.train.batched_pass import BatchedPass, Unsupported
from gradwire_lab.train.cuda_graphs import CapturedPass
from gradwire_lab.train.data.images import Batch
from gradwire_lab.train.data.sequences import IGNORED
from gradwire_lab.train.loading import recurrent
from gradwire_lab.train.models.lstm import State
from gradwire_lab.train.models.regime import transform_of
from gradwire_lab.train.optimizers import clip_
from gradwire_lab.train.precision import autocast, reseed
from gradwire_lab.train.recipe import Recipe
from gradwire_lab.train.workers import Grads, Workers, views

States = list[State]  # of a worker's passes within a step
Outcome = tuple[Grads, Tensor, States]
Observe = Callable[[int, dict[str, Tensor]], None]


@dataclass
class Passes:
    """All backward passes of a step.

    Attributes:
        mode: ``together``, ``sequential``, or ``together_if_possible``.
        observe: Called with a worker, and the second moments of its passes, if these are asked for.
        states: What a recurrent model remembers, by worker; empty before the first step of an epoch.
    """

    recipe: Recipe
    workers: Workers
    mode: str
    observe: Observe | None = None
    states: list[States] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = self.workers.model
        self.device = self.workers.rank_info.device
        self._recurrent = recurrent(self.model)
        self._transform = transform_of(self.model, training=True) or (lambda inputs: inputs)
        self._graphs = self.device.type == "cuda" and self.recipe.train.graphs
        self._captured: list[CapturedPass[Outcome]] = []
        self._batched = self.mode != "sequential"
        self._batched_pass: BatchedPass | None = None

    def __call__(self, batch: Batch, step: int) -> tuple[list[Grads], Tensor]:
        """Every worker's gradients, and the mean of their losses, still on the device."""
        if self._batched:
            try:
                return self._together(batch, step)
            except Unsupported:
                if self.mode == "together":
                    raise
                self._batched = False
        return self._sequential(batch, step)

    # -- together --------------------------------------------------------------------------------------------------

    def _together(self, batch: Batch, step: int) -> tuple[list[Grads], Tensor]:
        reseed(self.recipe.train.seed, step, self.workers.rank_info.ranks[0], self.device)
        batch = Batch(self._transform(batch.inputs), batch.targets)
        accumulate, run = self.recipe.train.accumulate, self._batched_run()
        if accumulate == 1 or self.observe is not None:
            grads, loss, self.states = run(batch, self.states)
            for worker, moments in enumerate(run.moments):
                assert self.observe is not None
                self.observe(worker, moments)
            return grads, loss
        shares = [_split(share, accumulate) for share in _split(batch, len(self.workers.buffers))]
        sums, mean_loss = [torch.zeros_like(rows) for rows in run.rows], torch.zeros((), device=self.device)
        for parts in zip(*shares, strict=True):  # one of each worker
            grads, loss, _ = run(Batch(*map(torch.cat, zip(*parts, strict=True))), [])
            mean_loss += loss / accumulate
            torch._foreach_add_(sums, list(run.rows))
        for rows, whole in zip(run.rows, sums, strict=True):
            torch.div(whole, accumulate, out=rows)
        return grads, mean_loss

    def _batched_run(self) -> BatchedPass:
        known, (tables, rows) = self._batched_pass, self.workers.gradient_rows()
        if known is None or known.rows is not rows or known.tables != tables:
            parts = 1 if self.observe is None else self.recipe.train.accumulate
            observed = self.observe is not None
            known = BatchedPass(self.workers, self._loss, tables, rows, self._graphs, parts, observed)
            self._batched_pass = known
        return known

    # -- one after another -----------------------------------------------------------------------------------------

    def _sequential(self, batch: Batch, step: int) -> tuple[list[Grads], Tensor]:
        shares = _split(batch, len(self.workers.buffers))
        if self._recurrent and not self.states:
            self.states = [self._start(share) for share in shares]
        if self._graphs and self.observe is None and not self._captured:
            self._capture(shares)
        grads, losses = [], []
        for i, share in enumerate(shares):
            reseed(self.recipe.train.seed, step, self.workers.rank_info.ranks[i], self.device)
            given = self._inputs(i, share)
            fits = bool(self._captured) and self._captured[i].fits(*given)
            own, loss, states = self._captured[i](*given) if fits else self.one(i, *given)
            if self._recurrent:  # captured passes share memory: that of the next worker may lie over these
                self.states[i] = [(hidden.clone(), cell.clone()) for hidden, cell in states] if fits else states
            grads.append(own)
            losses.append(loss)
        return grads, torch.stack(losses).mean()

    def one(self, worker: int, inputs: Tensor, targets: Tensor, *states: Tensor) -> Outcome:
        """One worker's gradients, loss and states; the passes of a step are added up and divided by their number."""
        self.workers.select(worker)
        self.model.train()
        self.model.zero_grad(set_to_none=True)
        passes = self.recipe.train.accumulate
        before: Sequence[State | None] = list(zip(states[::2], states[1::2], strict=True)) or [None] * passes
        losses, after = [], []
        variance = GradientVariance(self.workers.parameters)
        for part, state in zip(_split(Batch(inputs, targets), passes), before, strict=True):
            loss, state = self._loss(self.model, self._channels_last(self._transform(part.inputs)), part.targets, state)
            (self.workers.scaled(loss) / passes).backward()
            if self.observe is not None:
                variance.add(self.workers.loss_scale)
            losses.append(loss.detach())
            if state is not None:
                after.append(state)
        grads = self._laid_out(worker, {name: p.grad for name, p in self.workers.parameters.items()})
        self.model.zero_grad(set_to_none=True)
        if self.workers.local_clip:
            variance.scale(clip_(grads.values(), self.workers.local_clip * self.workers.loss_scale))
        if self.observe is not None:
            self.observe(worker, variance.moments)
        return grads, torch.stack(losses).mean(), after

    def _laid_out(self, worker: int, grads: Grads) -> Grads:
        """The same where the exchange wants them, which the next pass of the worker overwrites."""
        if self.workers.zero_missing:
            whole = {
                name: torch.zeros_like(self.workers.parameters[name]) if x is None else x for name, x in grads.items()
            }
        else:
            whole = {name: x for name, x in grads.items() if x is not None and x.dtype == torch.float32}
        if len(whole) < len(grads):
            return {name: None if grad is None else grad.contiguous() for name, grad in grads.items()}
        laid: Grads = {}
        for table, rows in zip(*self.workers.gradient_rows(), strict=True):
            torch.cat([whole[name].flatten() for name in table.names], out=rows[worker])
            laid |= views(table, rows[worker])
        return laid

    def _channels_last(self, inputs: Tensor) -> Tensor:
        channels_last = self.recipe.train.channels_last and inputs.dim() == 4
        return inputs.contiguous(memory_format=torch.channels_last) if channels_last else inputs

    def _start(self, share: Batch) -> States:
        begin: Callable[[int], State] = self.model.start  # type: ignore[assignment]
        return [begin(len(part.inputs)) for part in _split(share, self.recipe.train.accumulate)]

    def _inputs(self, worker: int, share: Batch) -> list[Tensor]:
        states = self.states[worker] if self._recurrent else []
        return [*share, *(x for pair in states for x in pair)]

    def _capture(self, shares: Sequence[Batch]) -> None:
        """Capture every worker's pass; warming up must leave no trace in its statistics."""
        before = {name: x.clone() for name, x in self.workers.stacked_buffers.items()}
        for i, share in enumerate(shares):
            pool = self._captured[0].pool if self._captured else None
            self._captured.append(CapturedPass(partial(self.one, i), *self._inputs(i, share), pool=pool))
        for name, x in self.workers.stacked_buffers.items():
            x.copy_(before[name])

    # -- loss ------------------------------------------------------------------------------------------------------

    def _loss(
        self, model: Callable[..., Any], inputs: Tensor, targets: Tensor, state: State | None
    ) -> tuple[Tensor, State | None]:
        with autocast(self.device, self.recipe.train.precision, cache=False):
            if state is None:
                logits = model(inputs)
            else:
                logits, (hidden, cell) = model(inputs, state)
                state = hidden.detach(), cell.detach()
            smoothing = self.recipe.train.label_smoothing
            loss = F.cross_entropy(
                logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, label_smoothing=smoothing
            )
        return loss, state


def _split(batch: Batch, parts: int) -> list[Batch]:
    return [Batch(*part) for part in zip(batch.inputs.chunk(parts), batch.targets.chunk(parts), strict=True)]


class GradientVariance:
    """Second moments of what the passes of one worker add to the gradients, for the variance-based selector.

    The paper sums (g_z / B)^2 over the samples z of a batch of B. Here the M passes of a step stand for the samples:
    each leaves g_m / M in the gradients, whose square is added.

    Attributes:
        moments: By parameter.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters, self.moments = parameters, dict[str, Tensor]()
        self._before: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, scale: Tensor | float) -> None:
        """Add the last pass, in units of the unscaled loss."""
        for name, p in self.parameters.items():
            if p.grad is not None:
                added = p.grad - self._before.get(name, 0.0)
                self._before[name] = p.grad.clone()
                self.moments[name] = self.moments.get(name, 0.0) + (added / scale).square()

    def scale(self, factor: Tensor) -> None:
        """The gradients were multiplied by that after they had been added."""
        for moment in self.moments.values():
            moment.mul_(factor.square())
