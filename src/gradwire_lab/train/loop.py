"""Loop: one training, from its recipe to its last record, for real ranks and for simulated workers alike.

    batches -> the strategy's step: gradients, exchange, optimizer -> records, evaluations, checkpoints

What a step does is up to a strategy: workers that agree on one gradient (`sync_strategy`), or workers that gossip
or take local steps (`gossip_strategy`). The host waits for the device only to log, to evaluate and to save.
"""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.gossip import Diverged
from gradwire_lab.train.data import Batch, Task, TextTask
from gradwire_lab.train.evaluation import better, chance_level
from gradwire_lab.train.gossip_strategy import GossipStrategy
from gradwire_lab.train.loading import Prefetcher, batch_of, loader_of, task_of
from gradwire_lab.train.models import build
from gradwire_lab.train.models.regime import regime_of
from gradwire_lab.train.optimizers import apply_regime
from gradwire_lab.train.rank_info import RankInfo
from gradwire_lab.train.recipe import Recipe
from gradwire_lab.train.schedule import Schedule, scale_of
from gradwire_lab.train.start_check import check_start
from gradwire_lab.train.sync_strategy import SyncStrategy

Strategy = SyncStrategy | GossipStrategy
Listener = Callable[[dict[str, Any]], None]
Save = Callable[["Training", bool], None]
STEP_FIELDS = ("gamma", "rounds", "sent", "payload_ratio", "seconds")  # of the account, where it has them


