"""Sync workers: those of this process, which hold one model, and how they agree on a gradient.

After a step all workers hold the same parameters, so however many live here, they share one model: each has its own
gradients, compression memory and batch-norm statistics, and nothing else. One real rank is the case of one worker.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.comm.collectives import AllReduceOp
from gradwire.core.segments import Segments
from gradwire.engine import Plan
from gradwire.engine.step import StepResult
from gradwire.integrations import compress, grad_scaler
from gradwire.integrations.simulated import SimulatedGroup, lockstep
from gradwire.integrations.wire import Wire, skip_step, write_missing
from gradwire_lab.train.compression import arguments
from gradwire_lab.train.rank_info import RankInfo
from gradwire_lab.train.recipe import Recipe
from gradwire_lab.train.workers import Grads, Workers


class SyncWorkers(Workers):
    """See `Workers`.

    Attributes:
        wires: One for each.
    """

    def __init__(
        self, model: nn.Module, rank_info: RankInfo, recipe: Recipe, ramp_steps: int, optimizer: Optimizer
    ) -> None:
        self._group: SimulatedGroup | None = None
        self.scaler = torch.amp.GradScaler(rank_info.device.type) if recipe.train.precision == "fp16" else None
        self.local_clip = recipe.optimizer.local_clip
        if rank_info.simulated:
            models, optimizers = [model] * rank_info.world, [optimizer] * rank_info.world
            simulated = lockstep(models, optimizers=optimizers, **arguments(recipe, ramp_steps))
            self.wires = simulated.wires
            self._group = SimulatedGroup(self.wires, simulated.group)
            for wire in self.wires:
                wire.scaler = self.scaler
        else:
            options = arguments(recipe, ramp_steps)
            self.wires = [compress(model, optimizer=optimizer, scaler=self.scaler, **options)]
        super().__init__(model, rank_info)  # after the parameters and buffers of rank 0 have come
        self._rows: list[Tensor] = []

    @property
    def plan(self) -> Plan:
        """Which lane each parameter is compressed in."""
        return self.wire.executor.engine.full_plan

    @property
    def wire(self) -> Wire:
        """The first worker's: what it counts stands for all."""
        return self.wires[0]

    def synchronize_(self, grads: Sequence[Grads]) -> None:
        """Exchange every worker's gradients, and leave the update in every ``p.grad``, scaled as the loss."""
        if self._group is None:
            write_missing(self.wire.parameters, self.wire.sync(grads[0]))
            return
        scale = grad_scaler.scale_of(self.scaler)
        result = self._overflowed(grads) or self._group.run(grads, 1.0 / scale)[0]
        for name, update in result.updates.items():
            p = self.wire.parameters[name]
            if self.scaler is not None:  # a step that was dropped makes the GradScaler back off
                update = torch.full_like(update, torch.inf) if result.skipped else update * scale
            p.grad = update.to(device=p.device, dtype=p.dtype)

    def _overflowed(self, grads: Sequence[Grads]) -> StepResult | None:
        """A step that overflows, as a scaler expects of some; checked before where it could not be dropped later.

        Nor could it be with a delayed exchange: the mean of the step before waits for one that the optimizer takes.
        """
        if self.scaler is None or (self.wire.engine.unwrapped.rollback and not self.wire.delays):
            return None
        if not any(grad_scaler.overflows(own, w.link, w.device) for w, own in zip(self.wires, grads, strict=True)):
            return None
        for wire in self.wires:
            skip_step(wire)
        return StepResult({name: torch.zeros_like(p) for name, p in self.parameters.items()}, skipped=True)

    def select(self, worker: int) -> None:
        if len(self.buffers) > 1:
            self.use_buffers(self.buffers[worker])

    def leaves(self, copies: int) -> dict[str, Tensor]:
        for p in self.parameters.values():
            p.data = p.data.contiguous()  # as gradients are: an optimizer then takes them all at once
        return {name: p.detach().expand(copies, *p.shape).requires_grad_() for name, p in self.parameters.items()}

    def gradient_rows(self) -> tuple[Sequence[Segments], Sequence[Tensor]]:
        """By lane; rows are new where the lanes have changed."""
        tables = [lane.tensors for lane in self.plan.lanes]
        sizes = [(len(self.wires), table.total) for table in tables]
        if [rows.shape for rows in self._rows] != sizes:
            self._rows = [torch.empty(size, device=self.rank_info.device) for size in sizes]
        return tables, self._rows

    def sum_over_processes(self, numbers: Tensor) -> tuple[Tensor, int]:
        whole = numbers if self.rank_info.simulated else self.wire.link.move(AllReduceOp(numbers, "sum"))
        return whole, self.rank_info.world

    def evaluation_buffers(self, which: str) -> dict[str, Tensor]:
        """The statistics to evaluate with: the ``first`` rank's, or the ``average`` over all ranks."""
        if which == "average":
            return self.mean_buffers()
        return {name: self.first(x) for name, x in self.buffers[0].items()}
