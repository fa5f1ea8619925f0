"""Decentralized: one training in which workers gossip, from its recipe to its last record.

    batches -> every worker's gradient -> clip -> its own step -> a round with its neighbors

With ``gossip.across`` several workers are one: what is clipped is the mean of their gradients.

Each worker is evaluated by itself on all test data, and so is the mean of their models, which is what is saved as the
run's model.
"""

from typing import Any

import torch
from torch import Tensor

from gradwire.gossip import Centralized, Diverged
from gradwire_lab.train.data import Batch, ImageTask, Task, TextTask
from gradwire_lab.train.exam import Score, better, examine
from gradwire_lab.train.feed import Ahead, batch_of, exam_of, loader_of, task_of
from gradwire_lab.train.local import LocalPasses
from gradwire_lab.train.loop import Listener, Training, model_of, prepare
from gradwire_lab.train.models import regime_of
from gradwire_lab.train.neighborhood import Neighborhood, Weights
from gradwire_lab.train.optim import obeying, tell
from gradwire_lab.train.place import Place, alone
from gradwire_lab.train.recipe import Recipe
from gradwire_lab.train.schedule import Schedule, scale_of


class Decentralized(Training):
    """A `Training` whose workers never agree on one model.

    Attributes:
        hood: The workers of this process.
    """

    passes: LocalPasses  # type: ignore[assignment]

    def __init__(self, recipe: Recipe, place: Place, ramp_steps: int | None = None, task: Task | None = None) -> None:
        del ramp_steps  # of compression that [sync] describes
        if recipe.gossip.elastic and place.meeting is None:
            raise ValueError(
                "gossip.elastic is for workers that may die, and virtual ones live and die together; give --workers, "
                "or leave it out"
            )
        prepare(recipe, place)
        self.recipe, self.place, self.scaler, self.ramp_steps = recipe, place, None, 0
        self.task = task or task_of(recipe, place)
        self.model = model_of(recipe, place, self.task.facts)
        self.recipe = recipe = obeying(recipe, regime_of(self.model))
        self.loader = loader_of(recipe, self.task, self.model, place)
        self.hood = Neighborhood(self.model, place, recipe)
        self.passes = LocalPasses(recipe, self.hood.replicas, place)
        self.optimizer = _optimizer(recipe, self.hood.replicas.rows)
        self._decay = _decay(recipe, self.hood.replicas.tensors.shapes, place.device)
        self.batch = batch_of(recipe, place.world)
        scale = scale_of(recipe, place.world, self.batch, self.hood.beside)
        self.schedule = Schedule(recipe, scale, regime_of(self.model), self.loader.steps)
        self.epoch = self.at = self.step = 0
        self.seconds = 0.0
        self.best: float | None = None
        self.kept: float | None = None
        self.loss = torch.zeros((), dtype=torch.float64, device=place.device)
        self._batches, self._taken, self._missed = Ahead(iter(())), 0, 0
        self.follow()

    # -- a step ------------------------------------------------------------------------------------------------------

    def go(self, listen: Listener, save: Any, record: dict[str, Any] | None = None) -> dict[str, Any]:
        """Train to the end, or until parameters are no longer finite; the final record then says so."""
        try:
            return super().go(listen, save, record)
        except Diverged as wrong:
            if not self.place.virtual:  # the others do not know, and wait
                raise
            final = {**(record or {}), **self._hopeless(str(wrong)), **self._account(), **self._totals()}
            listen(final)
            return final
        finally:
            self.hood.close()

    def follow(self) -> None:
        """Go where the group is, if this worker has fallen behind and become a copy of a neighbor."""
        if self.hood.taken == self._taken:
            return
        self._taken, before = self.hood.taken, self.step
        self.step = self.hood.step
        if self.step == before:
            return
        self.epoch, self.at = divmod(self.step, self.loader.steps)
        self.optimizer.state.clear()
        self.passes.states = []
        self.loss.zero_()
        self._missed = self.at
        self._batches.turn_to(self.loader.epoch(self.epoch, self.at))

    def _one_step(self, batch: Batch) -> Tensor:
        settings = self.schedule.settings(self.position)
        tell(self.optimizer, {name: value for name, value in settings.items() if name != "weight_decay"})
        self._missed = self._missed if self.at else 0
        loss = self.passes(batch, self.step)
        self.hood.average_()
        self._update()
        self.hood.mix_()
        self.loss += loss
        self.at += 1
        self.step += 1
        self.follow()
        if self.at == self.loader.steps:
            self.hood.check()
        return loss

    @torch.no_grad()
    def _update(self) -> None:
        """Each worker's own step, all workers' at once."""
        rows, grads = self.hood.replicas.rows, self.hood.replicas.grads
        plan = self.recipe.optimizer
        longest = plan.local_clip or plan.clip
        if longest:
            grads *= (longest / (grads.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1.0)
        if self._decay is not None and plan.name == "sgd":
            grads += self._decay * rows
        elif self._decay is not None:
            rows *= 1.0 - self.optimizer.param_groups[0]["lr"] * self._decay
        rows.grad = grads
        self.optimizer.step()

    # -- evaluation --------------------------------------------------------------------------------------------------

    def examined(self, weights: Weights, split: str, share: bool) -> Score:
        """A model's score; all processes examine the same one and share the data, or each its own on all of them."""
        model = self.hood.replicas.show_(*weights)
        share = share and not self.hood.elastic  # the dead examine nothing
        place = self.place if share else alone(1, self.place.device)
        total = self.hood.total if share else lambda sums: sums
        return examine(model, self.task, exam_of(self.recipe, self.task, place, split), total, self._precision)

    @property
    def _precision(self) -> str:
        return self.recipe.train.precision

    def score(self, split: str = "test") -> Score:
        """Of the mean model."""
        return self.examined(self.hood.mean(), split, share=True)

    def workers(self, split: str = "test") -> list[Score]:
        """Of every worker that can be reached, by rank."""
        own = [self.examined(self.hood.own(i), split, share=False) for i in range(len(self.place.ranks))]
        sheet = torch.zeros(self.place.world, 3, dtype=torch.float64, device=self.place.device)
        for rank, score in zip(self.place.ranks, own, strict=True):
            sheet[rank] = torch.tensor([score.loss, score.value, 1.0], dtype=torch.float64)
        rows = self.hood.total(sheet).tolist()
        return [Score(loss, own[0].metric, value, None) for loss, value, there in rows if there]

    def _evaluate(self) -> tuple[dict[str, Any], bool]:
        """A record of the epoch, and whether it is the best so far, by the mean over workers."""
        self.hood.check()
        tested = self.workers()
        test, mean = _mean(tested), self.hood.mean()
        middle = self.examined(mean, "test", share=True)
        judge = _mean(self.workers("valid")) if isinstance(self.task, TextTask) else test
        self.schedule.heard(judge.loss)
        best = better(judge.metric, judge.value, self.best)
        if best:
            self.best, self.kept = judge.value, test.value
        self._tick()
        behind = self.hood.latest(self.seconds) - self.seconds  # who came back goes by the clock of those who stayed
        self._began, self.seconds = self._began - behind, self.seconds + behind
        return {
            "event": "epoch",
            "epoch": round(self.position, 4),
            "step": self.step,
            "train_loss": self._train_loss(),
            "test_loss": test.loss,
            "metric": test.metric,
            "value": test.value,
            "top5": None,
            "workers": [score.value for score in tested],
            "mean_model": middle.value,
            "consensus": self.hood.distance(mean[0]),
            **({"valid_loss": judge.loss} if judge is not test else {}),
            **self._account(),
            **self.hood.losses(),
        }, best

    def _train_loss(self) -> float:
        mean = self.loss / max(1, self.at - self._missed)
        return (mean if self.place.virtual else self.hood.mean_of(mean)).item()

    def _hopeless(self, why: str) -> dict[str, Any]:
        """The final record of a training that diverged: as good as guessing."""
        image = isinstance(self.task, ImageTask)
        metric = "top1" if image else "perplexity"
        chance = 1.0 / self.task.classes if isinstance(self.task, ImageTask) else float(self.task.facts["vocab"])  # type: ignore[arg-type]
        self._tick()
        return {
            "event": "final",
            "epoch": round(self.position, 4),
            "step": self.step,
            "metric": metric,
            "value": chance,
            "best": self.kept,
            "diverged": why,
        }

    # -- records -----------------------------------------------------------------------------------------------------

    def _opening(self) -> dict[str, Any]:
        codec = "" if self.hood.method.late else f" with {self.recipe.gossip.codec or 'fp32'}"
        spec = f"{self.hood.method}{codec}"
        return {
            "event": "start",
            "spec": spec,
            "method": f"{spec} on {self.hood.method.graph.on(len(self.hood.hosts))}",
            "world": self.place.world,
            "virtual": self.place.virtual,
            "device": str(self.place.device),
            "parameters": self.hood.replicas.tensors.total,
            "batch": self.batch * self.recipe.train.accumulate,
            "steps_per_epoch": self.loader.steps,
            "steps": self.last_step,
            "step": self.step,
            "seconds": self.seconds,
        }

    def _progress(self, loss: float) -> dict[str, Any]:
        self._tick()
        account = self._account()
        return {
            "event": "step",
            "step": self.step,
            "epoch": round(self.position, 4),
            "loss": loss,
            "lr": self.optimizer.param_groups[0]["lr"],
            "gamma": account["gamma"],
            "sent": account["sent"],
            "payload_ratio": account["payload_ratio"],
            "seconds": self.seconds,
        }

    def _account(self) -> dict[str, Any]:
        """Bytes as the first worker counts them; it speaks to as many neighbors as it has."""
        report, clock = self.hood.report(), self.hood.clock
        rounds, told = self.hood.rounds(self.step, report.degree)
        dense = 4.0 * self.hood.share * rounds
        around = 2 * (report.world - 1) / report.world  # how often each number goes around a ring
        central = isinstance(self.hood.method, Centralized)
        payload = report.sent / max(1e-9, around if central else told)
        return {
            "sent": report.sent,
            "received": report.received,
            "payload": payload,
            "dense": dense,
            "payload_ratio": dense / payload if payload else float("inf"),
            "ring": around * dense,
            "wire_ratio": around * dense / report.sent if report.sent else float("inf"),
            "skipped": 0,
            "gamma": report.gamma,
            "encode_seconds": clock.encode,
            "wire_seconds": clock.wire,
            "decode_seconds": clock.decode,
            "seconds": self.seconds,
            **({"hosts": report.world, "sent_inside": report.sent_inside} if report.beside > 1 else {}),
            **({name: getattr(report, name) for name in ("dropped", "rejoined", "drift")} if self.hood.elastic else {}),
        }

    def _totals(self) -> dict[str, Any]:
        return {"rules": {}, "layers": {}}

    def _decisions(self) -> list[dict[str, Any]]:
        return []  # `auto` is no way to gossip


def _mean(scores: list[Score]) -> Score:
    n = len(scores)
    return Score(sum(s.loss for s in scores) / n, scores[0].metric, sum(s.value for s in scores) / n, None)


def _optimizer(recipe: Recipe, rows: Tensor) -> torch.optim.Optimizer:
    """Over all rows at once; weight decay, which spares some columns, is not its own."""
    plan = recipe.optimizer
    if plan.name == "adamw":
        return torch.optim.AdamW([rows], lr=plan.lr, betas=(plan.beta1, plan.beta2), eps=plan.eps, weight_decay=0.0)
    return torch.optim.SGD([rows], lr=plan.lr, momentum=plan.momentum, nesterov=plan.nesterov and plan.momentum > 0)


def _decay(recipe: Recipe, shapes: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor | None:
    """The weight decay of every column; None if nothing decays."""
    plan = recipe.optimizer
    if not plan.weight_decay:
        return None
    each = [torch.full(shape, plan.weight_decay if plan.decay_norms or len(shape) > 1 else 0.0) for shape in shapes]
    return torch.cat([x.flatten() for x in each]).to(device)
