"""Simulated local steps: N replicas in one process, by the same code as real ones."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gradwire.comm.host_layout import Across
from gradwire.engine.method import Spec
from gradwire.engine.step import StepResult
from gradwire.exchanges import Exchange
from gradwire.feedback import Feedback
from gradwire.integrations.comm_worker import CompletedFuture
from gradwire.integrations.local.attach import set_up
from gradwire.integrations.local.handle import LocalSync
from gradwire.integrations.setup import Options
from gradwire.integrations.simulated import SimulatedBackend, SimulatedGroup, assemble
from gradwire.local.method import LocalMethod, OuterFactory, local_method


class SimulatedLocal:
    """Handles of N replicas. Call it after the optimizers of all of them have stepped.

    Attributes:
        ranks: The handle of each replica: ``report()``, ``state_dict()``, ``averaged()``.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        chosen: LocalMethod,
        outer: OuterFactory | None = None,
        across: Across | None = None,
        **options: Any,
    ) -> None:
        if not models or len(models) != len(optimizers):
            raise ValueError(
                f"local_lockstep got {len(models)} models and {len(optimizers)} optimizers; pass one of each per worker"
            )
        for model in models[1:]:
            model.load_state_dict(models[0].state_dict())
        self.group = assemble(len(models), across)
        self.ranks = [
            LocalSync(model, set_up(model, SimulatedBackend(self.group, rank), Options(**options)), chosen, outer)
            for rank, model in enumerate(models)
        ]
        self._rounds = SimulatedGroup([rank.wire for rank in self.ranks], self.group)
        self._start = SimulatedGroup([rank.starter for rank in self.ranks if rank.starter is not None], self.group)
        if chosen.start:
            for rank, optimizer in zip(self.ranks, optimizers, strict=True):
                optimizer.register_step_pre_hook(lambda *step, rank=rank: rank.require_averaged())

    def average_gradients(self) -> None:
        """In the start: average ``p.grad`` over all replicas; later it has no effect. Call it before the steps."""
        if self.ranks[0].starting:
            self._start()
            for rank in self.ranks:
                rank.count_average()

    def __call__(self) -> None:
        """Count an inner step of all replicas; every H-th time, agree on weights."""
        if all([rank.advance() for rank in self.ranks]):
            self._exchange()
        for rank in self.ranks:
            rank.arrive()

    def _exchange(self) -> None:
        ranks = self.ranks
        results = self._rounds.step([rank.outer.differences() for rank in ranks])
        if not results[0].skipped:
            flat = [rank.outer.flat_buffers() for rank in ranks]
            pairs = zip(ranks, flat, strict=True)
            self.group.drive([rank.outer.average_buffers(own, len(ranks)) for rank, own in pairs])
        for rank, result in zip(ranks, results, strict=True):
            # Optimizers may write to gradients, and these may belong to all ranks.
            updates = {name: x.clone() for name, x in result.updates.items()}
            rank.flight = CompletedFuture([StepResult(updates, result.skipped)])


def local_lockstep(
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    spec: str | LocalMethod,
    codec: "Spec | None" = None,
    *,
    feedback: str | Feedback | None = None,
    exchange: str | Exchange | None = None,
    **options: Any,
) -> SimulatedLocal:
    """Local steps of N replicas in this process; arguments as for `local`. Replicas start as the first.

    In the start of a method that has one, call ``average_gradients()`` before the optimizers step.
    """
    return SimulatedLocal(models, optimizers, local_method(spec, codec, feedback, exchange), **options)