class Training:
    """The state of a run; `run` brings it to its end.

    Attributes:
        epoch: Whole epochs done.
        at: Steps done in this one.
        step: Steps done altogether.
        seconds: Time spent training, in earlier sessions too.
        best: The best value of the metric so far, and
        kept: the value of the test metric at that time, as checkpoints call it.
        loss: Summed over this epoch's steps.
    """

    def __init__(
        self, recipe: Recipe, rank_info: RankInfo, ramp_steps: int | None = None, task: Task | None = None
    ) -> None:
        prepare(recipe, rank_info)
        self.rank_info = rank_info
        self.task = task or task_of(recipe, rank_info)
        self.model = model_of(recipe, rank_info, self.task.facts)
        self.recipe = recipe = apply_regime(recipe, regime_of(self.model))
        self.loader = loader_of(recipe, self.task, self.model, rank_info)
        own_ramp = 0 if recipe.own_models else round(recipe.sync.ramp * self.loader.steps)
        self.ramp_steps = own_ramp if ramp_steps is None else ramp_steps
        self.strategy: Strategy = (
            GossipStrategy(recipe, rank_info, self.model, self.task)
            if recipe.own_models
            else SyncStrategy(recipe, rank_info, self.model, self.task, self.ramp_steps)
        )
        self.batch = batch_of(recipe, rank_info.world)
        scale = scale_of(recipe, rank_info.world, self.batch, self.strategy.workers_per_node)
        self.schedule = Schedule(recipe, scale, regime_of(self.model), self.loader.steps)
        self.epoch = self.at = self.step = 0
        self.seconds = 0.0
        self.best: float | None = None
        self.kept: float | None = None
        self.loss = torch.zeros((), dtype=torch.float64, device=rank_info.device)
        self._batches = Prefetcher(iter(()))
        self._missed = 0  # steps of this epoch that the group took without this worker
        self.catch_up()

    @property
    def last_step(self) -> int:
        """Where training ends."""
        plan = self.recipe.train
        return plan.iterations or math.ceil(plan.epochs * self.loader.steps)

    @property
    def position(self) -> float:
        """The epoch as a real number."""
        return self.epoch + self.at / self.loader.steps

    @property
    def done(self) -> bool:
        return self.step >= self.last_step

    def run(self, listen: Listener, save: Save, record: dict[str, Any] | None = None) -> dict[str, Any]:
        """Train to the end, or until parameters are no longer finite; the final record then has ``diverged``.

        Args:
            listen: Called with every record, in every process.
            save: Keeps checkpoints.
            record: That of the last epoch, if this is not the first.

        Returns:
            The final record.
        """
        self._began = time.perf_counter() - self.seconds
        listen(self._start_record())
        try:
            while not self.done:
                record = self._one_epoch(listen, save)
            final = {**(record or self._account()), "event": "final", "best": self.kept}
        except Diverged as error:
            if not self.rank_info.simulated:  # the other processes do not know, and wait
                raise
            final = {**(record or {}), **self._diverged_record(str(error)), **self._account()}
        finally:
            self.strategy.close()
        final |= self.strategy.final_fields(self.step)
        listen(final)
        return final

    def catch_up(self, made: int = 0) -> None:
        """Go on where the group is, if this worker has fallen behind and become a copy of a neighbor.

        Args:
            made: The steps that it has made since then, which are still to be counted.
        """
        step = self.strategy.group_step()
        if step is None or step == self.step + made:
            return
        self.step = min(step, self.last_step) - made  # a copy of one that has ended has made a round more than that
        self.epoch, self.at = divmod(self.step, self.loader.steps)
        self.strategy.optimizer.state.clear()
        self.strategy.passes.states = []
        self.loss.zero_()
        self._missed = self.at
        self._batches.restart(self.loader.epoch(self.epoch, self.at + made))

    # -- an epoch --------------------------------------------------------------------------------------------------

    def _one_epoch(self, listen: Listener, save: Save) -> dict[str, Any]:
        record: dict[str, Any] = {}
        if self.at == 0:
            self.loss.zero_()
            self.strategy.passes.states = []
        self._batches = Prefetcher(self.loader.epoch(self.epoch, self.at))
        for batch in self._batches:
            loss = self._one_step(batch)
            for decision in self.strategy.decisions():
                listen({"event": "decision", "step": self.step, "epoch": round(self.position, 4), **decision})
            if self.step % self.recipe.train.log_every == 0 or self.step == 1:
                listen(self._step_record(float(loss)))
            if self.done or self.at == self.loader.steps:
                break
            if self.recipe.train.save_every and self.step % self.recipe.train.save_every == 0:
                self._tick()
                save(self, False)
        if self.done or (self.epoch + 1) % self.recipe.train.eval_every == 0:
            record, best = self._evaluate()
            listen(record)
        if self.at == self.loader.steps:
            self.epoch, self.at = self.epoch + 1, 0
        if record:
            save(self, best)
        return record

    def _one_step(self, batch: Batch) -> Tensor:
        self._missed = self._missed if self.at else 0
        loss = self.strategy.step(batch, self.step, self.schedule.settings(self.position), self._batches.fetch)
        self.catch_up(made=1)
        self.loss += loss
        self.at += 1
        self.step += 1
        if self.at == self.loader.steps:
            self.strategy.check()
        return loss

    def _evaluate(self) -> tuple[dict[str, Any], bool]:
        """A record of the epoch, and whether it is the best so far: by validation where there is a text for it."""
        splits = ("test", "valid") if isinstance(self.task, TextTask) else ("test",)
        scores, fields = self.strategy.evaluate(splits)
        test, judge = scores[0], scores[-1]
        self.schedule.record_loss(judge.loss)
        best = better(judge.metric, judge.value, self.best)
        if best:
            self.best, self.kept = judge.value, test.value
        self._tick()
        behind = self.strategy.common_seconds(self.seconds) - self.seconds
        self._began, self.seconds = self._began - behind, self.seconds + behind
        record = {
            "event": "epoch",
            "epoch": round(self.position, 4),
            "step": self.step,
            "train_loss": self.strategy.workers.mean_loss(self.loss / max(1, self.at - self._missed)),
            "test_loss": test.loss,
            "metric": test.metric,
            "value": test.value,
            "top5": test.top5,
            **({"valid_loss": judge.loss} if judge is not test else {}),
            **self._account(),
            **fields,  # some of which are those of all workers, where an account is one worker's
        }
        return record, best

    # -- records ---------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self.seconds = time.perf_counter() - self._began

    def _start_record(self) -> dict[str, Any]:
        return {
            "event": "start",
            **self.strategy.start_fields(),
            "world": self.rank_info.world,
            "simulated": self.rank_info.simulated,
            "virtual": self.rank_info.simulated,  # the name of this field before, for one release
            "device": str(self.rank_info.device),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "batch": self.batch * self.recipe.train.accumulate,
            "steps_per_epoch": self.loader.steps,
            "steps": self.last_step,
            "step": self.step,
            "seconds": self.seconds,
            **({"start_warning": warning} if (warning := check_start(self.recipe, self.last_step)) else {}),
        }

    def _step_record(self, loss: float) -> dict[str, Any]:
        self._tick()
        account = self._account()
        return {
            "event": "step",
            "step": self.step,
            "epoch": round(self.position, 4),
            "loss": loss,
            "lr": self.strategy.optimizer.param_groups[0]["lr"],
            **{name: account[name] for name in STEP_FIELDS if name in account},
        }

    def _diverged_record(self, why: str) -> dict[str, Any]:
        """The final record of a training that diverged: as good as guessing."""
        metric, value = chance_level(self.task)
        self._tick()
        fields = {"metric": metric, "value": value, "best": self.kept, "diverged": why}
        return {"event": "final", "epoch": round(self.position, 4), "step": self.step, **fields}

    def _account(self) -> dict[str, Any]:
        return {**self.strategy.account(self.step), "seconds": self.seconds}


def model_of(recipe: Recipe, rank_info: RankInfo, facts: Any) -> nn.Module:
    """The recipe's model, on its device."""
    model = build(recipe.model.name, recipe.model.options, facts, recipe.train.seed).to(rank_info.device)
    return model.to(memory_format=torch.channels_last) if recipe.train.channels_last else model  # type: ignore[call-overload]


def prepare(recipe: Recipe, rank_info: RankInfo) -> None:
    """Set what holds for the whole process."""
    if rank_info.device.type == "cuda":
        torch.cuda.set_device(rank_info.device)
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = not recipe.train.deterministic
    torch.use_deterministic_algorithms(recipe.train.deterministic, warn_only=True)
