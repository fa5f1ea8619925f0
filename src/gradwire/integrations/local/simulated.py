"""Simulated local steps: N replicas in one process, by the same code as real ones."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from gradwire.comm.host_layout import Across
from gradwire.core.renamed import renamed_argument
from gradwire.engine import Spec, StepResult
from gradwire.exchanges import Exchange
from gradwire.feedback import Feedback
from gradwire.integrations.comm_worker import CompletedFuture
from gradwire.integrations.entry_point import LOCKSTEP, steps_locally
from gradwire.integrations.local.attach import Optimizers, checked_optimizers, hook_steps, require_averaged, setup_of
from gradwire.integrations.local.fragment import Fragment
from gradwire.integrations.local.handle import LocalSync
from gradwire.integrations.local.report import LocalReport
from gradwire.integrations.setup import Options, check_options
from gradwire.integrations.simulated import SimulatedBackend, SimulatedGroup, lockstep_group
from gradwire.local.method import LocalMethod, OuterFactory


class SimulatedLocal:
    """Handles of N replicas. Call it after the optimizers of all of them have stepped.

    Attributes:
        ranks: The handle of each replica: ``state_dict()``, ``load_state_dict()``, ``set()``.
    """

    @renamed_argument("launch_mb", "bucket_mb")
    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizers],
        chosen: LocalMethod,
        outer: OuterFactory | None = None,
        outer_device: torch.device | str | None = None,
        across: Across | None = None,
        **options: Any,
    ) -> None:
        if not models or len(models) != len(optimizers):
            raise ValueError(
                f"local_lockstep got {len(models)} models and {len(optimizers)} optimizers; pass one of each per worker"
            )
        refused = sorted({"uneven", "auto", "elastic", "scaler"} & options.keys())
        if refused:
            raise ValueError(
                "replicas of one process run at one speed and end together, and their loop unscales gradients; leave "
                f"{refused[0]}= out"
            )
        known = "codec", "feedback", "exchange", "outer", "outer_device", "across"
        check_options("gradwire.local_lockstep", options, known, "local")
        pairs = zip(models, optimizers, strict=True)
        inner = [checked_optimizers(given, chosen, model, warn=not i) for i, (model, given) in enumerate(pairs)]
        for model in models[1:]:
            model.load_state_dict(models[0].state_dict())
        self.group = lockstep_group(len(models), across)
        self.ranks = [
            LocalSync(
                model,
                setup_of(model, SimulatedBackend(self.group, rank), Options(**options)),
                chosen,
                outer,
                outer_device,
            )
            for rank, model in enumerate(models)
        ]
        wires = [rank.wires for rank in self.ranks]
        self._rounds = [SimulatedGroup(same, self.group) for same in zip(*wires, strict=True)]  # by fragment
        starters = [rank.start.wire for rank in self.ranks if rank.start.wire is not None]
        self._start = SimulatedGroup(starters, self.group)
        for rank, own in zip(self.ranks, inner, strict=True):
            hook_steps(rank, own, require_averaged)

    def average_gradients(self) -> None:
        """In the start: average ``p.grad`` over all replicas; later it has no effect. Call it before the steps."""
        if self.ranks[0].start.sends(self.ranks[0].steps):
            self._start()
            for rank in self.ranks:
                rank.start.count_average()

    def __call__(self) -> None:
        """Count an inner step of all replicas; every H-th time, agree on weights."""
        for fragments in zip(*[rank.advance() for rank in self.ranks], strict=True):
            self._exchange(fragments)
        if self.ranks[0].start.compares(self.ranks[0].steps):
            self.group.drive([rank.start.compare(rank.outer) for rank in self.ranks])
        for rank in self.ranks:
            rank.arrive()

    @property
    def starting(self) -> bool:
        """Whether the coming step is of the start, which has no rounds."""
        return self.ranks[0].starting

    @property
    def same_batches(self) -> bool:
        """Whether all replicas must take the same batch in the coming step, since nothing is sent."""
        return self.ranks[0].same_batches

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """A context in which all replicas have the outer weights and buffers, for evaluation."""
        with ExitStack() as stack:
            for rank in self.ranks:
                stack.enter_context(rank.averaged())
            yield

    def report(self) -> LocalReport:
        """Bytes, ratios and seconds so far, of the first replica."""
        return self.ranks[0].report()

    def __str__(self) -> str:
        return str(self.ranks[0])

    def _exchange(self, fragments: Sequence[Fragment]) -> None:
        ranks, first = self.ranks, fragments[0]
        results = self._rounds[first.number].run([rank.outer.differences(first.names) for rank in ranks])
        if not (results[0].skipped or first.number):
            outers = [rank.outer for rank in ranks]
            self.group.drive([outer.average_buffers(outer.flat_buffers(), len(ranks)) for outer in outers])
        for fragment, result in zip(fragments, results, strict=True):
            # Optimizers may write to gradients, and these may belong to all ranks.
            updates = {name: x.clone() for name, x in result.updates.items()}
            fragment.pending_result = CompletedFuture([StepResult(updates, result.skipped)])


@steps_locally("models", "optimizers")
def local_lockstep(
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizers],
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
    return SimulatedLocal(models, optimizers, LOCKSTEP.rounds(spec, codec, feedback, exchange), **options)
