"""Local passes: forward and backward of every worker of this process, each through its own model.

Image models of many workers go through one pass together, on a GPU recorded once as a CUDA graph; recurrent ones go
through it in turn. Random numbers (dropout) depend on (seed, step, rank) only, so a resumed run draws what it would
have drawn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gradwire_lab.train.cuda_graphs import CapturedPass
from gradwire_lab.train.data import IGNORED, Batch
from gradwire_lab.train.loading import recurrent
from gradwire_lab.train.models import State, transform_of
from gradwire_lab.train.precision import autocast, reseed
from gradwire_lab.train.rank_info import RankInfo
from gradwire_lab.train.recipe import Recipe
from gradwire_lab.train.replicas import Replicas
from gradwire_lab.train.vmap_layers import interleave_channels


@dataclass
class GossipPasses:
    """All passes of a step.

    Attributes:
        states: What a recurrent model remembers, by worker and pass; empty before the first step of an epoch.
    """

    recipe: Recipe
    replicas: Replicas
    rank_info: RankInfo
    states: list[list[State]] = field(default_factory=list)

    def __post_init__(self) -> None:
        model = self.replicas.model
        self._recurrent = recurrent(model)
        self._transform = transform_of(model, training=True)
        self._recorded: CapturedPass | None = None
        wanted = self.recipe.gossip.passes
        if wanted == "together" and self._recurrent:
            raise ValueError(
                f"{self.recipe.model.name} is recurrent, and such models pass one after another; use sequential"
            )
        self.stacked = wanted == "together" or (wanted == "auto" and not self._recurrent and self.replicas.count > 1)

    def __call__(self, batch: Batch, step: int) -> Tensor:
        """The mean loss of the workers; their gradients are in ``replicas.grads``, a mean over the passes of a step."""
        count, passes = self.replicas.count, self.recipe.train.accumulate
        inputs = batch.inputs if self._transform is None else self._transform(batch.inputs)
        shares = inputs.view(count, -1, *inputs.shape[1:]), batch.targets.view(count, -1, *batch.targets.shape[1:])
        parts = list(zip(shares[0].chunk(passes, 1), shares[1].chunk(passes, 1), strict=True))
        if self.stacked:
            return self._average([partial(self._together, x, y, step) for x, y in parts])
        return torch.stack([self._own(i, parts, step) for i in range(count)]).mean()

    def _average(self, runs: Sequence[Callable[[], Tensor]], rows: slice = slice(None)) -> Tensor:
        """The mean of losses and gradients over several passes."""
        grads, losses = self.replicas.grads[rows], [runs[0]()]
        if len(runs) > 1:
            total = grads.clone()
            for run in runs[1:]:
                losses.append(run())
                total += grads
            grads.copy_(total / len(runs))
        return torch.stack(losses).mean()

    # -- together ----------------------------------------------------------------------------------------------------

    def _together(self, inputs: Tensor, targets: Tensor, step: int) -> Tensor:
        if inputs.dim() == 5:
            inputs = interleave_channels(inputs)
        reseed(self.recipe.train.seed, step, self.rank_info.ranks[0], self.rank_info.device)
        if self.rank_info.device.type != "cuda" or not self.recipe.train.graphs:
            return self._pass(inputs, targets).mean()
        if self._recorded is None:
            self._recorded = self._record(inputs, targets)
        return self._recorded(inputs, targets).mean()

    def _pass(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.replicas.together(self._objective, inputs, targets)

    def _record(self, inputs: Tensor, targets: Tensor) -> "CapturedPass":
        """Record the pass; warming up must leave no trace in the models' statistics."""
        kept = {name: x.clone() for name, x in self.replicas.buffers.items()}
        made = CapturedPass(self._pass, inputs, targets)
        for name, x in self.replicas.buffers.items():
            x.copy_(kept[name])
        return made

    # -- in turn -----------------------------------------------------------------------------------------------------

    def _own(self, which: int, parts: list[tuple[Tensor, Tensor]], step: int) -> Tensor:
        reseed(self.recipe.train.seed, step, self.rank_info.ranks[which], self.rank_info.device)
        if self._recurrent and len(self.states) <= which:
            start: Callable[[int], State] = self.replicas.model.start  # type: ignore[assignment]
            self.states.append([start(x.shape[1]) for x, _ in parts])
        runs = [partial(self._one, which, i, x[which], y[which]) for i, (x, y) in enumerate(parts)]
        return self._average(runs, slice(which, which + 1))

    def _one(self, which: int, turn: int, inputs: Tensor, targets: Tensor) -> Tensor:
        if self.recipe.train.channels_last and inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        if not self._recurrent:
            return self.replicas.alone(which, self._objective, inputs, targets)

        def reads_on(model: Callable[..., Any], x: Tensor, y: Tensor) -> Tensor:
            with autocast(self.rank_info.device, self.recipe.train.precision, cache=False):
                logits, (hidden, cell) = model(x, self.states[which][turn])
                self.states[which][turn] = hidden.detach(), cell.detach()
                return self._loss(logits, y)

        return self.replicas.alone(which, reads_on, inputs, targets)

    # -- loss --------------------------------------------------------------------------------------------------------

    def _objective(self, model: Callable[..., Any], inputs: Tensor, targets: Tensor) -> Tensor:
        with autocast(self.rank_info.device, self.recipe.train.precision, cache=False):
            return self._loss(model(inputs), targets)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        smoothing = self.recipe.train.label_smoothing
        flat = logits.flatten(0, -2), targets.flatten()
        return F.cross_entropy(*flat, ignore_index=IGNORED, label_smoothing=smoothing)
