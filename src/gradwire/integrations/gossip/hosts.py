"""Host net: all ranks of a host are one node of the gossip.

Inside, replicas stay equal: they start alike, and `average_gradients` hands every rank the mean of the host's gradients
before its optimizer steps (or DistributedDataParallel does, over the ranks of the host). Each then gossips some of the
parameters with its counterparts on neighboring hosts, and hands the outcome to the others on its own.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradwire.comm.backend import Backend
from gradwire.comm.host_layout import HostLayout
from gradwire.core.payload import Payload, as_bytes, from_bytes
from gradwire.core.requests import SendRecv, Sum
from gradwire.core.segments import Segments
from gradwire.engine.drive import converse, drive
from gradwire.engine.hierarchical import among_hosts
from gradwire.engine.shares import Atom, deal
from gradwire.gossip import Gossip, Node
from gradwire.integrations.ddp import find_ddp
from gradwire.integrations.gossip.checkpoint import save_state
from gradwire.integrations.gossip.flat_params import CodecSpec, make_node
from gradwire.integrations.gossip.gossip_sync import GossipSync
from gradwire.integrations.gossip.report import GossipReport, summarize


class HostGossip(GossipSync):
    """One rank's share of what its host gossips.

    Attributes:
        shares: The parameters that each rank of the host gossips.
        node: This rank's side of its share.
    """

    def _make_node(
        self, spec: str | Gossip, codec: CodecSpec | None, granularity: str, seed: int, overlap: bool
    ) -> Node:
        if overlap:
            need_one_thread(self.link)
        host, self.local = self._grouping.seat(self.link.rank)
        whole = make_node(self.flat, spec, codec, host, self.parties, granularity, seed, overlap)
        tensors = whole.tensors
        atoms: list[Atom] = [(tensors.names, tensors.total)]  # one vector, which one rank must serve as a whole
        if granularity == "layer":
            atoms = [((name,), n) for name, n in zip(tensors.names, tensors.lengths, strict=True)]
        served = deal(atoms, [0] * self.beside)
        self.shares = [_chosen(tensors, served, local) for local in range(self.beside)]
        self._averaged = False
        mine = self.shares[self.local]
        units = mine if granularity == "layer" else mine.merged()
        return Node(whole.method, whole.codec, whole.topology, host, seed, mine, units, overlap)

    def _begin(self, common: Tensor) -> None:
        if self._serves:
            self.node.begin(self._own(common))

    def average_gradients(self) -> None:
        """Take the mean over the ranks of this host. Call it after ``backward()``, before ``optimizer.step()``.

        A gradient that is not finite on one of them is then so on all; what none of them used keeps no gradient.
        """
        parameters = self.flat.parameters.values()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        present = torch.tensor([float(p.grad is not None) for p in parameters], device=self.flat.device)
        flat = torch.cat([*(grad.detach().flatten().to(present) for grad in grads), present])
        (total,) = self.link.answer([Sum(flat, "local")])
        *parts, anywhere = total.split([*self.flat.tensors.lengths, len(present)])
        for p, part, there in zip(parameters, parts, anywhere.tolist(), strict=True):
            mean = (part / self.beside).view(p.shape).to(p)
            if p.grad is not None:
                p.grad.copy_(mean)
            elif there:
                p.grad = mean.clone()
        self._averaged = True

    def average(self, grads: Tensor) -> Tensor:
        total: Tensor
        (total,) = self.link.answer([Sum(grads, "local")])
        self._averaged = True
        return total / self.beside

    def mix(self, x: Tensor) -> Tensor:
        """One round of gossip of my share, and all shares inside the host."""
        if not self._averaged and not self._wrapped():
            raise RuntimeError(
                "the replicas of this host have stepped apart: call net.average_gradients() between backward() and "
                "optimizer.step()"
            )
        self._averaged = False
        mixed = super().mix(self._own(x)) if self._serves else self._own(x)
        if not self._serves:
            self.node.step += 1
        return self._shared(mixed, x)

    def _wrapped(self) -> bool:
        """Whether DistributedDataParallel averages inside the host, and only there."""
        ddp = find_ddp(self.model)
        if ddp is not None and ddp.process_group.size() != self.beside:
            raise RuntimeError(
                f"DistributedDataParallel averages over {ddp.process_group.size()} ranks, where {self.beside} are one "
                "node; give it the process group of this host's ranks, or call net.average_gradients() instead of it"
            )
        return ddp is not None

    def _talk(self, x: Tensor) -> Tensor:
        (met,) = drive(among_hosts(converse([self.node.run(x)])), self.link, self.clock)
        return met

    def _shared(self, mixed: Tensor, x: Tensor) -> Tensor:
        """All parameters, of what each rank of the host has."""
        letter = Payload(as_bytes(mixed))
        sizes = {mate: 4 * table.total for mate, table in enumerate(self.shares)}
        (heard,) = self.link.answer([SendRecv(dict.fromkeys(sizes, letter), sizes, "local")])
        whole, places = x.clone(), self.flat.tensors.slices()
        for mate, table in enumerate(self.shares):
            parts = from_bytes(heard[mate].data, torch.float32).split(list(table.lengths))
            for name, part in zip(table.names, parts, strict=True):
                whole[places[name]] = part
        return whole

    def _own(self, x: Tensor) -> Tensor:
        places = self.flat.tensors.slices()
        return torch.cat([x.new_zeros(0), *(x[places[name]] for name in self.node.tensors.names)])

    # -- what is kept and shown ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """What this rank remembers of its share, and its step."""
        self.land()
        seat = {"gradwire/local": torch.tensor(self.local), "gradwire/beside": torch.tensor(self.beside)}
        return {**save_state(self.node, self.flat, self.said, self.parties), **seat}

    def _check(self, state: Mapping[str, Tensor]) -> None:
        super()._check(state)
        place = int(state.get("gradwire/local", 0)), int(state.get("gradwire/beside", 1))
        if place != (self.local, self.beside):
            raise ValueError(
                f"the state is of rank {place[0]} of {place[1]} on its host, and this is rank {self.local} of "
                f"{self.beside}; load each rank's own, with as many ranks on every host"
            )

    def _load(self, state: Mapping[str, Tensor]) -> None:
        if self._serves:
            super()._load(state)
        else:
            self.node.step, self.node.seed = int(state["gradwire/step"]), int(state["gradwire/seed"])

    def fits(self, state: Mapping[str, Tensor]) -> bool:
        return (int(state["gradwire/world"]), int(state.get("gradwire/beside", 1))) == (self.parties, self.beside)

    def report(self) -> GossipReport:
        """Bytes, distance, memory and gamma of this rank's share so far."""
        self.land()
        inside = {"beside": self.beside, "sent_inside": self.link.inside.sent}
        return summarize(self.node, self.link.traffic, self.parties, **inside)

    @property
    def beside(self) -> int:
        """How many ranks are one node."""
        return self._grouping.beside

    @property
    def _serves(self) -> bool:
        """Whether any parameter is this rank's: there may be more ranks on a host than there are vectors."""
        return len(self.shares[self.local]) > 0

    @property
    def _grouping(self) -> HostLayout:
        assert self.link.grouping is not None
        return self.link.grouping


def _chosen(tensors: Segments, served: Mapping[str, int], local: int) -> Segments:
    mine: Sequence[int] = [i for i, name in enumerate(tensors.names) if served[name] == local]
    return Segments(tuple(tensors.names[i] for i in mine), tuple(tensors.shapes[i] for i in mine))


def need_one_thread(link: Backend) -> None:
    """Refuse a talk behind the training where means inside the host would meet it in NCCL."""
    if link.device.type == "cuda":  # which is where NCCL wants agreements to live, and gloo does not
        raise ValueError(
            "overlap=True would start NCCL collectives of two groups from two threads, in an order that may differ "
            "between the ranks of a host, which then wait for each other for ever; leave overlap=True out where nodes "
            "have several ranks, or begin the process group with gloo"
        )
