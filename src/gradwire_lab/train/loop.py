"""Loop: one training, from its recipe to its last record, for real ranks and for virtual workers alike.

    batches -> every worker's gradients -> agreement -> clip -> optimizer

The host waits for the device only to log, to evaluate and to save.
"""

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from gradwire_lab.autotune.pilot import AutoWire
from gradwire_lab.train.compression import arguments, corrects_momentum
from gradwire_lab.train.crew import Crew
from gradwire_lab.train.data import Batch, TextTask
from gradwire_lab.train.exam import Score, better, examine
from gradwire_lab.train.feed import Ahead, batch_of, exam_of, loader_of, task_of
from gradwire_lab.train.models import build, regime_of
from gradwire_lab.train.optim import clip_, obeying, optimizer_of, tell
from gradwire_lab.train.passes import Passes
from gradwire_lab.train.place import Place
from gradwire_lab.train.recipe import Recipe
from gradwire_lab.train.schedule import Schedule, scale_of

Listener = Callable[[dict[str, Any]], None]


class Training:
    """The state of a run; `go` brings it to its end.

    Attributes:
        epoch: Whole epochs behind us.
        at: Steps behind us in this one.
        step: Steps behind us altogether.
        seconds: Time spent training, in earlier sittings too.
        best: The best value of the metric so far, and
        kept: the value of the test metric at that time.
        elsewhere: Dense bytes of earlier sittings by the size of their ring, where it was another than this one's.
        skipped_before: Steps that earlier sittings skipped.
    """

    def __init__(self, recipe: Recipe, place: Place, ramp_steps: int | None = None) -> None:
        prepare(recipe, place)
        self.recipe, self.place = recipe, place
        self.task = task_of(recipe, place)
        self.model = model_of(recipe, place, self.task.facts)
        self.recipe = recipe = obeying(recipe, regime_of(self.model))
        self.loader = loader_of(recipe, self.task, self.model, place)
        self.ramp_steps = round(recipe.sync.ramp * self.loader.steps) if ramp_steps is None else ramp_steps
        self.scaler = torch.amp.GradScaler(place.device.type) if recipe.train.precision == "fp16" else None
        self.crew = Crew(self.model, place, arguments(recipe, self.ramp_steps), self.scaler)
        self.passes = Passes(recipe, self.crew)
        self.optimizer = optimizer_of(recipe, self.model)
        self.batch = batch_of(recipe, place.world)
        scale = scale_of(recipe, place.world, self.batch)
        self.schedule = Schedule(recipe, scale, regime_of(self.model), self.loader.steps)
        self.epoch = self.at = self.step = 0
        self.seconds = 0.0
        self.best: float | None = None
        self.kept: float | None = None
        self.elsewhere: dict[int, int] = {}
        self.skipped_before = 0
        self._batches = Ahead(iter(()))
        self._told = 0  # decisions of `auto`
        self.loss = torch.zeros((), dtype=torch.float64, device=place.device)  # summed over this epoch's steps

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

    @property
    def rings(self) -> dict[int, int]:
        """Dense bytes of all sittings by how many were in the ring that would have carried them."""
        report = self.crew.wire.report()
        here = report.world if report.hosts is None else report.hosts
        return dict(sorted({**self.elsewhere, here: report.dense - sum(self.elsewhere.values())}.items()))

    @property
    def skipped(self) -> int:
        """Steps that were skipped in all sittings."""
        return self.skipped_before + self.crew.wire.report().skipped

    def go(
        self, listen: Listener, save: Callable[["Training", bool], None], record: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Train to the end.

        Args:
            listen: Hears every record, in every process.
            save: Keeps checkpoints.
            record: That of the last epoch, if this is not the first.

        Returns:
            The final record.
        """
        self._began = time.perf_counter() - self.seconds
        listen(self._opening())
        while not self.done:
            record = self._one_epoch(listen, save)
        final = {**(record or self._account()), "event": "final", "best": self.kept, **self._totals()}
        listen(final)
        return final

    # -- an epoch --------------------------------------------------------------------------------------------------

    def _one_epoch(self, listen: Listener, save: Callable[["Training", bool], None]) -> dict[str, Any]:
        record: dict[str, Any] = {}
        if self.at == 0:
            self.loss.zero_()
            self.passes.states = []
        self._batches = Ahead(self.loader.epoch(self.epoch, self.at))
        for batch in self._batches:
            loss = self._one_step(batch)
            for decision in self._decisions():
                listen(decision)
            if self.step % self.recipe.train.log_every == 0 or self.step == 1:
                listen(self._progress(float(loss)))
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

    def _one_step(self, batch: Batch) -> torch.Tensor:
        tell(self.optimizer, self.schedule.settings(self.position))
        grads, loss = self.passes(batch, self.step)
        self._batches.fetch()  # while the device is busy with the pass
        self.crew.agree_(grads)
        self._update()
        self.loss += loss
        self.at += 1
        self.step += 1
        return loss

    def _update(self) -> None:
        clip = self.recipe.optimizer.clip
        if self.scaler is None:
            if clip:
                clip_([p.grad for p in self.model.parameters()], clip)
            self.optimizer.step()
            return
        self.scaler.unscale_(self.optimizer)
        if clip:
            clip_([p.grad for p in self.model.parameters()], clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    # -- evaluation ------------------------------------------------------------------------------------------------

    def score(self, split: str = "test") -> Score:
        """Evaluate the model with the statistics that the recipe asks for."""
        self.crew.install(self.crew.shown_buffers(self.recipe.train.buffers))
        batches = exam_of(self.recipe, self.task, self.place, split)
        score = examine(self.model, self.task, batches, self.crew.total, self.recipe.train.precision)
        self.crew.install(self.crew.buffers[0])
        return score

    def _evaluate(self) -> tuple[dict[str, Any], bool]:
        """A record of the epoch, and whether it is the best so far: by validation where there is a text for it."""
        test = self.score()
        judge = self.score("valid") if isinstance(self.task, TextTask) else test
        self.schedule.heard(judge.loss)
        best = better(judge.metric, judge.value, self.best)
        if best:
            self.best, self.kept = judge.value, test.value
        self._tick()
        train = self.crew.total(self.loss / max(1, self.at)).item() / (1 if self.place.virtual else self.place.world)
        record = {
            "event": "epoch",
            "epoch": round(self.position, 4),
            "step": self.step,
            "train_loss": train,
            "test_loss": test.loss,
            "metric": test.metric,
            "value": test.value,
            "top5": test.top5,
            **({"valid_loss": judge.loss} if judge is not test else {}),
            **self._account(),
        }
        return record, best

    # -- records ---------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self.seconds = time.perf_counter() - self._began

    def _opening(self) -> dict[str, Any]:
        return {
            "event": "start",
            "spec": self.recipe.sync.spec,
            "method": self.crew.wire.spec,
            "world": self.place.world,
            "virtual": self.place.virtual,
            "device": str(self.place.device),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "batch": self.batch * self.recipe.train.accumulate,
            "steps_per_epoch": self.loader.steps,
            "steps": self.last_step,
            "step": self.step,
            "seconds": self.seconds,
        }

    def _progress(self, loss: float) -> dict[str, Any]:
        self._tick()
        rate = self.optimizer.param_groups[0]["lr"]
        report = self.crew.wire.report()
        return {
            "event": "step",
            "step": self.step,
            "epoch": round(self.position, 4),
            "loss": loss,
            "lr": rate,
            "sent": report.sent,
            "payload_ratio": report.payload_ratio,
            "seconds": self.seconds,
        }

    def _decisions(self) -> list[dict[str, Any]]:
        """What `auto` has decided since this was last asked."""
        wire = self.crew.wire
        fresh = wire.decisions[self._told :] if isinstance(wire, AutoWire) else []
        self._told += len(fresh)
        here = {"event": "decision", "step": self.step, "epoch": round(self.position, 4)}
        return [{**here, "spec": one.spec, "why": one.why} for one in fresh]

    def _account(self) -> dict[str, Any]:
        report = self.crew.wire.report()
        names = ("sent", "received", "payload", "dense", "payload_ratio")
        clocks = ("encode_seconds", "wire_seconds", "decode_seconds")
        hosts = () if report.hosts is None else ("hosts", "sent_inside")  # then all other bytes are between hosts
        ring = sum(2 * (size - 1) / size * dense for size, dense in self.rings.items())
        return {
            **{name: getattr(report, name) for name in names},
            "ring": ring,  # what a rank would have sent in float32 ring all-reduces
            "wire_ratio": ring / report.sent if report.sent else math.inf,
            "skipped": self.skipped,
            **{name: getattr(report, name) for name in (*clocks, *hosts)},
            "seconds": self.seconds,
        }

    def _totals(self) -> dict[str, Any]:
        from gradwire_lab.train.prediction import bytes_by_layer

        rules = {label: list(pair) for label, pair in self.crew.wire.report().rules.items()}
        return {"rules": rules, "layers": bytes_by_layer(self.crew.wire.session.whole, self.step)}


def model_of(recipe: Recipe, place: Place, facts: Any) -> torch.nn.Module:
    """The recipe's model, on its device."""
    model = build(recipe.model.name, recipe.model.options, facts, recipe.train.seed).to(place.device)
    return model.to(memory_format=torch.channels_last) if recipe.train.channels_last else model  # type: ignore[call-overload]


def prepare(recipe: Recipe, place: Place) -> None:
    """Set what holds for the whole process."""
    if recipe.optimizer.name == "adamw" and corrects_momentum(recipe):
        raise ValueError(
            "AdamW has momentum of its own, and this feedback applies momentum too; choose another of both"
        )
    if place.device.type == "cuda":
        torch.cuda.set_device(place.device)
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = not recipe.train.deterministic
    torch.use_deterministic_algorithms(recipe.train.deterministic, warn_only=True)
