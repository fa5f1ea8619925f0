"""Local workers: those of this process, which hold one model, and how they agree on a gradient.

After a step all workers hold the same parameters, so however many live here, they share one model: each has its own
gradients, compression memory and batch-norm statistics, and nothing else. One real rank is the case of one worker.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.comm.collectives import AllReduceOp
from gradwire.engine import Plan
from gradwire.engine.step import StepResult
from gradwire.integrations import compress, scaling
from gradwire.integrations.model import refuse_sparse, trainable
from gradwire.integrations.simulated import SimulatedBackend, SimulatedGroup, assemble
from gradwire.integrations.wire import Wire, write_missing
from gradwire_lab.train.rank_info import RankInfo

Grads = dict[str, Tensor | None]


class LocalWorkers:
    """Workers of one process.

    Attributes:
        wires: One for each.
        buffers: What each keeps beside the parameters, by name: batch-norm statistics.
    """

    def __init__(
        self, model: nn.Module, rank_info: RankInfo, arguments: Mapping[str, Any], scaler: torch.amp.GradScaler | None
    ) -> None:
        self.model, self.rank_info = model, rank_info
        self._group: SimulatedGroup | None = None
        if not rank_info.virtual:
            self.wires = [compress(model, scaler=scaler, **arguments)]
        else:
            group = assemble(rank_info.world, arguments["across"])
            refuse_sparse(model)
            parameters = trainable(model.named_parameters())
            options = {name: value for name, value in arguments.items() if name not in ("spec", "across")}
            options["launch_bytes"] = int(options.pop("launch_mb") * 2**20)
            backends, spec = (SimulatedBackend(group, rank) for rank in rank_info.ranks), arguments["spec"]
            self.wires = [Wire(parameters, backend, spec, scaler=scaler, **options) for backend in backends]
            self._group = SimulatedGroup(self.wires, group)
        self._homes = _homes(model)
        own = {name: _held(module, key) for name, (module, key) in self._homes.items()}
        self.buffers = [own, *(_copied(own) for _ in rank_info.ranks[1:])]

    @property
    def plan(self) -> Plan:
        """Which lane each parameter is compressed in."""
        return self.wire.executor.engine.whole

    @property
    def wire(self) -> Wire:
        """The first worker's: what it counts stands for all."""
        return self.wires[0]

    def synchronize_(self, grads: Sequence[Grads]) -> None:
        """Exchange every worker's gradients, and leave the update in every ``p.grad``, scaled as the loss."""
        if self._group is None:
            write_missing(self.wire.parameters, self.wire.sync(grads[0]))
            return
        scale = scaling.scale_of(self.wire.scaler)
        result = self._overflowed(grads) or self._group.step(grads, 1.0 / scale)[0]
        for name, update in result.updates.items():
            p = self.wire.parameters[name]
            if self.wire.scaler is not None:  # a step that was dropped makes the GradScaler back off
                update = torch.full_like(update, torch.inf) if result.skipped else update * scale
            p.grad = update.to(device=p.device, dtype=p.dtype)

    def _overflowed(self, grads: Sequence[Grads]) -> StepResult | None:
        """A step that overflows, as a scaler expects of some; checked before where it could not be dropped later."""
        if self.wire.scaler is None or self.wire.engine.core.rollback:
            return None
        if not any(scaling.overflows(own, w.link, w.device) for w, own in zip(self.wires, grads, strict=True)):
            return None
        for wire in self.wires:
            wire.engine.drop()
        return StepResult({name: torch.zeros_like(p) for name, p in self.wire.parameters.items()}, skipped=True)

    def total(self, numbers: Tensor) -> Tensor:
        """The sum over all processes, off the account of bytes."""
        return numbers if self.rank_info.virtual else self.wire.link.move(AllReduceOp(numbers, "sum"))

    # -- buffers ---------------------------------------------------------------------------------------------------

    def use_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Let the model use these; the tensors themselves, not copies."""
        for name, (module, key) in self._homes.items():
            module._buffers[key] = buffers[name]

    def stacked_buffers(self) -> dict[str, Tensor]:
        """All workers' buffers by name, [workers, ...]; from now on, each worker's are rows of these."""
        stacked = {name: torch.stack([own[name] for own in self.buffers]) for name in self.buffers[0]}
        self.buffers = [{name: x[i] for name, x in stacked.items()} for i in range(len(self.buffers))]
        self.use_buffers(self.buffers[0])
        return stacked

    def evaluation_buffers(self, which: str) -> dict[str, Tensor]:
        """The statistics to evaluate with: the ``first`` rank's, or the ``average`` over all ranks.

        Counters, which are no floats, are always the first rank's.
        """
        shown = _copied(self.buffers[0])
        for name, mine in shown.items():
            if which == "average" and mine.is_floating_point():
                total = self.total(torch.stack([each[name].double() for each in self.buffers]).sum(0))
                shown[name] = (total / self.rank_info.world).to(mine.dtype)
            elif not self.rank_info.virtual:
                shown[name] = self.total(mine if self.rank_info.first else torch.zeros_like(mine))
        return shown


def _homes(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """The modules that hold the buffers of a state dict, and under which key."""
    return {
        f"{prefix}.{key}" if prefix else key: (module, key)
        for prefix, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and key not in module._non_persistent_buffers_set
    }


def _held(module: nn.Module, key: str) -> Tensor:
    buffer = module._buffers[key]
    assert buffer is not None
    return buffer


def _copied(buffers: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in buffers.items()}
