"""Net: the handle of one rank. The loop calls it after ``optimizer.step()``."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gradwire.comm.backend import Backend
from gradwire.comm.collectives import Traffic
from gradwire.core.requests import Sum
from gradwire.engine.drive import Clock, converse, drive
from gradwire.gossip import Gossip, Node
from gradwire.integrations.consistency import agree, telling
from gradwire.integrations.gossip.checkpoint import check_state, load_state, save_state
from gradwire.integrations.gossip.crossing import Crossing
from gradwire.integrations.gossip.flat_params import CodecSpec, Flat, describe, make_node, show
from gradwire.integrations.gossip.report import GossipReport, summarize

T = TypeVar("T")


class GossipSync:
    """Gossips the parameters of one model over one link. Call it after ``optimizer.step()``."""

    def __init__(
        self,
        model: nn.Module,
        spec: str | Gossip,
        codec: CodecSpec | None,
        link: Backend,
        *,
        granularity: str = "layer",
        overlap: bool = False,
        seed: int = 0,
    ) -> None:
        self.link, self.model, self.clock = link, model, Clock()
        with telling(link):
            self.flat = Flat(model)
            self.node = self._make_node(spec, codec, granularity, seed, overlap)
        self.said = describe(self.node, granularity)
        described = {name: f"{tuple(p.shape)} {p.dtype}" for name, p in self.flat.parameters.items()}
        hosts = "" if link.grouping is None else f", hosts {link.grouping}"
        agree(link, f"{self.said}; seed {seed}, overlap {overlap}{hosts}", described)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                link.broadcast_(tensor)
        self._begin(self.flat.read())
        link.traffic = Traffic()
        self._crossing: Crossing[tuple[Tensor, Tensor]] = Crossing(self.flat.device)

    def __repr__(self) -> str:
        return show(type(self).__name__, self.said, self.node, self.node.step, self.link.rank)

    def _make_node(
        self, spec: str | Gossip, codec: CodecSpec | None, granularity: str, seed: int, overlap: bool
    ) -> Node:
        return make_node(self.flat, spec, codec, self.link.rank, self.parties, granularity, seed, overlap)

    def _begin(self, common: Tensor) -> None:
        self.node.begin(common)

    @property
    def parties(self) -> int:
        """How many gossip with each other: ranks, or hosts."""
        return self.link.world if self.link.grouping is None else len(self.link.grouping.hosts)

    def average_gradients(self) -> None:
        """Take the mean over the ranks of this host, before the optimizer's step. Nobody else is on it."""

    def average(self, grads: Tensor) -> Tensor:
        """The same for gradients that lie elsewhere, as one vector in the order of ``model.named_parameters()``."""
        return grads

    def __call__(self) -> None:
        """Average with the neighbors; with ``overlap=True``, start to, and take over what the last call started."""
        self.flat.write_(self.mix(self.flat.read()))

    def mix(self, x: Tensor) -> Tensor:
        """The same for parameters that lie elsewhere, as one vector in the order of ``model.named_parameters()``."""
        if not self.node.overlap:
            return self._talk(x)
        self.land()
        x = self.node.depart(x)
        self._crossing.board(lambda: (x, self._talk(x)))
        return x

    def _talk(self, x: Tensor) -> Tensor:
        (met,) = drive(converse([self.node.run(x)]), self.link, self.clock)
        return met

    def land(self) -> None:
        """Wait until nothing is under way."""
        landed = self._crossing.land()
        if landed is not None:
            self.node.arrive(*landed)

    # -- the mean model ------------------------------------------------------------------------------------------------

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model holds the mean over ranks in here, of parameters and of floating-point buffers. Collective."""
        self.land()
        x, kept = self.flat.read(), {name: buffer.clone() for name, buffer in self.flat.buffers.items()}
        loose = [buffer.flatten().to(x) for buffer in kept.values()]
        (total,) = self._off_the_record([Sum(torch.cat([x, *loose]))])
        mean, *buffers = (total / self.link.world).split([x.numel(), *(part.numel() for part in loose)])
        self._write_(mean, dict(zip(kept, buffers, strict=True)))
        try:
            yield
        finally:
            self._write_(x, kept)

    def evaluate_mean(self, evaluate: Callable[[], T]) -> T:
        """What ``evaluate()`` returns while the model holds the mean over ranks. All ranks must call it."""
        with self.averaged():
            return evaluate()

    def distance(self) -> float:
        """The root mean square over ranks of |x_i - mean|. All ranks must call it."""
        self.land()
        x = self.flat.read()
        (total,) = self._off_the_record([Sum(x)])
        off = (x - total / self.link.world).double().square().sum().float()
        (square,) = self._off_the_record([Sum(off[None])])
        return math.sqrt(float(square) / self.link.world)

    def _write_(self, x: Tensor, buffers: Mapping[str, Tensor]) -> None:
        self.flat.write_(x)
        with torch.no_grad():
            for name, value in buffers.items():
                buffer = self.flat.buffers[name]
                buffer.copy_(value.view(buffer.shape))

    def _off_the_record(self, asks: Sequence[Any]) -> list[Any]:
        """Evaluation is no part of the training's account."""
        before = self.link.traffic
        answers = self.link.answer(asks)
        self.link.traffic = before
        return answers

    # -- what is kept and shown ----------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        self.land()
        return self.node.step

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's memories and step: plain tensors, keyed by parameter name."""
        self.land()
        return save_state(self.node, self.flat, self.said, self.parties)

    def load_state_dict(self, state: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]) -> None:
        """Take over this rank's own state. All ranks must call it; what one of them cannot load, none does."""
        self.land()
        states = [state] if isinstance(state, Mapping) else list(state)
        with telling(self.link):
            for one in states:
                self._check(one)
        agree(self.link, self.said, {}, int(states[0]["gradwire/step"]))
        self._load(states[0])

    def _check(self, state: Mapping[str, Tensor]) -> None:
        check_state(state, self.node, self.flat, self.said, self.parties)

    def _load(self, state: Mapping[str, Tensor]) -> None:
        load_state(self.node, state)

    def report(self) -> GossipReport:
        """Bytes, distance, memory and gamma so far."""
        self.land()
        return summarize(self.node, self.link.traffic, self.parties)

    def fits(self, state: Mapping[str, Tensor]) -> bool:
        """Whether a state was saved in a world like this one."""
        return int(state["gradwire/world"]) == self.parties and int(state.get("gradwire/beside", 1)) == 1
