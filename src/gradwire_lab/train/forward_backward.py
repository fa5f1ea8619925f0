"""Passes: forward and backward of every worker in this process, through one model: together, or one after another.

Several workers on a GPU pass together, unless `torch.func` cannot map the model over them. Random numbers of a pass
(dropout) depend on (seed, step, rank) only, so a resumed run draws what it would have drawn, and a virtual worker that
passes by itself draws what a real one does. On a GPU, passes are captured once as CUDA graphs and replayed: the host
then has nothing to do but to compress.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gradwire.core.segments import Segments
from gradwire_lab.train.batched_pass import BatchedPass, Unsupported
from gradwire_lab.train.compression import tests_variance
from gradwire_lab.train.cuda_graphs import CapturedWorkerPass
from gradwire_lab.train.data import IGNORED, Batch
from gradwire_lab.train.gradient_variance import GradientVariance
from gradwire_lab.train.loading import recurrent
from gradwire_lab.train.local_workers import Grads, LocalWorkers
from gradwire_lab.train.models import MODELS, State, transform_of
from gradwire_lab.train.optimizers import clip_
from gradwire_lab.train.precision import autocast, reseed
from gradwire_lab.train.recipe import Recipe

States = list[State]  # of a worker's passes within a step


@dataclass
class Passes:
    """All backward passes of a step.

    Attributes:
        states: What a recurrent model remembers, by worker; empty before the first step of an epoch.
    """

    recipe: Recipe
    workers: LocalWorkers
    states: list[States] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = self.workers.model
        self.device = self.workers.rank_info.device
        self._recurrent = recurrent(self.model)
        self._transform = transform_of(self.model, training=True)
        self._observed = self.recipe.train.accumulate > 1 and tests_variance(self.recipe)
        self._recorded: list[CapturedWorkerPass] = []
        self._rows: list[Tensor] = []
        self._batched = self._goes_together()
        self._together: BatchedPass | None = None

    def __call__(self, batch: Batch, step: int) -> tuple[list[Grads], Tensor]:
        """Every worker's gradients, and the mean of their losses, still on the device."""
        if self._batched:
            reseed(self.recipe.train.seed, step, self.workers.rank_info.ranks[0], self.device)
            try:
                together = self._formed()
                grads, loss, self.states = together(batch, self.states)
                for wire, seen in zip(self.workers.wires, together.moments, strict=False):
                    wire.observe(seen)
                return grads, loss
            except Unsupported:
                if self.recipe.train.passes == "together":
                    raise
                self._batched = False
        return self._sequential(batch, step)

    def _sequential(self, batch: Batch, step: int) -> tuple[list[Grads], Tensor]:
        shares = self._shares(batch)
        if self._recurrent and not self.states:
            self.states = [self._start(share) for share in shares]
        if self._records():
            self._record(shares)
        grads, losses = [], []
        for i, share in enumerate(shares):
            reseed(self.recipe.train.seed, step, self.workers.rank_info.ranks[i], self.device)
            states = self.states[i] if self._recurrent else []
            if self._recorded and self._recorded[i].fits(share, states):
                own, loss, states = self._recorded[i](share, states)
            else:
                own, loss, states = self.one(i, share, states)
            if self._recurrent:
                self.states[i] = states
            grads.append(own)
            losses.append(loss)
        return grads, torch.stack(losses).mean()

    def one(self, worker: int, share: Batch, states: States) -> tuple[Grads, Tensor, States]:
        """One worker's gradients, loss and states; the passes of a step are added up and divided by their number."""
        if len(self.workers.buffers) > 1:
            self.workers.use_buffers(self.workers.buffers[worker])
        self.model.train()
        self.model.zero_grad(set_to_none=True)
        passes = self.recipe.train.accumulate
        losses, after = [], []
        with GradientVariance(self.workers.wires[worker], self._observed) as moments:
            for i, (inputs, targets) in enumerate(_parts(share, passes)):
                loss, state = self._loss(self.model, self._laid(inputs), targets, states[i] if states else None)
                (self._scaled(loss) / passes).backward()
                moments.take_(self._scale)
                losses.append(loss.detach())
                if state is not None:
                    after.append(state)
            grads = self._laid_out(worker, {name: p.grad for name, p in self.workers.wire.parameters.items()})
            self.model.zero_grad(set_to_none=True)
            if self.recipe.optimizer.local_clip:
                moments.shrink_(clip_(grads.values(), self._max_norm))
        return grads, torch.stack(losses).mean(), after

    def _laid(self, inputs: Tensor) -> Tensor:
        inputs = inputs if self._transform is None else self._transform(inputs)
        channels_last = self.recipe.train.channels_last and inputs.dim() == 4
        return inputs.contiguous(memory_format=torch.channels_last) if channels_last else inputs

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

    # -- together --------------------------------------------------------------------------------------------------

    def _goes_together(self) -> bool:
        plan = self.recipe.train
        apart = self._observed and not self.workers.buffers[0]  # statistics would have to be updated in turn
        alone = [
            ("train.accumulate > 1", plan.accumulate > 1 and not apart),
            ("an input_transform", self._transform is not None),
            ("real workers", len(self.workers.wires) == 1 and not self.workers.rank_info.virtual),
        ]
        barred = [name for name, holds in alone if holds]
        if plan.passes == "together" and barred:
            raise ValueError(f"{barred[0]} and train.passes = 'together' do not go together; leave train.passes out")
        known = self.device.type == "cuda" and self.recipe.model.name in MODELS and len(self.workers.wires) > 1
        return not barred and (plan.passes == "together" or (plan.passes == "auto" and known))

    def _formed(self) -> BatchedPass:
        tables, known = self._tables(), self._together
        if known is None or known.rows is not self._rows or known.tables != tables:
            graphs = self.device.type == "cuda" and self.recipe.train.graphs
            max_norm = (lambda: self._max_norm) if self.recipe.optimizer.local_clip else None
            observed = (self.recipe.train.accumulate, lambda: self._scale) if self._observed else ()
            known = self._together = BatchedPass(
                self.workers, self._loss, self._scaled, tables, self._rows, max_norm, graphs, *observed
            )
        return known

    def _laid_out(self, worker: int, grads: Grads) -> Grads:
        """The same where its lane wants it, lane by lane and worker by worker: a recording does it, and nobody else.

        The next pass of the worker overwrites it.
        """
        if any(grad is None or grad.dtype != torch.float32 for grad in grads.values()):
            return {name: None if grad is None else grad.contiguous() for name, grad in grads.items()}
        laid: Grads = {}
        for table, rows in zip(self._tables(), self._rows, strict=True):
            parts = [grad.flatten() for name in table.names if (grad := grads[name]) is not None]
            pieces = torch.cat(parts, out=rows[worker]).split(list(table.lengths))
            laid |= {
                name: piece.view(shape) for name, shape, piece in zip(table.names, table.shapes, pieces, strict=True)
            }
        return laid

    def _tables(self) -> list[Segments]:
        """The lanes' parameters; and room for the gradients of all workers."""
        tables = [lane.tensors for lane in self.workers.wire.executor.engine.whole.lanes]
        sizes = [(len(self.workers.wires), table.total) for table in tables]
        if [rows.shape for rows in self._rows] != sizes:
            self._rows = [torch.empty(size, device=self.device) for size in sizes]
        return tables

    # -- scaling, seeding, splitting -------------------------------------------------------------------------------

    def _scaled(self, loss: Tensor) -> Tensor:
        scaler = self.workers.wire.scaler
        return loss if scaler is None else scaler.scale(loss)

    @property
    def _scale(self) -> Tensor | float:
        scaler = self.workers.wire.scaler
        return 1.0 if scaler is None else scaler._get_scale_async()  # type: ignore[return-value]

    @property
    def _max_norm(self) -> Tensor | float:
        return self.recipe.optimizer.local_clip * self._scale

    def _shares(self, batch: Batch) -> list[Batch]:
        num = len(self.workers.rank_info.ranks)
        return [Batch(*share) for share in zip(batch.inputs.chunk(num), batch.targets.chunk(num), strict=True)]

    def _start(self, share: Batch) -> States:
        begin: Callable[[int], State] = self.model.start  # type: ignore[assignment]
        return [begin(len(inputs)) for inputs, _ in _parts(share, self.recipe.train.accumulate)]

    # -- recording -------------------------------------------------------------------------------------------------

    def _records(self) -> bool:
        wanted = self.recipe.train.graphs and not self._observed
        return self.device.type == "cuda" and wanted and not self._recorded

    def _record(self, shares: Sequence[Batch]) -> None:
        """Record every worker's pass; warming up must leave no trace in its statistics."""
        kept = [{name: x.clone() for name, x in own.items()} for own in self.workers.buffers]
        for i, share in enumerate(shares):
            states = self.states[i] if self._recurrent else []
            pool = self._recorded[0].pool if self._recorded else None
            self._recorded.append(CapturedWorkerPass(self.one, i, share, states, pool))
        for own, old in zip(self.workers.buffers, kept, strict=True):
            for name, x in own.items():
                x.copy_(old[name])


def _parts(share: Batch, passes: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(share.inputs.chunk(passes), share.targets.chunk(passes), strict=True)
