"""Node: one rank's side of the gossip: its memories, its step, and what it has said so far."""

import math
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradwire.codecs.codec import Codec
from gradwire.core.keys import Key
from gradwire.core.payload import Payload
from gradwire.core.requests import CommGenerator, SendRecv, Sum
from gradwire.core.segments import Segments
from gradwire.gossip.gossip import Gossip, GossipContext, MixResult
from gradwire.gossip.optimal_gamma import modes
from gradwire.topology import Topology


@dataclass
class Node:
    """The mutable heart of gossip. It holds conversations and never moves a byte.

    Attributes:
        method: How to talk.
        codec: What messages are written in.
        topology: Who hears whom.
        rank: Who I am.
        seed: Of all random bits; equal on all ranks.
        tensors: The parameters, laid end to end.
        units: What the codec treats as one vector each.
        overlap: Whether what a talk adds is added one step later.
        elastic: Whether neighbors may come and go.
    """

    method: Gossip
    codec: Codec
    topology: Topology
    rank: int
    seed: int
    tensors: Segments
    units: Segments
    overlap: bool = False
    elastic: bool = False

    step: int = field(init=False, default=0)
    number: int = field(init=False, default=0)  # messages written
    gamma: float = field(init=False, default=1.0)
    memory: dict[str, Tensor] = field(init=False, default_factory=dict)
    pending: Tensor | None = field(init=False, default=None)  # what the last talk adds, if that is still to be added
    moved: Tensor = field(init=False, default_factory=lambda: torch.zeros(()))  # how far the last talk moved me
    flows: dict[int, Tensor] = field(init=False, default_factory=dict)  # and each neighbor, with elastic training

    def __post_init__(self) -> None:
        self.method.check(self.codec, self.topology)
        if self.overlap and not self.method.overlaps:
            raise ValueError(
                f"{self.method.name} replaces the parameters it is given, so a step may not run meanwhile; "
                "leave overlap=True out, or use choco"
            )
        if self.elastic:
            self._check_elastic()

    def _check_elastic(self) -> None:
        if not self.method.elastic:
            raise ValueError(
                f"{self.method.name} cannot go on without a neighbor; with elastic=True use choco or dpsgd"
            )
        if self.topology.period > 1 or not self.topology.symmetric:
            raise ValueError(
                f"elastic=True needs a static graph with edges both ways, unlike {self.topology}; use ring"
            )

    def begin(self, common: Tensor) -> None:
        """Start from the parameters that all ranks hold."""
        self.memory = self.method.begin(common, self.codec, self.around())

    def around(
        self,
        live: Mapping[int, bool] | None = None,
        heard: MutableMapping[tuple[int, int], Tensor] | None = None,
        broken: bool = False,
    ) -> GossipContext:
        if self.elastic and live is None:
            live = {}
        key = Key(self.seed, self.step, self.rank)
        return GossipContext(key, self.topology, self.units, self.tensors, self.number, broken, live, heard)

    def run(
        self,
        x: Tensor,
        live: Mapping[int, bool] | None = None,
        heard: MutableMapping[tuple[int, int], Tensor] | None = None,
    ) -> CommGenerator[Tensor]:
        """One step: parameters in, parameters out."""
        broken = not bool(torch.isfinite(x).all())
        if broken:
            x = torch.zeros_like(x)  # what is said now is used by nobody
        talk = self.method.talk(x, self.memory, self.codec, self.around(live, heard, broken))
        met = yield from self._counted(talk, x.device)
        self.memory, self.gamma = dict(met.memory), met.gamma
        self.moved = (met.x - x).norm()
        self.flows |= met.flows
        self.step += 1
        self.number += getattr(self.method, "iterations", 1)
        return met.x

    def _counted(self, talk: CommGenerator[MixResult], device: torch.device) -> CommGenerator[MixResult]:
        """The same talk, its payloads put on account."""
        answer: Any = None
        try:
            while True:
                ask = talk.send(answer)
                if isinstance(ask, SendRecv):
                    answer = (yield ask) if ask.out else (yield from self._silent(ask, device))
                else:
                    assert isinstance(ask, Sum)
                    answer = yield ask
        except StopIteration as done:
            met: MixResult = done.value
            return met

    def _silent(self, ask: SendRecv, device: torch.device) -> CommGenerator[dict[int, Payload]]:
        """A swap in which I tell nobody. Others swap, so I take part, with nothing for myself."""
        nothing = Payload(torch.zeros(0, dtype=torch.uint8, device=device))
        heard = yield SendRecv({self.rank: nothing}, {**ask.into, self.rank: 0})
        return {peer: payload for peer, payload in heard.items() if peer != self.rank}

    # -- overlap: what a talk adds is added when the next step begins --------------------------------------------------

    def depart(self, x: Tensor) -> Tensor:
        """The parameters to go on with, and to talk about: with yesterday's correction."""
        if self.pending is not None:
            x, self.pending = x + self.pending, None
        return x

    def arrive(self, sent: Tensor, met: Tensor) -> None:
        """Keep today's correction for tomorrow."""
        self.pending = met - sent

    # -- what is kept and shown ----------------------------------------------------------------------------------------

    @property
    def floats_per_parameter(self) -> float:
        """How many float32 numbers are remembered for each parameter."""
        held = sum(x.numel() * x.element_size() for x in self.memory.values()) / 4
        return (held + (0 if self.pending is None else self.pending.numel())) / max(1, self.tensors.total)

    @property
    def consensus(self) -> float:
        """An estimate of the distance to the mean model, from how far neighbors pulled in the last talk.

        It takes disagreement to be spread evenly over the graph's eigenvectors.
        """
        found = modes(self.topology)
        scale = math.sqrt(sum(mu * mu for mu in found) / len(found)) if found else 1.0
        return float(self.moved) / self.gamma / scale

    def save(self) -> dict[str, Tensor]:
        """Memories by parameter name, and whole where they belong to none."""
        slots = self.method.slots(self.around())
        state = {}
        for memory, buffer in {**self.memory, **({} if self.pending is None else {"pending": self.pending})}.items():
            if memory in slots or memory == "pending":
                lengths = slots[memory].lengths if memory in slots else self.tensors.lengths
                for name, part in zip(self.tensors.names, buffer.split(list(lengths)), strict=True):
                    state[f"{memory}/{name}"] = part.clone().cpu()
            else:
                state[f"gradwire/memory/{memory}"] = buffer.clone().cpu()
        return state

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `save` returned, on this node's device.

        Raises:
            ValueError: Some of it is missing, or of another model.
        """
        slots = self.method.slots(self.around())
        lengths = {name: slot.lengths for name, slot in slots.items()}
        if any(key.startswith("pending/") for key in state):
            lengths["pending"] = self.tensors.lengths
        fresh: dict[str, Tensor] = {}
        device = next((x.device for name, x in self.memory.items() if name in slots), torch.device("cpu"))
        for memory, sizes in lengths.items():
            parts = []
            for name, n in zip(self.tensors.names, sizes, strict=True):
                part = state.get(f"{memory}/{name}")
                if part is None or part.numel() != n:
                    found = "nothing" if part is None else f"{part.numel()} elements"
                    raise ValueError(
                        f"the state holds {found} of {memory} for {name!r}, where {n} elements are needed; "
                        "is it a checkpoint of another model?"
                    )
                parts.append(part.flatten())
            fresh[memory] = torch.cat(parts).to(device)
        for key, buffer in state.items():
            if key.startswith("gradwire/memory/"):
                fresh[key.removeprefix("gradwire/memory/")] = buffer.clone()
        self.pending = fresh.pop("pending", None)
        self.memory = fresh
