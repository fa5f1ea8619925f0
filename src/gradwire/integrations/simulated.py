"""Virtual workers: N replicas in one process, synchronized in lockstep by the same code as real ones."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.comm.backend import Backend
from gradwire.comm.collectives import Collective, Traffic
from gradwire.comm.host_layout import Across, HostLayout
from gradwire.engine.drive import timed
from gradwire.engine.hierarchical_lockstep import HierarchicalLockstep
from gradwire.engine.lockstep import Lockstep
from gradwire.engine.method import Spec
from gradwire.engine.plan import LAUNCH_BYTES
from gradwire.integrations.model import refuse_sparse, trainable
from gradwire.integrations.wire import Wire


class SimulatedBackend(Backend):
    """One rank's place in a lockstep group. The group answers for all ranks at once, so a seat moves nothing itself."""

    def __init__(self, group: Lockstep, rank: int) -> None:
        self.group = group
        self.rank, self.world = rank, group.world
        self.grouping = group.grouping if isinstance(group, HierarchicalLockstep) else None

    @property
    def traffic(self) -> Any:
        return self.group.traffic[self.rank]

    @traffic.setter
    def traffic(self, count: Any) -> None:
        self.group.traffic[self.rank] = count

    @property
    def inside(self) -> Any:
        return self.group.inside[self.rank] if isinstance(self.group, HierarchicalLockstep) else Traffic()

    @inside.setter
    def inside(self, count: Any) -> None:
        if isinstance(self.group, HierarchicalLockstep):
            self.group.inside[self.rank] = count

    def move(self, collective: Collective) -> Tensor:
        raise AssertionError("a lockstep group moves bytes for all its ranks together")

    def answer(self, asks: Sequence[Any]) -> list[Any]:
        # Only agreements at attach come this way; all seats are taken by one caller, who agrees with himself.
        return self.group.echo(asks)


class SimulatedWorkers:
    """Wires of N replicas. Call it after all of them have run ``backward()``."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        spec: Spec,
        launch_mb: float = LAUNCH_BYTES / 2**20,
        across: Across | None = None,
        **options: Any,
    ) -> None:
        if not models:
            raise ValueError("lockstep got no replica to train; pass a list of models that are built alike")
        if options.get("scaler") is not None:
            raise ValueError("lockstep knows no GradScaler; unscale the gradients of all replicas before the call")
        self.group = assemble(len(models), across)
        options["launch_bytes"] = int(launch_mb * 2**20)
        self.wires = []
        for rank, model in enumerate(models):
            refuse_sparse(model)
            self.wires.append(
                Wire(trainable(model.named_parameters()), SimulatedBackend(self.group, rank), spec, **options)
            )
        with torch.no_grad():
            for model in models[1:]:
                model.load_state_dict(models[0].state_dict())

    def __call__(self) -> None:
        """One synchronization of all replicas."""
        began, before = time.perf_counter(), self._worked
        talks = [timed(wire.session.run(wire.grads()), wire.clock) for wire in self.wires]
        verdicts = self.group.drive(talks)
        moving = time.perf_counter() - began - (self._worked - before)
        for wire, verdict in zip(self.wires, verdicts, strict=True):
            wire.clock.wire += moving  # a collective takes everybody's time
            wire.write_(verdict)

    @property
    def _worked(self) -> float:
        """Seconds in which any replica encoded or decoded."""
        return sum(wire.clock.encode + wire.clock.decode for wire in self.wires)


def assemble(world: int, across: Across | None) -> Lockstep:
    """The group of so many ranks in this process; ``across="hosts"`` has all of them on one host."""
    if across is None:
        return Lockstep(world)
    if isinstance(across, str) and across != "hosts":
        raise ValueError(f"across={across!r} is unknown; write 'hosts', or the ranks of each, [[0, 1], [2, 3]]")
    grouping = HostLayout.of([range(world)] if isinstance(across, str) else across)
    grouping.check(world)
    return HierarchicalLockstep(grouping)


def lockstep(models: Sequence[nn.Module], spec: Spec, **options: Any) -> SimulatedWorkers:
    """Compress the gradients of N replicas in this process; options as for `compress`. Replicas start as the first."""
    return SimulatedWorkers(models, spec, **options)
