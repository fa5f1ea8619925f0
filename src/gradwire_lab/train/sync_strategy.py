"""Sync strategy: workers that agree on one gradient, as [sync] of a recipe describes, and so hold one model.

every worker's gradients -> compression and exchange -> clip -> optimizer

What they add to a checkpoint:

model.safetensors      parameters, and the batch-norm statistics that evaluation uses
optimizer.safetensors  its tensors
rank-0.safetensors     a worker's compression memory and own statistics
progress.json          optimizer settings, GradScaler, hosts, and what was counted
"""

from collections.abc import Callable, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gradwire.comm import Traffic
from gradwire.integrations.wire import Wire
from gradwire_lab.train import checkpoint
from gradwire_lab.train.checkpoint import OPTIMIZER, part, prefixed
from gradwire_lab.train.compression import uses_variance
from gradwire_lab.train.data import Batch, Task
from gradwire_lab.train.evaluation import Score, evaluate_model
from gradwire_lab.train.forward_backward import Passes
from gradwire_lab.train.loading import evaluation_batches
from gradwire_lab.train.models import MODELS
from gradwire_lab.train.models.regime import transform_of
from gradwire_lab.train.optimizers import clip_, optimizer_of, set_hyperparameters
from gradwire_lab.train.rank_info import RankInfo
from gradwire_lab.train.recipe import Recipe
from gradwire_lab.train.sync_workers import SyncWorkers
from gradwire_lab.train.traffic_forecast import bytes_by_layer
from gradwire_lab.train.workers import account


class SyncStrategy:
    """What the loop asks of workers that agree on one gradient.

    Attributes:
        workers: Those of this process.
        workers_per_node: How many workers act as one.
        passes: Forward and backward of all workers.
        optimizer: Steps their parameters.
        elsewhere: Dense bytes of earlier sessions by the size of their ring, where it was another than this one's.
        skipped_before: Steps that earlier sessions skipped.
    """

    workers_per_node = 1

    def __init__(self, recipe: Recipe, rank_info: RankInfo, model: nn.Module, task: Task, ramp_steps: int) -> None:
        self.recipe, self.rank_info, self.model, self.task = recipe, rank_info, model, task
        self.optimizer = optimizer_of(recipe, model)
        self.workers = SyncWorkers(model, rank_info, recipe, ramp_steps, self.optimizer)
        self.scaler = self.workers.scaler
        observed = recipe.train.accumulate > 1 and uses_variance(recipe)
        observe = (lambda worker, moments: self.workers.wires[worker].observe(moments)) if observed else None
        self.passes = Passes(recipe, self.workers, pass_mode(recipe, self.workers, observed), observe)
        self.elsewhere: dict[int, int] = {}
        self.skipped_before = 0
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

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def rank_states(self) -> list[dict[str, Tensor]]:
        """The state of each worker of this process."""
        pairs = zip(self.workers.wires, self.workers.buffers, strict=True)
        return [{**prefixed(wire.state_dict(), "wire/"), **prefixed(own, "buffer/")} for wire, own in pairs]

    def model_state(self) -> dict[str, Tensor]:
        """What model.safetensors holds. All processes take part."""
        shown = self.workers.evaluation_buffers(self.recipe.train.buffers)
        return {**self.model.state_dict(), **shown}

    def progress(self, folder: Path) -> dict[str, Any]:
        """Further fields of progress.json, after writing further files into the folder."""
        counts = {"rings": list(self.rings.items()), "skipped": self.account(0)["skipped"]}
        return {
            "hosts": self._hosts,
            "optimizer": checkpoint.save_optimizer(self.optimizer, folder / OPTIMIZER),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "account": {**_counted(self.workers.wire), **counts},
        }

    def load(self, folder: Path, progress: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        """Load a checkpoint -> the states of this process's workers; none, if the world had another size.

        A world of another size takes over the mean of all errors, and starts with the evaluated statistics.
        """
        checkpoint.load_model(self.model, self.recipe.model.name, folder)
        checkpoint.load_optimizer(self.optimizer, folder / OPTIMIZER, progress["optimizer"])
        if self.scaler is not None and progress["scaler"]:
            self.scaler.load_state_dict(progress["scaler"])
        same_world = progress["world"] == self.rank_info.world
        same_hosts = same_world and progress.get("hosts") == self._hosts
        own = checkpoint.rank_states(folder, self.rank_info.ranks) if same_world else []
        every = [] if same_hosts else checkpoint.rank_states(folder, range(progress["world"]))
        for i, wire in enumerate(self.workers.wires):
            wire.load_state_dict([part(state, "wire/") for state in (own[i : i + 1] if same_hosts else every)])
            _load_counted(wire, progress["account"])
        for i, buffers in enumerate(self.workers.buffers):
            for name, x in (part(own[i], "buffer/") if own else self.workers.buffers[0]).items():
                buffers[name].copy_(x)
        self._load_rings(progress)
        return own

    def _load_rings(self, progress: Mapping[str, Any]) -> None:
        """What sessions with other rings would have sent goes on being counted as theirs."""
        account = progress["account"]
        size = len(progress.get("hosts") or range(progress["world"]))
        rings = dict(account.get("rings") or [(size, sum(account["meant"].values()))])
        (here,) = self.rings
        self.elsewhere = {size: dense for size, dense in rings.items() if size != here}
        self.skipped_before = account.get("skipped", 0)

    @property
    def _hosts(self) -> list[list[int]] | None:
        """The ranks of each host, where that makes a difference."""
        layout = self.workers.wire.link.host_layout
        return None if layout is None else [list(host) for host in layout.hosts]


def pass_mode(recipe: Recipe, workers: SyncWorkers, observed: bool) -> str:
    """How workers pass: together where that is asked for, or by default where there are several on a GPU.

    Raises:
        ValueError: It is asked for, and cannot be.
    """
    plan, rank_info = recipe.train, workers.rank_info
    apart = observed and not workers.stacked_buffers  # statistics would have to be updated one after another
    alone = {
        "train.accumulate > 1": plan.accumulate > 1 and not apart,
        "an input_transform": transform_of(workers.model, training=True) is not None,
        "real workers": not rank_info.simulated,
    }
    barred = [name for name, holds in alone.items() if holds]
    if plan.passes == "together" and barred:
        raise ValueError(f"{barred[0]} and train.passes = 'together' do not go together; leave train.passes out")
    faster = rank_info.device.type == "cuda" and recipe.model.name in MODELS and len(rank_info.ranks) > 1
    return "sequential" if plan.passes == "auto" and (barred or not faster) else plan.passes


def _counted(wire: Wire) -> dict[str, Any]:
    """What a wire has counted, for JSON."""
    accounting = wire.engine.unwrapped.accounting
    return {
        "traffic": astuple(wire.link.traffic),
        "inside": astuple(wire.link.inside),
        "clock": astuple(wire.clock),
        "said": dict(accounting.encoded),
        "meant": dict(accounting.dense),
    }


def _load_counted(wire: Wire, account: Mapping[str, Any]) -> None:
    accounting = wire.engine.unwrapped.accounting
    wire.link.traffic = Traffic(*account["traffic"])
    if wire.link.host_layout is not None:
        wire.link.inside = Traffic(*account.get("inside", ()))
    wire.clock.encode, wire.clock.wire, wire.clock.decode = account["clock"]
    for counts, saved in ((accounting.encoded, account["said"]), (accounting.dense, account["meant"])):
        counts.clear()
        counts.update(saved)
