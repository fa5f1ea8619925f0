"""Report: the bytes that gossip has sent, how far replicas are apart, and how much memory it takes."""

from dataclasses import dataclass
from typing import Any

from gradwire.comm.collectives import Traffic
from gradwire.core.renamed import renamed_attributes
from gradwire.gossip import Node
from gradwire.integrations.gossip.flat_params import FlatParams


@renamed_attributes({"beside": "ranks_per_node"})
@dataclass(frozen=True)
class GossipReport:
    """A snapshot of one rank's counts.

    Attributes:
        steps: Steps taken.
        world: Number of ranks, or of nodes, where several ranks are one.
        degree: Neighbors that this rank sends to in a step, at most.
        sent: Bytes that this rank has sent, headers included.
        received: Bytes that it has received.
        collectives: How many collectives carried them; 0 with elastic=True, which needs none.
        dense: Bytes that the same models would have been in float32, in every step, to the same neighbors, or in an
            all-reduce.
        gamma: The consensus step of the last round; 1 before the first.
        consensus: An estimate of the distance from the mean model; `GossipSync.distance` measures it.
        memory_floats: Float32 numbers stored for each parameter; with elastic=True also the model as of the last
            step, for ranks that come back.
        dropped: How many times a neighbor was lost.
        rejoined: How many times an edge came back.
        drift: About how far rounds that only one end of an edge finished have moved the mean model, as a norm.
        ranks_per_node: Of the bytes above, each rank of a node sends a share.
        sent_inside: Bytes that this rank sent to others in its node: gradients, and mixed parameters.
        rounds: Rounds that this rank has made itself: fewer than steps with `local_gossip`, or if it came back.
        messages: Messages that it has sent in them, to each neighbor that was there; several with iterations > 1.
    """

    steps: int
    world: int
    degree: int
    sent: float
    received: float
    collectives: int
    dense: float
    gamma: float
    consensus: float
    memory_floats: float
    dropped: int = 0
    rejoined: int = 0
    drift: float = 0.0
    ranks_per_node: int = 1
    sent_inside: float = 0.0
    rounds: int = 0
    messages: int = 0

    @property
    def sent_per_step(self) -> float:
        return self.sent / max(1, self.steps)

    @property
    def ratio(self) -> float:
        """Bytes of float32 gossip over bytes sent."""
        return self.dense / self.sent if self.sent else float("inf")

    def __str__(self) -> str:
        lines = [f"{self.steps} steps, world of {self.world}, {self.degree} neighbors"]
        if self.ranks_per_node > 1:
            lines.append(f"inside    {self.sent_inside:,.0f} B to the {self.ranks_per_node} ranks of the node")
        lines += [
            f"sent      {self.sent:,.0f} B ({self.sent_per_step:,.0f} B per step), {self.ratio:.1f}x less than float32",
            f"received  {self.received:,.0f} B",
            f"gamma     {self.gamma:.4g}",
            f"distance  about {self.consensus:.4g} from the mean model",
            f"memory    {self.memory_floats:.2f} floats per parameter",
        ]
        if self.dropped or self.rejoined:
            counts = f"lost {self.dropped} times, back {self.rejoined} times"
            lines.append(f"neighbors {counts}, drift about {self.drift:.3g}")
        return "\n".join(lines)


def summarize(node: Node, flat: FlatParams, traffic: Traffic, **others: Any) -> GossipReport:
    """The report of a node and its model; ``others`` are fields that it does not know, or knows otherwise."""
    degree, world, rounds = node.topology.degrees[node.rank], node.topology.size, node.method.rounds(node.step)
    fields = dict(
        steps=node.step,
        world=world,
        degree=degree,
        sent=traffic.sent,
        received=traffic.received,
        collectives=traffic.collectives,
        dense=node.method.dense_bytes(node.tensors.total, degree, world) * node.step,
        gamma=node.gamma,
        consensus=node.consensus,
        memory_floats=node.floats_per_parameter + flat.floats_per_parameter,
        rounds=rounds,
        messages=rounds * node.method.iterations * degree,
    )
    return GossipReport(**{**fields, **others})
