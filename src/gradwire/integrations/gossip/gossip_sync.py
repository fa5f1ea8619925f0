"""The handle of one rank of a process group."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from gradwire.comm.backend import Backend
from gradwire.comm.collectives import AllReduceOp, Traffic
from gradwire.engine import execute, interleave
from gradwire.integrations.consistency import agree, errors_on_all_ranks, gather_notes
from gradwire.integrations.gossip.flat_params import FlatParams, GossipOptions
from gradwire.integrations.gossip.handle import RankHandle
from gradwire.integrations.gossip.hosts import HostShare
from gradwire.integrations.gossip.report import GossipReport, summarize


class GossipSync(RankHandle):
    """Gossips the parameters of one model over one link. Call it after ``optimizer.step()``.

    Attributes:
        link: The backend that carries messages.
        share: The parameters that this rank gossips: all, or its share of its host's.
    """

    def __init__(self, model: nn.Module, link: Backend, options: GossipOptions) -> None:
        self.link = link
        with errors_on_all_ranks(link):
            flat = FlatParams(model)
            share = self.share = HostShare(model, flat, link, options)
            node = options.node(share.own, share.host, len(share.hosts))
        super().__init__(flat, node, share.hosts, options.describe(node), link.rank)
        shapes = {name: f"{tuple(p.shape)} {p.dtype}" for name, p in flat.parameters.items()}
        layout = "" if link.host_layout is None else f", hosts {link.host_layout}"
        agree(link, f"{self.description}; seed {options.seed}, overlap {options.overlap}{layout}", shapes)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                link.broadcast_(tensor)
        if self.share.serves:
            self.node.begin(self.share.select(flat.read()))
        link.traffic = Traffic()

    def average_gradients(self) -> None:
        """Average ``.grad`` over the ranks of this host, before the optimizer's step. See `HostShare`."""
        self.share.average_gradients()

    def average(self, grads: Tensor) -> Tensor:
        """The same for gradients that lie elsewhere, as one vector in the order of ``model.named_parameters()``."""
        return self.share.average(grads)

    def average_rows(self, grads: Tensor) -> Tensor:
        """The same for gradients as a single row."""
        return self.share.average(grads[0])[None]

    def mix(self, x: Tensor) -> Tensor:
        """One round of gossip, of parameters as one vector in the order of ``model.named_parameters()``."""
        self.share.require_averaged()
        mixed = self.share.select(x)
        if self.share.serves:
            mixed = self.run_or_overlap(mixed, self._run)
        else:
            self.node.step += 1
        return self.share.gather(mixed, x)

    def _run(self, x: Tensor) -> Tensor:
        (mixed,) = execute(interleave([self.node.run(x)]), self.link, self.clock)
        return mixed

    def reduce_over_processes(self, numbers: Tensor, op: str) -> tuple[Tensor, int]:
        """The sum or maximum over all ranks, uncounted, and how many they are. All ranks must call it."""
        self.wait()
        return self.link.move(AllReduceOp(numbers, op)), self.link.world

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's memories and step: plain tensors, keyed by parameter name."""
        self.wait()
        return {**self.save_node(self.node, self.flat), **self.share.state()}

    def load_state_dict(self, state: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]) -> None:
        """Continue from this rank's own state. All ranks must call it; a state that one cannot load, none loads."""
        self.wait()
        states = [state] if isinstance(state, Mapping) else list(state)
        with errors_on_all_ranks(self.link):
            for one in states:
                self.check_state(one, self.node)
                self.share.check_state(one)
        numbers = {name: int(states[0][f"gradwire/{name}"]) for name in ("seed", "step")}
        gather_notes(self.link, {"spec": self.description, **numbers, "call": "load_state_dict()"})
        self.load_node(self.node, self.flat, states[0])

    def fits(self, state: Mapping[str, Tensor]) -> bool:
        """Whether a state was saved in a world like this one."""
        saved = int(state["gradwire/world"]), int(state.get("gradwire/beside", 1))
        return saved == (len(self.hosts), self.share.size)

    def report(self, rank: int = 0) -> GossipReport:
        """Bytes, distance, memory and gamma so far."""
        del rank
        self.wait()
        inside = {"ranks_per_node": self.share.size, "sent_inside": self.link.inside.sent}
        return summarize(self.node, self.flat, self.link.traffic, **inside)

    def counters(self) -> list[list[float]]:
        counts = [self.link.traffic] if self.share.size == 1 else [self.link.traffic, self.link.inside]
        return [[number for count in counts for number in (count.sent, count.received, count.collectives)]]

    def load_counters(self, counters: Sequence[Sequence[float]]) -> None:
        (own,) = counters
        self.link.traffic = Traffic(own[0], own[1], int(own[2]))
        if len(own) > 3:
            self.link.inside = Traffic(own[3], own[4], int(own[5]))

    def close(self) -> None:
        """Wait for the round under way; the process group is the caller's."""
        self.wait()
