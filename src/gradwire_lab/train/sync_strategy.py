"""Sync strategy: workers that agree on one gradient, as [sync] of a recipe describes, and so hold one model.

every worker's gradients -> compression and exchange -> clip -> optimizer
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradwire_lab.train.compression import arguments
from gradwire_lab.train.data import Batch, Task
from gradwire_lab.train.evaluation import Score, evaluate_model
from gradwire_lab.train.forward_backward import Passes
from gradwire_lab.train.loading import evaluation_batches
from gradwire_lab.train.local_workers import LocalWorkers
from gradwire_lab.train.optimizers import clip_, optimizer_of, set_hyperparameters
from gradwire_lab.train.rank_info import RankInfo
from gradwire_lab.train.recipe import Recipe
from gradwire_lab.train.sync_checkpoint import SyncCheckpoint
from gradwire_lab.train.traffic_forecast import bytes_by_layer


class SyncStrategy:
    """See `strategy.Strategy`.

    Attributes:
        elsewhere: Dense bytes of earlier sessions by the size of their ring, where it was another than this one's.
        skipped_before: Steps that earlier sessions skipped.
    """

    workers_per_node = 1

    def __init__(self, recipe: Recipe, rank_info: RankInfo, model: nn.Module, task: Task, ramp_steps: int) -> None:
        self.recipe, self.rank_info, self.model, self.task = recipe, rank_info, model, task
        self.scaler = torch.amp.GradScaler(rank_info.device.type) if recipe.train.precision == "fp16" else None
        self.workers = LocalWorkers(model, rank_info, arguments(recipe, ramp_steps), self.scaler)
        self.passes = Passes(recipe, self.workers)
        self.optimizer = optimizer_of(recipe, model)
        self.elsewhere: dict[int, int] = {}
        self.skipped_before = 0
        self.checkpoint = SyncCheckpoint(self)
        self._decisions = 0  # of `auto`: how many have been recorded

    def step(self, batch: Batch, step: int, settings: Mapping[str, float], prefetch: Callable[[], None]) -> Tensor:
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

    def group_step(self) -> None: ...

    def check(self) -> None: ...

    def close(self) -> None: ...

    # -- evaluation and records ------------------------------------------------------------------------------------

    def score(self, split: str = "test") -> Score:
        self.workers.use_buffers(self.workers.evaluation_buffers(self.recipe.train.buffers))
        batches = evaluation_batches(self.recipe, self.task, self.rank_info, split)
        score = evaluate_model(self.model, self.task, batches, self.workers.total, self.recipe.train.precision)
        self.workers.use_buffers(self.workers.buffers[0])
        return score

    def evaluate(self, splits: tuple[str, ...]) -> tuple[list[Score], dict[str, Any]]:
        return [self.score(split) for split in splits], {}

    def mean_loss(self, loss: Tensor) -> float:
        return self.workers.total(loss).item() / (1 if self.rank_info.virtual else self.rank_info.world)

    def common_seconds(self, seconds: float) -> float:
        return seconds

    def start_fields(self) -> dict[str, Any]:
        return {"spec": self.recipe.sync.spec, "method": self.workers.wire.spec}

    @property
    def rings(self) -> dict[int, int]:
        """Dense bytes of all sessions by how many were in the ring that would have carried them."""
        report = self.workers.wire.report()
        here = report.world if report.hosts is None else report.hosts
        return dict(sorted({**self.elsewhere, here: report.dense - sum(self.elsewhere.values())}.items()))

    def account(self, step: int) -> dict[str, Any]:
        report = self.workers.wire.report()
        names = ("sent", "received", "payload", "dense", "payload_ratio")
        clocks = ("encode_seconds", "wire_seconds", "decode_seconds")
        hosts = () if report.hosts is None else ("hosts", "sent_inside")  # then all other bytes are between hosts
        ring = sum(2 * (size - 1) / size * dense for size, dense in self.rings.items())
        return {
            **{name: getattr(report, name) for name in names},
            "ring": ring,  # what a rank would have sent in float32 ring all-reduces
            "wire_ratio": ring / report.sent if report.sent else math.inf,
            "skipped": self.skipped_before + report.skipped,
            **{name: getattr(report, name) for name in (*clocks, *hosts)},
        }

    def group_account(self) -> dict[str, Any]:
        return {}

    def final_fields(self, step: int) -> dict[str, Any]:
        rules = {label: list(pair) for label, pair in self.workers.wire.report().rules.items()}
        return {"rules": rules, "layers": bytes_by_layer(self.workers.plan, step)}

    def decisions(self) -> list[dict[str, Any]]:
        wire = self.workers.wire
        fresh = wire.decisions[self._decisions :]
        self._decisions += len(fresh)
        return [{"spec": one.spec, "why": one.why} for one in fresh]
