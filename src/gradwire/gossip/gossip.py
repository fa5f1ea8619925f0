"""Gossip: how replicas that talk to neighbors only stay close.

A method is a frozen rule. It is called with a rank's parameters after the optimizer's step, yields `SendRecv` requests,
and hands back new parameters; it never sees the network. What it remembers are flat buffers, by name.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from gradwire.codecs.codec import Codec
from gradwire.codecs.quantizers.cast import Cast
from gradwire.codecs.stage import Decoded, EncodeInput, Memory, StateSpec
from gradwire.core.keys import Key
from gradwire.core.payload import Payload
from gradwire.core.requests import CommGenerator
from gradwire.core.segments import Segments
from gradwire.core.spec import write
from gradwire.gossip.message import GossipMessage, Header
from gradwire.topology import Graph, Topology, graph


class GossipContext(NamedTuple):
    """The circumstances of one conversation.

    Attributes:
        key: My random bits for this step; it knows my rank.
        topology: Who hears whom.
        units: What the codec treats as one vector each.
        tensors: The parameters behind the same flat buffer, with their shapes.
        number: How many messages I wrote before.
        broken: Whether my parameters are not finite, so that what I say now must not be used.
        live: With elastic training, the peers that take part in this step, and whether the edge is new to both; None
            where all peers always do.
        heard: What ranks in this process have decoded already in this step, by (sender, receiver).
    """

    key: Key
    topology: Topology
    units: Segments
    tensors: Segments
    number: int = 0
    broken: bool = False
    live: Mapping[int, bool] | None = None
    heard: MutableMapping[tuple[int, int], Tensor] | None = None

    @property
    def me(self) -> int:
        return self.key.rank

    @property
    def elastic(self) -> bool:
        return self.live is not None

    @property
    def hears(self) -> dict[int, float]:
        """Whom I hear in this step, with the weight I give them."""
        return self._present(self.topology.peers(self.me, self.key.step))

    @property
    def tells(self) -> dict[int, float]:
        """Who hears me in this step, with the weight they give me."""
        return self._present(self.topology.out_peers(self.me, self.key.step))

    def stamp(self, leg: int = 0) -> Header:
        return Header(self.key.step, self.number + leg, self.broken, self.elastic)

    def _present(self, peers: Mapping[int, float]) -> dict[int, float]:
        return {peer: weight for peer, weight in sorted(peers.items()) if self.live is None or peer in self.live}


class MixResult(NamedTuple):
    """The outcome of a talk.

    Attributes:
        x: New parameters.
        memory: What is remembered.
        gamma: The consensus step that was taken.
        flows: How far each neighbor moved me, as a norm; only with elastic training, where one end may move alone.
    """

    x: Tensor
    memory: Memory
    gamma: float = 1.0
    flows: Mapping[int, Tensor] = MappingProxyType({})


class Gossip(ABC):
    """A frozen rule of conversation between neighbors."""

    name: ClassVar[str]
    kind: ClassVar[str]
    examples: ClassVar[tuple[str, ...]]
    late: ClassVar[bool] = False  # compresses by itself; no codec
    overlaps: ClassVar[bool] = True  # what it adds to x may as well be added one step later
    elastic: ClassVar[bool] = False  # goes on when neighbors die
    graph: Graph

    def __post_init__(self) -> None:
        object.__setattr__(self, "graph", graph(self.graph))

    def __str__(self) -> str:
        return write(self)

    @abstractmethod
    def check(self, codec: Codec, topology: Topology) -> None:
        """Refuse a codec that this method cannot use, or a graph, with a sentence."""

    @abstractmethod
    def talk(self, x: Tensor, memory: Memory, codec: Codec, around: GossipContext) -> CommGenerator[MixResult]:
        """Hold the conversation."""

    def slots(self, around: GossipContext) -> dict[str, StateSpec]:
        """Memories that belong to parameters."""
        del around
        return {}

    def uncompressed(self, elements: int, degree: int, world: int) -> float:
        """Bytes that a rank would send in a step, were they all float32."""
        del world
        return 4.0 * elements * degree

    def begin(self, common: Tensor, codec: Codec, around: GossipContext) -> dict[str, Tensor]:
        """All memories at step 0, where every rank holds the parameters ``common``.

        What has no slot belongs to no parameter; it is saved whole.
        """
        del codec
        return {name: common.new_zeros(sum(slot.lengths)) for name, slot in self.slots(around).items()}


# -- what methods have in common ---------------------------------------------------------------------------------------


class Speech(NamedTuple):
    """A message, and the dense vector that everybody will hear in it."""

    payload: Payload
    heard: Tensor


def say(target: Tensor, codec: Codec, around: GossipContext, to: int = -1) -> Speech:
    """Encode, and listen to oneself: both ends hold the same bits."""
    encoded = codec.encode(EncodeInput(target, target, {}, around.units), around.key)
    heard = dense(encoded.sent, target)
    if around.heard is not None:
        around.heard[around.me, to] = heard
    return Speech(encoded.payload, heard)


def hear(letter: GossipMessage, codec: Codec, around: GossipContext, sender: int, to: int = -1) -> Tensor:
    """Decode a neighbor's message, unless its sender did so in this process."""
    if around.heard is not None and (sender, to) in around.heard:
        return around.heard[sender, to]
    return codec.decode(letter.body, around.units, around.key.of(sender))


def dense(sent: Decoded, like: Tensor) -> Tensor:
    """What was sent, as decoders see it: zero, plus the values."""
    return sent.onto(torch.zeros_like(like))


def size_of(codec: Codec, around: GossipContext) -> int | None:
    """The length of a body, where it is known beforehand."""
    return codec.size(around.units) if codec.traits.fixed else None


def need_cast(method: Gossip, codec: Codec) -> None:
    if codec.selector or codec.transform or not isinstance(codec.quantizer, Cast):
        raise ValueError(
            f"{method.name} sends whole models, which {codec} would ruin: it keeps no account of what is lost; "
            "use fp32, fp16 or bf16, or choco with that codec"
        )


def need_forgetful(method: Gossip, codec: Codec) -> None:
    if codec.memories:
        raise ValueError(f"{codec} remembers past gradients, and {method.name} sends differences of models; use topk")


def need_contraction(method: Gossip, codec: Codec) -> None:
    need_forgetful(method, codec)
    if not codec.traits.contraction:
        raise ValueError(
            f"{method.name} needs a codec that never loses more than it was given, and {codec} may; "
            "write biased=True for qsgd, unbiased=False for randomk, or take sign or topk"
        )


def need_doubly(method: Gossip, topology: Topology) -> None:
    if not topology.doubly_stochastic:
        raise ValueError(
            f"{method.name} averages with rows and columns that sum to 1, and those of {topology} do not; use sgp on it"
        )


def need_symmetric(method: Gossip, topology: Topology) -> None:
    need_doubly(method, topology)
    if topology.period > 1 or not topology.symmetric:
        what = "changes from step to step" if topology.period > 1 else "is directed"
        raise ValueError(f"{method.name} needs a static graph with edges both ways, and {topology} {what}; use choco")


def need_step(gamma: object, where: str) -> None:
    """A consensus step is a number in (0, 1]."""
    number = isinstance(gamma, int | float) and not isinstance(gamma, bool)
    if not (number and 0.0 < gamma <= 1.0):  # type: ignore[operator]
        raise ValueError(f"{where} takes a consensus step in (0, 1], not gamma={gamma!r}; 1 is a whole average")
