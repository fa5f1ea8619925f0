"""Schedule: the learning rate as a function of the epoch, which is a real number and rises with every step.

    rate(epoch) = lr * scale * shape(epoch)

``scale`` is how much larger the batch is than the one that ``lr`` was tuned for; during warm-up the rate climbs in a
straight line from ``warmup_from * lr`` to ``lr * scale``. Only `plateau` remembers: how often the loss has stalled.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradwire_lab.train.models.regime import Regime, settings_at
from gradwire_lab.train.recipe import Recipe


@dataclass
class Schedule:
    """The rates of one run.

    Attributes:
        recipe: Whose.
        scale: By how much a larger batch raises the rate.
        regime: What a user's own model sets instead.
        steps: Of an epoch, where a run may end by iterations; 0 where it does not.
        stalls: How often the rate was cut because the metric had stalled.
        best: The best loss so far; None before the first that is finite.
        waited: Evaluations since then.
    """

    recipe: Recipe
    scale: float = 1.0
    regime: Regime | None = None
    steps: int = 0
    stalls: int = 0
    best: float | None = None
    waited: int = 0

    def settings(self, epoch: float) -> dict[str, float]:
        """The settings of the optimizer: ``lr``, and with a regime perhaps more."""
        if self.regime is None:
            return {"lr": self.rate(epoch)}
        settings = settings_at(self.regime, int(epoch))
        numbers = {
            name: float(value)
            for name, value in settings.items()
            if isinstance(value, int | float) and not isinstance(value, bool)  # switches stay as they are
        }
        return {**numbers, "lr": numbers.get("lr", self.recipe.optimizer.lr) * self.scale}

    def rate(self, epoch: float) -> float:
        plan, lr = self.recipe.schedule, self.recipe.optimizer.lr
        top = lr * self.scale
        if plan.epochs:  # what the recipe's numbers are written for, in a run of another length
            epoch = epoch * plan.epochs / self.length
        if epoch < plan.warmup:
            low = lr * plan.warmup_from
            return low + (top - low) * epoch / plan.warmup
        return top * self._shape(epoch)

    def record_loss(self, loss: float) -> None:
        """Take note of an evaluation."""
        self.waited += 1
        if loss < (math.inf if self.best is None else self.best):
            self.best, self.waited = loss, 0
        elif self.recipe.schedule.kind == "plateau" and self.waited > self.recipe.schedule.patience:
            self.stalls, self.waited = self.stalls + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"stalls": self.stalls, "best": self.best, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.stalls, self.best, self.waited = state["stalls"], state["best"], state["waited"]

    @property
    def length(self) -> float:
        """How many epochs the schedule spans: all, also where iterations end it earlier, and more where they go on."""
        plan = self.recipe.train
        return max(plan.epochs, plan.iterations / self.steps) if self.steps else plan.epochs

    def _shape(self, epoch: float) -> float:
        plan = self.recipe.schedule
        if plan.kind == "steps":
            return math.pow(plan.factor, bisect_right(plan.milestones, epoch))
        if plan.kind == "cosine":
            end = plan.epochs or self.length
            done = min(1.0, (epoch - plan.warmup) / max(1e-9, end - plan.warmup))
            return plan.floor + (1 - plan.floor) * (1 + math.cos(math.pi * done)) / 2
        if plan.kind == "linear":
            epochs, shares = zip(*plan.points, strict=True)
            return float(np.interp(epoch, epochs, shares))
        if plan.kind == "exponential":
            return math.pow(plan.factor, epoch - plan.warmup)
        return math.pow(plan.factor, self.stalls) if plan.kind == "plateau" else 1.0


def scale_of(recipe: Recipe, world: int, batch: int, workers_per_node: int = 1) -> float:
    """How much the rate grows: by the batch of a step of all workers over the one that the rate is meant for.

    With gossip, several workers may be one node.
    """
    plan = recipe.schedule
    averaged = workers_per_node * _averaged(recipe, world // workers_per_node) if plan.scale == "graph" else world
    larger = averaged * batch * recipe.train.accumulate / (plan.base_batch or batch)
    return {"none": 1.0, "linear": larger, "graph": larger, "sqrt": math.sqrt(larger)}[plan.scale]


def _averaged(recipe: Recipe, world: int) -> float:
    """How many workers, or nodes, a step averages: all of them, or with gossip one and its neighbors."""
    if not recipe.gossip.method:
        return world
    from gradwire.gossip.lr_scaling import rate_scale
    from gradwire_lab.train.gossip_workers import gossip_method_of

    return rate_scale(gossip_method_of(recipe).graph.on(world))
