"""Gossip workers: those of this process, each with a model of its own.

One real rank is a single row, whose handle reaches other processes; simulated workers are all rows of one tensor, and
gossip at once. With ``gossip.across``, workers of a host are one node: they step by their mean gradient, hold the same
parameters, and gossip as one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.comm.host_layout import HostLayout
from gradwire.core.segments import Segments
from gradwire.gossip import GossipMethod, LocalGossip, gossip_method
from gradwire.integrations.gossip import BatchedGossip, GossipHandle, gossip
from gradwire.integrations.gossip.flat_params import FlatParams
from gradwire_lab.train.local_rows import LocalRows, replica_of
from gradwire_lab.train.rank_info import RankInfo
from gradwire_lab.train.recipe import Recipe
from gradwire_lab.train.workers import Workers, views

Weights = tuple[Tensor, Mapping[str, Tensor]]  # a row of parameters, and buffers


def gossip_method_of(recipe: Recipe) -> GossipMethod:
    """The method that [gossip] names, on its graph."""
    plan = recipe.gossip
    words = [] if plan.method == "centralized" else [plan.graph]
    words += [f"{name}={value!r}" for name, value in plan.options.items()]
    method = gossip_method(f"{plan.method}({', '.join(words)})" if words else plan.method)
    return method if plan.H == 1 else LocalGossip(method, plan.H)


def nodes(world: int, across: str | list[list[int]] | None) -> tuple[tuple[int, ...], ...]:
    """Workers of one process by node.

    Raises:
        ValueError: Hosts are asked for, which simulated workers do not have.
    """
    if across is None:
        return tuple((rank,) for rank in range(world))
    if isinstance(across, str):
        raise ValueError(
            f"gossip.across={across!r} would make one node of all {world} workers of this process; name those that "
            "are one, as in --set gossip.across=[[0,1],[2,3]]"
        )
    layout = HostLayout.of(across)
    layout.check(world)
    return layout.hosts


def check_graph(recipe: Recipe, world: int) -> None:
    """Refuse a graph that cannot have so many workers, before anything is written; hosts are not known yet."""
    across = recipe.gossip.across
    if recipe.gossip.method and across != "hosts":
        gossip_method_of(recipe).graph.on(world if isinstance(across, str) else len(across))


def _handle(model: nn.Module, recipe: Recipe, rank_info: RankInfo) -> GossipHandle:
    plan, method = recipe.gossip, gossip_method_of(recipe)
    across = None if plan.across == "ranks" else plan.across
    options: dict[str, Any] = {"granularity": plan.granularity, "overlap": plan.overlap, "seed": recipe.train.seed}
    if rank_info.simulated:
        hosts = None if across is None else nodes(rank_info.world, across)
        return BatchedGossip(model, len(hosts or rank_info.ranks), method, plan.codec or None, hosts=hosts, **options)
    if plan.elastic:
        options |= {"rank": rank_info.ranks[0], "world": rank_info.world, "meeting": rank_info.rendezvous}
        options |= {"elastic": True, "timeout": plan.timeout}
    return gossip(model, method, plan.codec or None, across=across, **options)


class GossipWorkers(Workers):
    """See `Workers`.

    Parameters lie in one float32 tensor, which is what gossip mixes and what an optimizer that works entry by entry, as
    SGD and Adam do, steps at once.

    Attributes:
        handle: How workers reach the others: by gossip, or by rounds after local steps.
        rows: Their parameters, float32 [workers, N], in the order of ``model.named_parameters()``.
        grads: Their gradients, likewise.
    """

    zero_missing = True

    def __init__(self, model: nn.Module, rank_info: RankInfo, recipe: Recipe) -> None:
        self._overlap = recipe.gossip.overlap
        self.handle: GossipHandle | LocalRows
        if recipe.gossip.method:
            self.handle = _handle(model, recipe, rank_info)
        super().__init__(model, rank_info)  # after the handle of gossip has given the model its first values
        self.flat = FlatParams(model)
        self.rows = self.flat.read().expand(len(rank_info.ranks), -1).clone()
        self.grads = torch.zeros_like(self.rows)
        self._lanes = [self.flat.tensors], [self.grads]
        if recipe.local.spec:
            own = zip(self.rows, self.buffers, strict=True)
            replicas = [replica_of(model, views(self.flat.tensors, row), buffers) for row, buffers in own]
            self.handle = LocalRows(replicas, self.flat.tensors, recipe, rank_info)

    def select(self, worker: int) -> None:
        self.show_(self.rows[worker], self.buffers[worker])

    def show_(self, row: Tensor, buffers: Mapping[str, Tensor]) -> nn.Module:
        """The model, with a row of parameters and some buffers."""
        self.flat.write_(row)
        self.use_buffers(buffers)
        return self.model

    def leaves(self, copies: int) -> dict[str, Tensor]:
        return {name: part.detach().requires_grad_() for name, part in views(self.flat.tensors, self.rows).items()}

    def gradient_rows(self) -> tuple[Sequence[Segments], Sequence[Tensor]]:
        return self._lanes

    def sum_over_processes(self, numbers: Tensor) -> tuple[Tensor, int]:
        return self.handle.sum_over_processes(numbers)

    def average_gradients(self) -> None:
        """Give the workers of a node the mean of their gradients."""
        self.grads.copy_(self.handle.average_rows(self.grads))

    def mix(self) -> None:
        """One round of gossip."""
        if self.handle.elastic:  # the handle may send the model's buffers, or replace them by a neighbor's
            self.select(0)
        x = self.rows.clone() if self._overlap else self.rows  # a round may go on while rows change
        self.rows.copy_(self.handle.mix_rows(x))

    def load(self, states: Sequence[Mapping[str, Tensor]], counters: Sequence[Sequence[float]]) -> None:
        """Continue from the states and counters of a checkpoint, with the rows and buffers that it has."""
        self.select(0)
        self.handle.load_state_dicts(states)
        self.handle.load_counters(counters)
        if self.handle.elastic:  # the parameters may be a neighbor's now
            self.rows.copy_(self.flat.read())

    def mean_model(self) -> Weights:
        """The mean over all workers; after local steps, the weights that they share."""
        shared = self.handle.outer_row() if isinstance(self.handle, LocalRows) else None
        return self.mean(self.rows.sum(0)) if shared is None else shared, self.mean_buffers()

    def distance(self, mean: Tensor) -> float:
        """The root mean square over workers of |x_i - mean|."""
        return float(self.mean((self.rows - mean).double().square().sum()).sqrt())
