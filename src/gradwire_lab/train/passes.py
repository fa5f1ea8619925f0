"""Passes: forward and backward of every worker in this process, through one model: together, or one after another.

Several workers on a GPU pass together, unless the model does something that only a worker by itself does right. Random
numbers of a pass (dropout) depend on (seed, step, rank) only, so a resumed run draws what it would have drawn, and a
virtual worker, in turn, what a real one does. On a GPU, passes are recorded once as CUDA graphs and replayed: the
host then has nothing to do but to compress.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from gradwire.core.segments import Segments
from gradwire_lab.train.compression import tests_variance
from gradwire_lab.train.crew import Crew, Grads
from gradwire_lab.train.data import IGNORED, Batch
from gradwire_lab.train.feed import recurrent
from gradwire_lab.train.graphs import Recorded
from gradwire_lab.train.models import MODELS, State, transform_of
from gradwire_lab.train.moments import Moments
from gradwire_lab.train.optim import clip_
from gradwire_lab.train.recipe import Recipe
from gradwire_lab.train.together import Strange, Together

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
States = list[State]  # of a worker's passes within a step


@dataclass
class Passes:
    """All backward passes of a step.

    Attributes:
        states: What a recurrent model remembers, by worker; empty before the first step of an epoch.
    """

    recipe: Recipe
    crew: Crew
    states: list[States] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = self.crew.model
        self.device = self.crew.place.device
        self._recurrent = recurrent(self.model)
        self._transform = transform_of(self.model, training=True)
        self._observed = self.recipe.train.accumulate > 1 and tests_variance(self.recipe)
        self._recorded: list[Recorded] = []
        self._rows: list[Tensor] = []
        self._abreast = self._goes_together()
        self._together: Together | None = None

    def __call__(self, batch: Batch, step: int) -> tuple[list[Grads], Tensor]:
        """Every worker's gradients, and the mean of their losses, still on the device."""
        if self._abreast:
            self._reseed(step, self.crew.place.ranks[0])
            try:
                together = self._formed()
                grads, loss, self.states = together(batch, self.states)
                for wire, seen in zip(self.crew.wires, together.moments, strict=False):
                    wire.observe(seen)
                return grads, loss
            except Strange:
                if self.recipe.train.passes == "together":
                    raise
                self._abreast = False
        return self._in_turn(batch, step)

    def _in_turn(self, batch: Batch, step: int) -> tuple[list[Grads], Tensor]:
        shares = self._shares(batch)
        if self._recurrent and not self.states:
            self.states = [self._start(share) for share in shares]
        if self._records():
            self._record(shares)
        grads, losses = [], []
        for i, share in enumerate(shares):
            self._reseed(step, self.crew.place.ranks[i])
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
        if len(self.crew.buffers) > 1:
            self.crew.install(self.crew.buffers[worker])
        self.model.train()
        self.model.zero_grad(set_to_none=True)
        passes = self.recipe.train.accumulate
        losses, after = [], []
        with Moments(self.crew.wires[worker], self._observed) as moments:
            for i, (inputs, targets) in enumerate(_parts(share, passes)):
                loss, state = self._loss(inputs, targets, states[i] if states else None)
                (self._scaled(loss) / passes).backward()
                moments.take_(self._scale)
                losses.append(loss.detach())
                if state is not None:
                    after.append(state)
            grads = self._laid_out(worker, {name: p.grad for name, p in self.crew.wire.parameters.items()})
            self.model.zero_grad(set_to_none=True)
            if self.recipe.optimizer.local_clip:
                moments.shrink_(clip_(grads.values(), self._longest))
        return grads, torch.stack(losses).mean(), after

    def _loss(self, inputs: Tensor, targets: Tensor, state: State | None) -> tuple[Tensor, State | None]:
        dtype = DTYPES.get(self.recipe.train.precision)
        if self._transform is not None:
            inputs = self._transform(inputs)
        if self.recipe.train.channels_last and inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        with torch.autocast(self.device.type, dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=False):
            if state is None:
                logits = self.model(inputs)
            else:
                logits, (hidden, cell) = self.model(inputs, state)
                state = hidden.detach(), cell.detach()
            smoothing = self.recipe.train.label_smoothing
            loss = F.cross_entropy(
                logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, label_smoothing=smoothing
            )
        return loss, state

    # -- together --------------------------------------------------------------------------------------------------

    def _goes_together(self) -> bool:
        plan = self.recipe.train
        apart = self._observed and not self.crew.buffers[0]  # statistics would have to be updated in turn
        alone = [
            ("train.accumulate > 1", plan.accumulate > 1 and not apart),
            ("an input_transform", self._transform is not None),
            ("real workers", len(self.crew.wires) == 1 and not self.crew.place.virtual),
        ]
        barred = [name for name, holds in alone if holds]
        if plan.passes == "together" and barred:
            raise ValueError(f"{barred[0]} and train.passes = 'together' do not go together; leave train.passes out")
        known = self.device.type == "cuda" and self.recipe.model.name in MODELS and len(self.crew.wires) > 1
        return not barred and (plan.passes == "together" or (plan.passes == "auto" and known))

    def _formed(self) -> Together:
        tables, known = self._tables(), self._together
        if known is None or known.rows is not self._rows or known.tables != tables:
            graphs = self.device.type == "cuda" and self.recipe.train.graphs
            longest = (lambda: self._longest) if self.recipe.optimizer.local_clip else None
            observed = (self.recipe.train.accumulate, lambda: self._scale) if self._observed else ()
            known = self._together = Together(
                self.crew, self._objective, tables, self._rows, longest, graphs, *observed
            )
        return known

    def _objective(self, inputs: Tensor, targets: Tensor, state: State | None) -> tuple[Tensor, Tensor, State | None]:
        loss, state = self._loss(inputs, targets, state)
        return loss, self._scaled(loss), state

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
        tables = [lane.tensors for lane in self.crew.wire.session.whole.lanes]
        sizes = [(len(self.crew.wires), table.total) for table in tables]
        if [rows.shape for rows in self._rows] != sizes:
            self._rows = [torch.empty(size, device=self.device) for size in sizes]
        return tables

    # -- scaling, seeding, splitting -------------------------------------------------------------------------------

    def _scaled(self, loss: Tensor) -> Tensor:
        scaler = self.crew.scaler
        return loss if scaler is None else scaler.scale(loss)

    @property
    def _scale(self) -> Tensor | float:
        scaler = self.crew.scaler
        return 1.0 if scaler is None else scaler._get_scale_async()  # type: ignore[return-value]

    @property
    def _longest(self) -> Tensor | float:
        return self.recipe.optimizer.local_clip * self._scale

    def _reseed(self, step: int, rank: int) -> None:
        number = ((self.recipe.train.seed * 1_000_003 + step) * 65_537 + rank) % 2**63
        if self.device.type == "cuda":
            torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(number)
        torch.default_generator.manual_seed(number)

    def _shares(self, batch: Batch) -> list[Batch]:
        num = len(self.crew.place.ranks)
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
        kept = [{name: x.clone() for name, x in own.items()} for own in self.crew.buffers]
        for i, share in enumerate(shares):
            states = self.states[i] if self._recurrent else []
            pool = self._recorded[0].pool if self._recorded else None
            self._recorded.append(Recorded(self.one, i, share, states, pool))
        for own, old in zip(self.crew.buffers, kept, strict=True):
            for name, x in own.items():
                x.copy_(old[name])


def _parts(share: Batch, passes: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(share.inputs.chunk(passes), share.targets.chunk(passes), strict=True)
