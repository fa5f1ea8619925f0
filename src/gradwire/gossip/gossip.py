"""Gossip methods: how replicas that exchange messages with neighbors only stay close.

A method is a frozen rule. It is called with a rank's parameters after the optimizer's step, yields requests, and
returns new parameters; it does not use the network itself. Its memories are flat buffers, by name.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from gradwire.codecs import Codec, Decoded, EncodeInput, Memory, StateSpec
from gradwire.core import CommGenerator, Named, Payload, parse, registered
from gradwire.core.decode_cache import memoized
from gradwire.gossip.message import GossipContext, GossipMessage, Received, exchange_messages
from gradwire.topology import Graph, Topology, graph


class MixResult(NamedTuple):
    """The result of one round on one rank.

    Attributes:
        x: New parameters.
        memory: New memories.
        gamma: The consensus step that was taken.
        flows: How far each neighbor moved the parameters, as a norm; only with elastic training, where one end of an
            edge may move alone.
    """

    x: Tensor
    memory: Memory
    gamma: float = 1.0
    flows: Mapping[int, Tensor] = MappingProxyType({})


@dataclass(frozen=True)
class GossipMethod(Named):
    """A frozen rule by which neighbors mix their parameters.

    Attributes:
        graph: Which ranks exchange messages.
    """

    graph: Graph
    compresses: ClassVar[bool] = False  # by itself, so that it takes no codec
    overlaps: ClassVar[bool] = True  # what it adds to x may as well be added one step later
    elastic: ClassVar[bool] = False  # continues when neighbors die
    H = 1  # steps of a round
    iterations = 1  # messages to each neighbor in a round
    all_reduces: ClassVar[bool] = False  # sums over all ranks instead of exchanging messages with neighbors

    def __post_init__(self) -> None:
        object.__setattr__(self, "graph", graph(self.graph))

    @abstractmethod
    def check(self, codec: Codec, topology: Topology) -> None:
        """Refuse a codec or a graph that this method cannot use.

        Raises:
            ValueError: It cannot.
        """

    @abstractmethod
    def mix(self, x: Tensor, memory: Memory, codec: Codec, context: GossipContext) -> CommGenerator[MixResult]:
        """One round."""

    @abstractmethod
    def state_specs(self, context: GossipContext) -> dict[str, StateSpec]:
        """The memories that belong to parameters."""

    @abstractmethod
    def initial_memory(self, common: Tensor, codec: Codec, context: GossipContext) -> dict[str, Tensor]:
        """All memories at step 0, where every rank holds the parameters ``common``.

        A memory that `state_specs` does not name belongs to no parameter; it is saved whole.
        """

    def rounds(self, steps: int) -> int:
        """How many rounds there are in so many steps."""
        return steps // self.H

    def dense_bytes(self, elements: int, degree: int, world: int) -> float:
        """Bytes that a rank would send in a step, were they all float32."""
        return 4.0 * elements * (2 * (world - 1) / world if self.all_reduces else degree)


def gossip_method(spec: str | GossipMethod) -> GossipMethod:
    """A method from its text, or itself: ``"choco(ring, gamma=auto)"`` is ``Choco(Ring())``."""
    made = parse(spec) if isinstance(spec, str) else spec
    if not isinstance(made, GossipMethod):
        raise ValueError(
            f"{spec!r} is no gossip method but a {getattr(made, 'kind', type(made).__name__)}; "
            f"write one of {', '.join(registered('gossip'))} with a graph, for example choco(ring)"
        )
    return made


class VectorMemory(GossipMethod):
    """A method whose memories are a fixed number of vectors, as long as the parameters."""

    memories: ClassVar[tuple[str, ...]] = ()
    copies_parameters: ClassVar[bool] = False  # at step 0; else memories start at zero

    def state_specs(self, context: GossipContext) -> dict[str, StateSpec]:
        return {name: StateSpec(context.tensors.lengths) for name in self.memories}

    def initial_memory(self, common: Tensor, codec: Codec, context: GossipContext) -> dict[str, Tensor]:
        return {name: common.clone() if self.copies_parameters else torch.zeros_like(common) for name in self.memories}


class OutgoingMessage(NamedTuple):
    """A message, and the dense vector that its receivers will decode."""

    payload: Payload
    decoded: Tensor


def encode_message(target: Tensor, codec: Codec, context: GossipContext, to: int = -1) -> OutgoingMessage:
    """Encode a vector, and decode it as its receivers will: both ends then hold the same bits."""
    encoded = codec.encode(EncodeInput(target, target, {}, context.units), context.key)
    decoded = memoized((), ("gossip", context.key, to), lambda: densify(encoded.sent, target))
    return OutgoingMessage(encoded.payload, decoded)


def decode_message(message: GossipMessage, codec: Codec, context: GossipContext, sender: int, to: int = -1) -> Tensor:
    """Decode a neighbor's message, unless its sender did so in this process."""
    key = context.key.of(sender)
    return memoized((), ("gossip", key, to), lambda: codec.decode(message.body, context.units, key))


def send_to_all(
    payload: Payload, codec: Codec, context: GossipContext, metadata: tuple[float, ...] = ()
) -> CommGenerator[Received]:
    """Send one message to all neighbors, and receive theirs."""
    sizes = dict.fromkeys(context.in_weights, codec.fixed_size(context.units))
    return (yield from exchange_messages(context, dict.fromkeys(context.out_weights, payload), sizes, metadata))


def densify(sent: Decoded, like: Tensor) -> Tensor:
    """A decoded message as a dense vector: zero, plus the values."""
    return sent.add_to(torch.zeros_like(like))
