"""Hosts as nodes: all ranks of a host are one node of the graph.

Inside, replicas stay equal: they start alike, and `average_gradients` gives every rank the mean of the host's gradients
before its optimizer steps (or DistributedDataParallel does, over the ranks of the host). Each rank then gossips some of
the parameters with its counterparts on neighboring hosts, and sends the result to the others on its own.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gradwire.comm.backend import Backend
from gradwire.comm.host_layout import HostLayout
from gradwire.core import Payload, Segments, SendRecv, Sum, as_bytes, from_bytes
from gradwire.engine.partition import Atom, balance
from gradwire.integrations.ddp import find_ddp
from gradwire.integrations.gossip.flat_params import FlatParams, GossipOptions
from gradwire.integrations.model import own_gradient


class HostShare:
    """The parameters that one rank gossips for its host: all of them where it is the only rank there.

    Attributes:
        size: How many ranks the host has.
        local_rank: This rank's number among them.
        host: The number of the host.
        hosts: The ranks of each host.
        shares: The parameters that each rank of the host gossips.
        own: Those of this rank.
    """

    def __init__(self, model: nn.Module, flat: FlatParams, link: Backend, options: GossipOptions) -> None:
        self._model, self._flat, self._link = model, flat, link
        layout = link.host_layout or HostLayout(tuple((rank,) for rank in range(link.world)))
        self.size, self.hosts = layout.ranks_per_host, layout.hosts
        self.host, self.local_rank = layout.place_of(link.rank)
        if options.overlap and self.size > 1:
            require_one_thread(link)
        self.shares = _divide(flat.tensors, self.size, options.granularity)
        self.own = self.shares[self.local_rank]
        self._averaged = False

    @property
    def serves(self) -> bool:
        """Whether any parameter is this rank's: a host may have more ranks than there are vectors."""
        return len(self.own) > 0

    def average_gradients(self) -> None:
        """Average ``.grad`` over the ranks of this host. Call it after ``backward()``, before ``optimizer.step()``.

        A gradient that is not finite on one of them is then so on all; parameters without a gradient on all ranks keep
        none.
        """
        if self.size == 1:
            return
        parameters = self._flat.parameters.values()
        grads = [torch.zeros_like(p) if (own := own_gradient(p)) is None else own for p in parameters]
        has_grad = torch.tensor([float(p.grad is not None) for p in parameters], device=self._flat.device)
        mean = self.average(torch.cat([*(grad.detach().flatten().to(has_grad) for grad in grads), has_grad]))
        *parts, anywhere = mean.split([*self._flat.tensors.lengths, len(has_grad)])
        for p, part, used in zip(parameters, parts, anywhere.tolist(), strict=True):
            if p.grad is not None:
                p.grad.copy_(part.view(p.shape).to(p))
            elif used:
                p.grad = part.view(p.shape).to(p, copy=True)

    def average(self, grads: Tensor) -> Tensor:
        """The mean of a vector over the ranks of this host."""
        if self.size == 1:
            return grads
        total: Tensor
        (total,) = self._link.answer([Sum(grads, "host")])
        self._averaged = True
        return total / self.size

    def require_averaged(self) -> None:
        """Refuse a round of replicas that have stepped by different gradients.

        Raises:
            RuntimeError: Gradients were not averaged, or over other ranks than those of the host.
        """
        averaged, self._averaged = self._averaged, False
        if self.size == 1 or averaged:
            return
        ddp = find_ddp(self._model)
        if ddp is None:
            raise RuntimeError(
                "the replicas of this host have stepped by different gradients; call net.average_gradients() between "
                "backward() and optimizer.step()"
            )
        if ddp.process_group.size() != self.size:
            raise RuntimeError(
                f"DistributedDataParallel averages over {ddp.process_group.size()} ranks, where {self.size} are one "
                "node; give it the process group of this host's ranks, or call net.average_gradients() instead of it"
            )

    def select(self, x: Tensor) -> Tensor:
        """This rank's share of a vector."""
        if self.size == 1:
            return x
        slices = self._flat.tensors.slices()
        return torch.cat([x.new_zeros(0), *(x[slices[name]] for name in self.own.names)])

    def gather(self, mixed: Tensor, x: Tensor) -> Tensor:
        """All parameters, from the shares of all ranks of the host."""
        if self.size == 1:
            return mixed
        sizes = {local_rank: 4 * share.total for local_rank, share in enumerate(self.shares)}
        message = Payload(as_bytes(mixed))
        (received,) = self._link.answer([SendRecv(dict.fromkeys(sizes, message), sizes, "host")])
        whole, slices = x.clone(), self._flat.tensors.slices()
        for local_rank, share in enumerate(self.shares):
            parts = from_bytes(received[local_rank].data, torch.float32).split(list(share.lengths))
            for name, part in zip(share.names, parts, strict=True):
                whole[slices[name]] = part
        return whole

    def state(self) -> dict[str, Tensor]:
        """The entries of a checkpoint about the host."""
        if self.size == 1:
            return {}
        return {"gradwire/local": torch.tensor(self.local_rank), "gradwire/beside": torch.tensor(self.size)}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Refuse the state of a rank at another place of its host."""
        local_rank, size = int(state.get("gradwire/local", 0)), int(state.get("gradwire/beside", 1))
        if (local_rank, size) != (self.local_rank, self.size):
            raise ValueError(
                f"the state is of rank {local_rank} of {size} on its host, and this is rank {self.local_rank} of "
                f"{self.size}; load each rank's own, with as many ranks on every host"
            )


def _divide(tensors: Segments, size: int, granularity: str) -> list[Segments]:
    """The tensors that each rank of a host serves; a whole model is one vector, which one rank serves."""
    atoms: list[Atom] = [(tensors.names, tensors.total)]
    if granularity == "layer":
        atoms = [((name,), n) for name, n in zip(tensors.names, tensors.lengths, strict=True)]
    owners = balance(atoms, [0] * size)
    shapes = dict(zip(tensors.names, tensors.shapes, strict=True))
    named = [tuple(name for name in tensors.names if owners[name] == local_rank) for local_rank in range(size)]
    return [Segments(names, tuple(shapes[name] for name in names)) for names in named]


def require_one_thread(link: Backend) -> None:
    """Refuse overlap where means inside the host would use NCCL at the same time.

    Raises:
        ValueError: The link is NCCL's, which keeps small tensors on the GPU.
    """
    if link.device.type == "cuda":
        raise ValueError(
            "overlap=True would start NCCL collectives of two groups from two threads, in an order that may differ "
            "between the ranks of a host, which then wait for each other; leave overlap=True out where nodes "
            "have several ranks, or begin the process group with gloo"
        )
