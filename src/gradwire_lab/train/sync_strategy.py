"""Sync strategy: workers that agree on one gradient, as [sync] of a recipe describes, and so hold one model.

every worker's gradients -> compression and exchange -> clip -> optimizer
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradwire_lab.train.compression import arguments, tests_variance
from gradwire_lab.train.data import Task
from gradwire_lab.train.data.images import Batch
from gradwire_lab.train.evaluation import Score, evaluate_model
from gradwire_lab.train.forward_backward import Passes
from gradwire_lab.train.loading import evaluation_batches
from gradwire_lab.train.local_workers import LocalWorkers
from gradwire_lab.train.models import MODELS
from gradwire_lab.train.models.regime import transform_of
from gradwire_lab.train.optimizers import clip_, optimizer_of, set_hyperparameters
from gradwire_lab.train.rank_info import RankInfo
from gradwire_lab.train.recipe import Recipe
from gradwire_lab.train.sync_checkpoint import SyncCheckpoint
from gradwire_lab.train.traffic_forecast import bytes_by_layer
from gradwire_lab.train.workers import account


class SyncStrategy:
    """What the loop asks of workers that agree on one gradient.

    Attributes:
        workers: Those of this process.
        workers_per_node: How many workers act as one.
        passes: Forward and backward of all workers.
        optimizer: Steps their parameters.
        checkpoint: What they add to a checkpoint.
        elsewhere: Dense bytes of earlier sessions by the size of their ring, where it was another than this one's.
        skipped_before: Steps that earlier sessions skipped.
    """

    workers_per_node = 1

    def __init__(self, recipe: Recipe, rank_info: RankInfo, model: nn.Module, task: Task, ramp_steps: int) -> None:
        self.recipe, self.rank_info, self.model, self.task = recipe, rank_info, model, task
        self.scaler = torch.amp.GradScaler(rank_info.device.type) if recipe.train.precision == "fp16" else None
        clip = recipe.optimizer.local_clip
        self.workers = LocalWorkers(model, rank_info, arguments(recipe, ramp_steps), self.scaler, clip)
        observed = recipe.train.accumulate > 1 and tests_variance(recipe)
        mode, observe = pass_mode(recipe, self.workers, observed), self._observe if observed else None
        self.passes = Passes(recipe, self.workers, mode, observe)
        self.optimizer = optimizer_of(recipe, model)
        self.elsewhere: dict[int, int] = {}
        self.skipped_before = 0
        self.checkpoint = SyncCheckpoint(self)
        self._decisions = 0  # of `auto`: how many have been recorded

    def step(self, batch: Batch, step: int, settings: Mapping[str, float], prefetch: Callable[[], None]) -> Tensor:
        """One step of all workers -> the mean of their losses, still on the device."""
        set_hyperparameters(self.optimizer, settings)
        grads, loss = self.passes(batch, step)
        prefetch()  # while the device is busy with the pass
        self.workers.synchronize_(grads)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.recipe.optimizer.clip:
            clip_([p.grad for p in self.model.parameters()], self.recipe.optimizer.clip)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss

    def _observe(self, worker: int, second_moments: Mapping[str, Tensor]) -> None:
        self.workers.wires[worker].observe(second_moments)

    def group_step(self) -> None:
        """The step to go on from, if this worker has become a copy of a neighbor since the last call."""

    def check(self) -> None:
        """Raise `Diverged` if parameters are no longer finite."""

    def close(self) -> None:
        """Leave the group."""

    # -- evaluation and records ------------------------------------------------------------------------------------

    def score(self, split: str = "test") -> Score:
        """Of the model that is saved."""
        self.workers.use_buffers(self.workers.evaluation_buffers(self.recipe.train.buffers))
        batches = evaluation_batches(self.recipe, self.task, self.rank_info, split)
        score = evaluate_model(self.model, self.task, batches, self.workers.total, self.recipe.train.precision)
        self.workers.use_buffers(self.workers.buffers[0])
        return score

    def evaluate(self, splits: tuple[str, ...]) -> tuple[list[Score], dict[str, Any]]:
        """The scores by split, and further fields of the epoch's record."""
        return [self.score(split) for split in splits], {}

    def common_seconds(self, seconds: float) -> float:
        """The clock that all workers go by."""
        return seconds

    def start_fields(self) -> dict[str, Any]:
        """Fields of the start record: the spec and the method."""
        return {"spec": self.recipe.sync.spec, "method": self.workers.wire.spec}

    @property
    def rings(self) -> dict[int, int]:
        """Dense bytes of all sessions by how many were in the ring that would have carried them."""
        report = self.workers.wire.report()
        here = report.world if report.hosts is None else report.hosts
        return dict(sorted({**self.elsewhere, here: report.dense - sum(self.elsewhere.values())}.items()))

    def account(self, step: int) -> dict[str, Any]:
        """Bytes and seconds so far, as the first worker here counts them."""
        report = self.workers.wire.report()
        ring = sum(2 * (size - 1) / size * dense for size, dense in self.rings.items())
        counts = (report.sent, report.received, report.payload, report.dense, ring)
        hosts = {} if report.hosts is None else {"hosts": report.hosts, "sent_inside": report.sent_inside}
        return {
            **account(*counts, self.workers.wire.clock),
            "skipped": self.skipped_before + report.skipped,
            **hosts,  # then all other bytes are between hosts
        }

    def group_account(self) -> dict[str, Any]:
        """What all workers count together."""
        return {}

    def final_fields(self, step: int) -> dict[str, Any]:
        """Fields of the final record: bytes by rule and by layer."""
        rules = {label: list(pair) for label, pair in self.workers.wire.report().rules.items()}
        return {"rules": rules, "layers": bytes_by_layer(self.workers.plan, step)}

    def decisions(self) -> list[dict[str, Any]]:
        """What `auto` has decided since the last call."""
        wire = self.workers.wire
        fresh = wire.decisions[self._decisions :]
        self._decisions += len(fresh)
        return [{"spec": one.spec, "why": one.why} for one in fresh]


def pass_mode(recipe: Recipe, workers: LocalWorkers, observed: bool) -> str:
    """How workers pass: together where that is asked for, or by default where there are several on a GPU.

    Raises:
        ValueError: It is asked for, and cannot be.
    """
    plan, rank_info = recipe.train, workers.rank_info
    apart = observed and not workers.stacked_buffers  # statistics would have to be updated one after another
    alone = {
        "train.accumulate > 1": plan.accumulate > 1 and not apart,
        "an input_transform": transform_of(workers.model, training=True) is not None,
        "real workers": not rank_info.virtual,
    }
    barred = [name for name, holds in alone.items() if holds]
    if plan.passes == "together" and barred:
        raise ValueError(f"{barred[0]} and train.passes = 'together' do not go together; leave train.passes out")
    faster = rank_info.device.type == "cuda" and recipe.model.name in MODELS and len(rank_info.ranks) > 1
    return "sequential" if plan.passes == "auto" and (barred or not faster) else plan.passes
