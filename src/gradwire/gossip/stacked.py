"""Stack: the gossip of all ranks at once, on parameters stacked as rows, when all of them live in one process.

It knows no letters: what ranks would decode is computed for all of them together, by the rules of the method and by the
codec's own code over one long buffer. Rows equal those of ranks that talk bit for bit; the host never waits for the
device within a step. Bytes are counted as letters would have had them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradwire.codecs.codec import Codec
from gradwire.codecs.stage import EncodeInput, IndexCoder
from gradwire.core.keys import PER_RANK, Key, owned
from gradwire.core.segments import Segments
from gradwire.gossip import auto_gamma
from gradwire.gossip.auto_gamma_batched import Gauges
from gradwire.gossip.broadcast import BroadcastMethod, Heard
from gradwire.gossip.centralized import Centralized
from gradwire.gossip.choco import Choco
from gradwire.gossip.gossip import Gossip, dense
from gradwire.gossip.message import HEADER, Diverged
from gradwire.gossip.neighbor_table import columns, own_weights
from gradwire.gossip.node import Node
from gradwire.topology import Topology


def stackable(method: Gossip, codec: Codec, topology: Topology) -> bool:
    """Whether there are rules for all ranks at once, and messages whose length is known beforehand."""
    if isinstance(method, Centralized):
        return True
    whole = codec.indices is None or type(codec.indices).fit is IndexCoder.fit
    return isinstance(method, BroadcastMethod) and method.stacks(topology) and codec.traits.fixed and whole


@dataclass
class Stack:
    """The nodes of all ranks, as one.

    Attributes:
        nodes: What each of them is. Their memories lie here; `scatter_` hands them back.
        device: Where rows lie.
        memory: By name, [ranks, N].
        step: Steps taken.
    """

    nodes: Sequence[Node]
    device: torch.device
    memory: dict[str, Tensor] = field(init=False, default_factory=dict)
    gauges: Gauges | None = field(init=False, default=None)
    step: int = field(init=False, default=0)
    moved: Tensor = field(init=False)  # how far the last step moved each rank, [ranks]
    gamma: float = field(init=False, default=1.0)
    bad: Tensor = field(init=False)  # the first step at which parameters were not finite; -1 before

    def __post_init__(self) -> None:
        first = self.nodes[0]
        self.method, self.codec, self.topology = first.method, first.codec, first.topology
        self.seed, units, ranks = first.seed, first.units, range(len(self.nodes))
        names = tuple(owned(name, rank) for rank in ranks for name in units.names)
        self.units = Segments(names, units.shapes * len(ranks))
        self.gather()

    # -- a step ----------------------------------------------------------------------------------------------------

    def run(self, x: Tensor) -> Tensor:
        """One step of all ranks: parameters in, parameters out. [ranks, N] -> [ranks, N]."""
        self._watch(x)
        met = self._central(x) if isinstance(self.method, Centralized) else self._public(x)
        self.moved = (met - x).norm(dim=1)
        self.step += 1
        return met

    def _public(self, x: Tensor) -> Tensor:
        assert isinstance(self.method, BroadcastMethod)
        said = self._heard(self.method.words(x, self.memory, self.step))
        turn = self.step % self.topology.period
        others = [(c.weights, said[c.peers]) for c in columns(self.topology, turn, x.device)]
        heard = Heard(said, own_weights(self.topology, turn, x.device), others)
        met = self.method.learn(x, self.memory, heard, self.step)
        if self.gauges is not None:
            assert isinstance(self.method, Choco)
            self.gauges.turn(self.method.seen(x, self.memory, heard))
            self.memory = {**met.memory, "gauge": self.gauges.state}
        else:
            self.memory = dict(met.memory)
        self.gamma = met.gamma
        return met.x

    def _central(self, x: Tensor) -> Tensor:
        said = self._heard(x).to(self.codec.quantizer.dtype)  # type: ignore[attr-defined]
        total = said[0]
        for row in said[1:]:
            total = total + row
        return (total.float() / len(x)).expand_as(x).contiguous()

    def _heard(self, target: Tensor) -> Tensor:
        """What everybody decodes of every rank's message."""
        flat = target.flatten()
        key = Key(self.seed, self.step, PER_RANK)
        return dense(self.codec.echo(EncodeInput(flat, flat, {}, self.units), key), flat).view_as(target)

    # -- parameters that are not finite ----------------------------------------------------------------------------

    def _watch(self, x: Tensor) -> None:
        fresh = (self.bad < 0) & ~x.isfinite().all()
        self.bad = torch.where(fresh, self.step, self.bad)
        if x.device.type == "cpu":
            self.check()

    def check(self) -> None:
        """Say so if parameters are no longer finite. On a GPU this waits, so ask now and then."""
        step = int(self.bad)
        if step >= 0:
            raise Diverged(f"parameters are no longer finite at step {step}; lower the learning rate, or gamma")

    @property
    def letter_bytes(self) -> int:
        """How long a letter to a neighbor is, its header included."""
        notes = 0 if self.gauges is None else auto_gamma.NOTE.stop - auto_gamma.NOTE.start
        return HEADER.size + 4 * notes + self.codec.size(self.nodes[0].units)

    # -- between nodes and rows ------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Take over what the nodes remember."""
        nodes, first = self.nodes, self.nodes[0]
        self.memory = {
            name: torch.stack([node.memory[name] for node in nodes]) for name in first.memory if name != "gauge"
        }
        self.step = first.step
        self.moved = torch.stack([node.moved.to(self.device) for node in nodes])
        self.bad = torch.full((), -1, device=self.device)
        if "gauge" in first.memory:
            states = [node.memory["gauge"] for node in nodes]
            self.gauges = Gauges.of(states, self.topology, self.codec, self.device, self.step)
            self.memory["gauge"] = self.gauges.state

    def scatter_(self) -> None:
        """Let every node remember what is its own."""
        states = self.gauges.states() if self.gauges is not None else None
        for rank, node in enumerate(self.nodes):
            node.memory = {name: rows[rank].clone() for name, rows in self.memory.items() if name != "gauge"}
            if states is not None:
                node.memory["gauge"] = states[rank]
            node.step = node.number = self.step
            node.moved, node.gamma = self.moved[rank], self.gamma
