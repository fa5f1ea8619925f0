"""Gossip workers: those of this process, each with a model of its own.

One real rank is a single row, whose network reaches other processes; virtual workers are all rows of one tensor, and
gossip at once. With ``gossip.across``, workers of a host are one node: they step by their mean gradient, hold the same
parameters, and gossip as one.
"""

from torch import Tensor, nn

from gradwire.comm.host_layout import HostLayout
from gradwire.gossip import GossipMethod, gossip_method
from gradwire_lab.train.gossip_network import GossipNetwork
from gradwire_lab.train.gossip_networks import BatchedNetwork, ElasticNetwork, ProcessNetwork
from gradwire_lab.train.rank_info import RankInfo
from gradwire_lab.train.recipe import Recipe
from gradwire_lab.train.replicas import Replicas, Weights


def method_of(recipe: Recipe) -> GossipMethod:
    """The method that [gossip] names, on its graph."""
    plan = recipe.gossip
    words = [] if plan.method == "centralized" else [plan.graph]
    words += [f"{name}={value!r}" for name, value in plan.options.items()]
    return gossip_method(f"{plan.method}({', '.join(words)})" if words else plan.method)


def nodes(world: int, across: str | list[list[int]] | None) -> tuple[tuple[int, ...], ...]:
    """Workers of one process by node.

    Raises:
        ValueError: Hosts are asked for, which virtual workers do not have.
    """
    if across is None:
        return tuple((rank,) for rank in range(world))
    if isinstance(across, str):
        raise ValueError(
            f"gossip.across={across!r} would make one node of all {world} workers of this process; say which of them "
            "are one, as in --set gossip.across=[[0,1],[2,3]]"
        )
    grouping = HostLayout.of(across)
    grouping.check(world)
    return grouping.hosts


def check_graph(recipe: Recipe, world: int) -> None:
    """Refuse a graph that cannot have so many workers, before anything is written; hosts are not known yet."""
    across = recipe.gossip.across
    if recipe.gossip.method and across != "hosts":
        method_of(recipe).graph.on(world if isinstance(across, str) else len(across))


class GossipWorkers:
    """Workers of one process.

    Attributes:
        network: How they reach the others.
        replicas: Their models.
    """

    def __init__(self, model: nn.Module, rank_info: RankInfo, recipe: Recipe) -> None:
        self.rank_info, self.method = rank_info, method_of(recipe)
        across = None if recipe.gossip.across == "ranks" else recipe.gossip.across
        self.network: GossipNetwork
        if rank_info.virtual:
            self.network = BatchedNetwork(model, self.method, recipe, rank_info, nodes(rank_info.world, across))
        elif recipe.gossip.elastic:
            self.network = ElasticNetwork(model, self.method, recipe, rank_info, nodes(rank_info.world, None))
        else:
            alone = nodes(rank_info.world, None)
            self.network = ProcessNetwork(model, self.method, recipe, rank_info, alone, across)
        self.replicas = Replicas(model, len(rank_info.ranks))  # after the network has given the model its first values

    def mean(self) -> Weights:
        """The mean over all workers; counters, which are no floats, are the first worker's."""
        row = self.network.mean_of(self.replicas.rows.sum(0))
        return row, {name: self._mean_buffer(rows) for name, rows in self.replicas.buffers.items()}

    def _mean_buffer(self, rows: Tensor) -> Tensor:
        if rows.is_floating_point():
            return self.network.mean_of(rows.double().sum(0)).to(rows.dtype)
        if self.network.elastic:
            return rows[0]  # the first worker may be dead
        return self.network.total(rows[0] if self.rank_info.first else rows[0].new_zeros(rows[0].shape))

    def distance(self, mean: Tensor) -> float:
        """The root mean square over workers of |x_i - mean|."""
        off = (self.replicas.rows - mean).double().square().sum()
        return float(self.network.mean_of(off).sqrt())
