"""Gossip strategy: workers that step models of their own, as [gossip] or [local] of a recipe describes.

    every worker's gradient -> clip -> its own step -> a round with its neighbors

With ``gossip.across`` several workers are one node: what is clipped is the mean of their gradients. Each worker is
evaluated by itself on all test data, and so is the mean of their models, which is what is saved as the run's model.
What they add to a checkpoint:

model.safetensors    the mean of all workers' models, with the mean of their statistics
rank-0.safetensors   a worker's own model, statistics, momentum, and the gossip's memory
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.gossip import Centralized
from gradwire.integrations.gossip import GossipHandle
from gradwire_lab.train import checkpoint
from gradwire_lab.train.checkpoint import part, prefixed
from gradwire_lab.train.data import Batch, Task
from gradwire_lab.train.evaluation import Score, evaluate_model
from gradwire_lab.train.forward_backward import Passes
from gradwire_lab.train.gossip_workers import GossipWorkers, Weights, gossip_method_of
from gradwire_lab.train.loading import evaluation_batches, recurrent
from gradwire_lab.train.local_rows import LocalRows
from gradwire_lab.train.optimizers import plain_optimizer, set_hyperparameters
from gradwire_lab.train.rank_info import RankInfo, simulated_ranks
from gradwire_lab.train.recipe import Recipe
from gradwire_lab.train.workers import account

LOSSES = ("dropped", "rejoined", "drift")  # what is counted where workers may come and go


class GossipStrategy:
    """What the loop asks of workers that gossip, or take local steps; see `SyncStrategy`."""

    def __init__(self, recipe: Recipe, rank_info: RankInfo, model: nn.Module, task: Task) -> None:
        if recipe.gossip.elastic and rank_info.rendezvous is None:
            raise ValueError("gossip.elastic needs real processes; use --workers instead of --in-process")
        self.recipe, self.rank_info, self.task = recipe, rank_info, task
        self.workers = GossipWorkers(model, rank_info, recipe)
        self.workers_per_node = len(self.workers.handle.hosts[0])
        self.passes = Passes(recipe, self.workers, pass_mode(recipe, self.workers))
        # Over all rows at once. Weight decay spares some columns, and is applied apart.
        groups = [{"params": [self.workers.rows], "weight_decay": 0.0}]
        self.optimizer = plain_optimizer(recipe.optimizer, groups)
        self._decay = _decay(recipe, self.workers.flat.tensors.shapes, rank_info.device)
        self._resyncs = 0

    def step(self, batch: Batch, step: int, settings: Mapping[str, float], prefetch: Callable[[], None]) -> Tensor:
        set_hyperparameters(self.optimizer, {name: x for name, x in settings.items() if name != "weight_decay"})
        _, loss = self.passes(batch, step)
        self.workers.average_gradients()
        self._update()
        self.workers.mix()
        return loss

    @torch.no_grad()
    def _update(self) -> None:
        """Each worker's own step, all workers' at once."""
        rows, grads = self.workers.rows, self.workers.grads
        plan = self.recipe.optimizer
        max_norm = plan.local_clip or plan.clip
        if max_norm:
            grads *= (max_norm / (grads.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1.0)
        if self._decay is not None and plan.name == "sgd":
            grads += self._decay * rows
        elif self._decay is not None:
            rows *= 1.0 - self.optimizer.param_groups[0]["lr"] * self._decay
        rows.grad = grads
        self.optimizer.step()

    def group_step(self) -> int | None:
        handle = self.workers.handle
        if handle.resyncs == self._resyncs:
            return None
        self._resyncs = handle.resyncs
        return handle.step

    def check(self) -> None:
        self.workers.handle.check()

    def close(self) -> None:
        self.workers.handle.close()

    # -- evaluation and records ------------------------------------------------------------------------------------

    def score(self, split: str = "test") -> Score:
        return self._score(self.workers.mean_model(), split, share=True)

    def _score(self, weights: Weights, split: str, share: bool) -> Score:
        """All processes evaluate the same model, each on a share of the data; or each its own on all of them."""
        model = self.workers.show_(*weights)
        share = share and not self.workers.handle.elastic  # a worker that died would leave its share out
        rank_info = self.rank_info if share else simulated_ranks(1, self.rank_info.device)
        total = self.workers.total if share else lambda sums: sums
        batches = evaluation_batches(self.recipe, self.task, rank_info, split)
        return evaluate_model(model, self.task, batches, total, self.recipe.train.precision)

    def worker_scores(self, split: str = "test") -> list[Score]:
        """Of every worker that can be reached, by rank."""
        weights = zip(self.workers.rows, self.workers.buffers, strict=True)
        own = [self._score(each, split, share=False) for each in weights]
        sheet = torch.zeros(self.rank_info.world, 3, dtype=torch.float64, device=self.rank_info.device)
        for rank, score in zip(self.rank_info.ranks, own, strict=True):
            sheet[rank] = torch.tensor([score.loss, score.value, 1.0], dtype=torch.float64)
        rows = self.workers.total(sheet).tolist()
        return [Score(loss, own[0].metric, value, None) for loss, value, present in rows if present]

    def evaluate(self, splits: tuple[str, ...]) -> tuple[list[Score], dict[str, Any]]:
        """Means over workers; the mean model's own score is a further field. Local steps: of what they share."""
        self.check()
        handle = self.workers.handle
        if isinstance(handle, LocalRows):
            return [self.score(split) for split in splits], {}
        scores = [self.worker_scores(split) for split in splits]
        mean = self.workers.mean_model()
        fields = {
            "workers": [score.value for score in scores[0]],
            "mean_model": self._score(mean, "test", share=True).value,
            "consensus": self.workers.distance(mean[0]),
        }
        return [_mean(each) for each in scores], {**fields, **(self._losses(handle) if handle.elastic else {})}

    def _losses(self, handle: GossipHandle) -> dict[str, Any]:
        """How often all workers that can be reached have lost and regained a neighbor."""
        counts = [getattr(handle.report(), name) for name in LOSSES]
        total = self.workers.total(torch.tensor(counts, dtype=torch.float64, device=self.rank_info.device))
        dropped, rejoined, drift = total.tolist()
        return {"dropped": int(dropped), "rejoined": int(rejoined), "drift": drift}

    def common_seconds(self, seconds: float) -> float:
        return self.workers.handle.max_over_processes(seconds)

    def start_fields(self) -> dict[str, Any]:
        if isinstance(self.workers.handle, LocalRows):
            return self.workers.handle.start_fields()
        method = gossip_method_of(self.recipe)
        codec = "" if method.compresses else f" with {self.recipe.gossip.codec or 'fp32'}"
        graph = method.graph.on(len(self.workers.handle.hosts))
        return {"spec": f"{method}{codec}", "method": f"{method}{codec} on {graph}"}

    def account(self, step: int) -> dict[str, Any]:
        """Bytes as the first worker counts them; it sends to as many neighbors as it has."""
        handle = self.workers.handle
        if isinstance(handle, LocalRows):
            return handle.account()
        report = handle.report()
        neighbors = report.messages / max(1, report.rounds) if handle.elastic else report.degree
        steps = report.rounds if handle.elastic else report.steps  # one that came back has not taken all
        dense = 4.0 * handle.nodes[0].tensors.total * steps
        around = 2 * (report.world - 1) / report.world  # how often each number goes around a ring
        central = isinstance(gossip_method_of(self.recipe), Centralized)
        payload = report.sent / max(1e-9, around if central else neighbors)
        return {
            **account(report.sent, report.received, payload, dense, around * dense, handle.clock),
            "skipped": 0,
            "gamma": report.gamma,
            **({"hosts": report.world, "sent_inside": report.sent_inside} if report.ranks_per_node > 1 else {}),
            **({name: getattr(report, name) for name in LOSSES} if handle.elastic else {}),
        }

    def final_fields(self, step: int) -> dict[str, Any]:
        return {"rules": {}, "layers": {}}

    def decisions(self) -> list[dict[str, Any]]:
        return []  # `auto` does not choose among gossip methods

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def rank_states(self) -> list[dict[str, Tensor]]:
        rows, handle = self.workers.rows, self.workers.handle
        saved = self.optimizer.state.get(rows, {})
        moments = {name: x for name, x in saved.items() if isinstance(x, Tensor)}  # rows, and counters of all rows
        return [
            {
                **prefixed(memory, "gossip/"),
                **prefixed(self.workers.buffers[i], "buffer/"),
                **prefixed({name: x[i] if x.dim() else x for name, x in moments.items()}, "optimizer/"),
                "row": rows[i],
                "traffic": torch.tensor(counters, dtype=torch.float64),
            }
            for i, (memory, counters) in enumerate(zip(handle.state_dicts(), handle.counters(), strict=True))
        ]

    def model_state(self) -> dict[str, Tensor]:
        return self.workers.show_(*self.workers.mean_model()).state_dict()

    def progress(self, folder: Path) -> dict[str, Any]:
        return {}

    def load(self, folder: Path, progress: Mapping[str, Any]) -> list[dict[str, Tensor]] | None:
        """None where the checkpoint knows nothing of this worker: its neighbors bring it up to date."""
        rank_info, workers = self.rank_info, self.workers
        if progress["world"] != rank_info.world:
            raise ValueError(
                f"the run has the states of {progress['world']} workers of one graph, and there are {rank_info.world} "
                f"now; continue with {progress['world']}"
            )
        if workers.handle.elastic and not (folder / f"rank-{rank_info.ranks[0]}.safetensors").is_file():
            return None
        states = checkpoint.rank_states(folder, rank_info.ranks)
        for i, state in enumerate(states):
            workers.rows[i].copy_(state["row"])
            for name, x in workers.buffers[i].items():
                x.copy_(state[f"buffer/{name}"])
        workers.load([part(state, "gossip/") for state in states], [state["traffic"].tolist() for state in states])
        for name, first in part(states[0], "optimizer/").items():
            each = [state[f"optimizer/{name}"] for state in states]
            self.optimizer.state[workers.rows][name] = (
                torch.stack(each).to(workers.rows.device) if first.dim() else first
            )
        return states


def pass_mode(recipe: Recipe, workers: GossipWorkers) -> str:
    """How workers pass: together where that is asked for, or by default where there are several."""
    wanted = recipe.local.passes if recipe.local.spec else recipe.gossip.passes
    sequential = recurrent(workers.model)
    if wanted == "together" and sequential:
        raise ValueError(f"{recipe.model.name} is recurrent, and such models pass one after another; use sequential")
    return "sequential" if wanted == "auto" and (sequential or len(workers.buffers) == 1) else wanted


def _mean(scores: list[Score]) -> Score:
    return Score(fmean(s.loss for s in scores), scores[0].metric, fmean(s.value for s in scores), None)


def _decay(recipe: Recipe, shapes: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor | None:
    """The weight decay of every column; None if there is none."""
    plan = recipe.optimizer
    if not plan.weight_decay:
        return None
    each = [torch.full(shape, plan.weight_decay if plan.decay_norms or len(shape) > 1 else 0.0) for shape in shapes]
    return torch.cat([x.flatten() for x in each]).to(device)
