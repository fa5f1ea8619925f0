"""Node: one rank's side of the gossip: its memories, its step, and the number of its messages."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradwire.codecs import Codec
from gradwire.core import CommGenerator, Key, Segments
from gradwire.gossip.gossip import GossipMethod
from gradwire.gossip.local_gossip import NONFINITE_MEMORY
from gradwire.gossip.message import CPU, GossipContext, diverged
from gradwire.gossip.optimal_gamma import modes
from gradwire.topology import Topology


@dataclass
class Node:
    """The mutable state of one rank. It yields requests, and does not use the network.

    Attributes:
        method: How ranks mix their parameters.
        codec: What messages are encoded with.
        topology: The mixing weights.
        rank: This rank.
        seed: Of all random bits; equal on all ranks.
        tensors: The parameters, laid end to end.
        units: What the codec treats as one vector each.
        overlap: Whether what a round adds is added one step later.
        elastic: Whether neighbors may come and go.
    """

    method: GossipMethod
    codec: Codec
    topology: Topology
    rank: int
    seed: int
    tensors: Segments
    units: Segments
    overlap: bool = False
    elastic: bool = False

    device: torch.device = field(init=False, default=CPU)  # of the parameters
    step: int = field(init=False, default=0)
    number: int = field(init=False, default=0)  # messages written
    gamma: float = field(init=False, default=1.0)
    memory: dict[str, Tensor] = field(init=False, default_factory=dict)
    pending: Tensor | None = field(init=False, default=None)  # what the last round adds, if that is still to be added
    moved: Tensor = field(init=False, default_factory=lambda: torch.zeros(()))  # norm of the last round's change
    flows: dict[int, Tensor] = field(init=False, default_factory=dict)  # by neighbor, with elastic training

    def __post_init__(self) -> None:
        self.method.check(self.codec, self.topology)
        if self.overlap and not self.method.overlaps:
            raise ValueError(
                f"{self.method.name} replaces the parameters it is given, so its rounds cannot overlap the next step; "
                "leave overlap=True out, or use choco"
            )
        if self.elastic:
            self._check_elastic()

    def _check_elastic(self) -> None:
        if not self.method.elastic:
            raise ValueError(
                f"{self.method.name} cannot continue without a neighbor; with elastic=True use choco or dpsgd"
            )
        if self.topology.period > 1 or not self.topology.symmetric:
            raise ValueError(
                f"elastic=True needs a static graph with edges both ways, unlike {self.topology}; use ring"
            )

    def begin(self, common: Tensor) -> None:
        """Start from the parameters that all ranks hold."""
        self.device = common.device
        self.memory = self.method.initial_memory(common, self.codec, self.context())

    def context(self) -> GossipContext:
        """The context of this step's round; with elastic training, without neighbors."""
        key, live = Key(self.seed, self.step, self.rank), dict[int, bool]() if self.elastic else None
        return GossipContext(key, self.topology, self.units, self.tensors, self.number, live=live)

    def run(self, x: Tensor, live: Mapping[int, bool] | None = None) -> CommGenerator[Tensor]:
        """One round: parameters in, parameters out."""
        nonfinite = not bool(torch.isfinite(x).all())
        sent = torch.zeros_like(x) if nonfinite else x  # receivers do not use a message of zeros
        context = self.context()._replace(nonfinite=nonfinite, live=live, device=x.device)
        result = yield from self.method.mix(sent, self.memory, self.codec, context)
        self.memory = dict(result.memory)
        self.flows |= result.flows
        if self.method.rounds(self.step + 1) > self.method.rounds(self.step):  # a local step says nothing of gamma
            self.gamma, self.moved = result.gamma, (result.x - sent).norm()
        self.step += 1
        self.number += self.method.iterations
        return x if nonfinite else result.x  # a local step sends nothing, and must not hide what has become of x

    @property
    def diverged(self) -> bool:
        """Whether parameters were not finite at a local step, which the next round tells the other ranks."""
        return NONFINITE_MEMORY in self.memory

    def check(self) -> None:
        """Raise `Diverged` if parameters were not finite at a local step."""
        if self.diverged:
            raise diverged(f"rank {self.rank}", self.step)

    # -- overlap: what a round adds is added when the next step begins -------------------------------------------------

    def apply_pending(self, x: Tensor) -> Tensor:
        """The parameters of this step, with the last round's correction."""
        if self.pending is not None:
            x, self.pending = x + self.pending, None
        return x

    def store_pending(self, x: Tensor, mixed: Tensor) -> None:
        """Keep a round's correction for the next step."""
        self.pending = mixed - x

    # -- state and report ----------------------------------------------------------------------------------------------

    @property
    def floats_per_parameter(self) -> float:
        """How many float32 numbers are stored for each parameter."""
        stored = sum(x.numel() * x.element_size() for x in self.memory.values()) / 4
        return (stored + (0 if self.pending is None else self.pending.numel())) / max(1, self.tensors.total)

    @property
    def consensus(self) -> float:
        """An estimate of the distance to the mean model, from how far neighbors pulled in the last round.

        It takes disagreement to be spread evenly over the graph's eigenvectors.
        """
        values = modes(self.topology)
        scale = math.sqrt(sum(mu * mu for mu in values) / len(values)) if values else 1.0
        return float(self.moved) / self.gamma / scale

    def _lengths(self) -> dict[str, tuple[int, ...]]:
        """How much of each memory belongs to each parameter; memories that belong to none are left out."""
        specs = self.method.state_specs(self.context())
        return {name: spec.lengths for name, spec in specs.items()} | {"pending": self.tensors.lengths}

    def save(self) -> dict[str, Tensor]:
        """Memories by parameter name, and whole where they belong to none."""
        lengths, state = self._lengths(), {}
        buffers = self.memory if self.pending is None else {**self.memory, "pending": self.pending}
        for memory, buffer in buffers.items():
            if memory not in lengths:
                state[f"gradwire/memory/{memory}"] = buffer.clone().cpu()
                continue
            for name, part in zip(self.tensors.names, buffer.split(list(lengths[memory])), strict=True):
                state[f"{memory}/{name}"] = part.clone().cpu()
        return state

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `save` returned, on the device of the parameters.

        Raises:
            ValueError: Some of it is missing, or of another model.
        """
        lengths = self._lengths()
        if not any(key.startswith("pending/") for key in state):
            del lengths["pending"]
        loaded: dict[str, Tensor] = {}
        for memory, sizes in lengths.items():
            parts = []
            for name, n in zip(self.tensors.names, sizes, strict=True):
                part = state.get(f"{memory}/{name}")
                if part is None or part.numel() != n:
                    held = "nothing" if part is None else f"{part.numel()} elements"
                    raise ValueError(
                        f"the state holds {held} of {memory} for {name!r}, where {n} elements are needed; "
                        "is it a checkpoint of another model?"
                    )
                parts.append(part.flatten())
            loaded[memory] = torch.cat(parts).to(self.device)
        for key, buffer in state.items():
            if key.startswith("gradwire/memory/"):
                loaded[key.removeprefix("gradwire/memory/")] = buffer.clone()
        self.pending = loaded.pop("pending", None)
        self.memory = loaded
