"""Simulated workers: N replicas in one process, synchronized by the same code as real ones."""

import time
from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.comm.backend import UncountedBackend, copied_to
from gradwire.comm.collectives import Collective
from gradwire.comm.host_layout import Across, HostLayout, given_hosts
from gradwire.core.layout import same_memory
from gradwire.core.renamed import renamed_argument
from gradwire.engine import Grads, Spec, StepResult
from gradwire.engine.batched import Batched
from gradwire.engine.drive import profile
from gradwire.engine.lockstep import Lockstep, move
from gradwire.integrations.adamw_checks import check_optimizer
from gradwire.integrations.adamw_moments import attach_optimizer
from gradwire.integrations.entry_point import LOCKSTEP
from gradwire.integrations.model import refuse_later, refuse_sparse, trainable
from gradwire.integrations.optimizer import check_at_first_step
from gradwire.integrations.setup import Options, Setup, check_options
from gradwire.integrations.wire import Wire, kept_back, write_missing


def _counted(name: str) -> Any:
    """What a lockstep group counts of one rank."""
    return property(
        lambda self: getattr(self.group, name)[self.rank],
        lambda self, count: getattr(self.group, name).__setitem__(self.rank, count),
    )


class SimulatedBackend(UncountedBackend):
    """One rank's view of a lockstep group, which answers for all ranks at once in a step.

    It serves only agreements at attach: one caller makes all ranks, so all request the same.
    """

    traffic, inside = _counted("traffic"), _counted("inside")

    def __init__(self, group: Lockstep, rank: int) -> None:
        self.group = group
        self.rank, self.world, self.host_layout = rank, group.world, group.host_layout

    def move(self, collective: Collective, out: Tensor | None = None) -> Tensor:
        return copied_to(move([collective] * self.world)[0], out)


class SimulatedGroup:
    """Wires of ranks that live in this process, stepped together: all at once where that is possible, else in turn."""

    def __init__(self, wires: Sequence[Wire], group: Lockstep) -> None:
        self.wires, self.group = wires, group
        self._batch: Batched | None = None

    def __call__(self) -> None:
        """Replace every ``p.grad`` of all ranks by the update."""
        grads = [wire.grads() for wire in self.wires]
        for wire, own, result in zip(self.wires, grads, self.run(grads), strict=True):
            pairs = [(own[name], update) for name, update in result.updates.items()]
            elsewhere = [(g.detach(), update) for g, update in pairs if g is not None and not same_memory(g, update)]
            if elsewhere:
                torch._foreach_copy_([g for g, _ in elsewhere], [update for _, update in elsewhere])
            write_missing(wire.parameters, result)

    def run(self, grads: Sequence[Grads], unscale: float = 1.0) -> list[StepResult]:
        """A step of all ranks.

        Taken at once, its updates are new tensors that all ranks share; taken in turn, each rank's are written over its
        gradients.
        """
        for wire in self.wires:
            wire.setup.check_model()
            wire.before_step()
        batched = self._batched()
        if not batched.can_run(grads):
            return self._in_turn(grads, unscale)
        result = batched.run(grads, unscale)
        for wire in self.wires:
            wire.clock.add(batched.clock)
        return [result] * len(self.wires)

    def _batched(self) -> Batched:
        """All engines at once; made again where a wire has another engine."""
        engines = [wire.engine.unwrapped for wire in self.wires]
        if self._batch is None or any(a is not b for a, b in zip(self._batch.engines, engines, strict=True)):
            self._batch = Batched(engines, self.group)
        return self._batch

    def _in_turn(self, grads: Sequence[Grads], unscale: float) -> list[StepResult]:
        began, before = time.perf_counter(), self._worked
        own, delays = zip(self.wires, grads, strict=True), self.wires[0].delays
        results = self.group.drive([profile(wire.engine.run(mine, unscale), wire.clock) for wire, mine in own])
        moving = time.perf_counter() - began - (self._worked - before)
        for wire in self.wires:
            wire.clock.wire += moving  # a collective takes the time of all ranks
        return self._with_kept_back(results) if delays else results

    def _with_kept_back(self, results: Sequence[StepResult]) -> list[StepResult]:
        """Hand out the means of the step before in any case, as processes do, which have not waited for this step."""
        late = [kept_back(wire.engine, result) for wire, result in zip(self.wires, results, strict=True)]
        whole = [
            result.updates | {name: x.view(wire.parameters[name].shape).clone() for name, x in own.items()}
            for wire, result, own in zip(self.wires, results, late, strict=True)
        ]
        for update in (x for own in late for x in own.values()):  # ranks may share one
            update.zero_()
        return [result._replace(updates=updates) for result, updates in zip(results, whole, strict=True)]

    @property
    def _worked(self) -> float:
        """Seconds in which any rank encoded or decoded."""
        return sum(wire.clock.encode + wire.clock.decode for wire in self.wires)


class SimulatedWorkers(SimulatedGroup):
    """Wires of N replicas. Call it after all of them have run ``backward()``."""

    @renamed_argument("launch_mb", "bucket_mb")
    def __init__(
        self,
        models: Sequence[nn.Module],
        spec: Spec,
        across: Across | None = None,
        optimizers: Sequence[Optimizer] = (),
        **options: Any,
    ) -> None:
        if not models:
            raise ValueError("lockstep got no replica to train; pass a list of models of the same shape")
        check_options(LOCKSTEP.name, options, ("across", "optimizers"), "lockstep")
        if options.get("scaler") is not None:
            raise ValueError("lockstep takes no GradScaler; unscale the gradients of all replicas before the call")
        LOCKSTEP.refuse_local_steps(spec)
        group, wires = lockstep_group(len(models), across), list[Wire]()
        leader = None
        for rank, (model, optimizer) in enumerate(zip_longest(models, optimizers)):
            refuse_sparse(model)
            parameters, backend = trainable(model.named_parameters()), SimulatedBackend(group, rank)
            fits_optimizer = partial(check_optimizer, optimizer, parameters, LOCKSTEP)
            setup = Setup(parameters, backend, Options(**options), check_plan=fits_optimizer, entry=LOCKSTEP)
            setup.check_model = partial(refuse_later, model, {id(p) for p in parameters.values()})
            wire = Wire(setup, spec)
            shared = attach_optimizer(wire, optimizer)
            if shared is not None:
                leader = shared.leader = leader or shared
            check_at_first_step(wire)
            wires.append(wire)
        super().__init__(wires, group)
        for model in models[1:]:
            model.load_state_dict(models[0].state_dict())


def lockstep_group(world: int, across: Across | None) -> Lockstep:
    """The group of so many ranks in this process; ``across="hosts"`` has all of them on one host."""
    if across is None:
        return Lockstep(world)
    given = given_hosts(across)
    layout = HostLayout.of([range(world)] if given is None else given)
    layout.check(world)
    return Lockstep(world, layout)


def lockstep(models: Sequence[nn.Module], spec: Spec, **options: Any) -> SimulatedWorkers:
    """Compress the gradients of N replicas in this process. Replicas start as the first.

    Args:
        models: The replicas; the loop calls what is returned after all of them have run ``backward()``.
        spec: As for `compress`.
        options: ``optimizers=``, a list of the optimizer of each replica, which methods such as ``"onebit_adam"`` need;
            ``across=`` as ``"hosts"`` or the ranks of each host; ``feedback``, ``exchange``, ``granularity``,
            ``rules``, ``bundle``, ``seed``, ``bucket_mb`` and ``rollback`` as for `compress`.
    """
    return SimulatedWorkers(models, spec, **options)
