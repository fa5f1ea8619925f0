"""Broadcast methods: each rank sends one message to all neighbors, by two rules: what it sends, and how it updates.

The rules take one rank's vectors [N], or those of all ranks stacked as rows [ranks, N]: `StackedNodes` runs them on
rows, and gets the same bits as ranks that exchange messages.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, TypeAlias

from torch import Tensor

from gradwire.codecs import Codec, Memory
from gradwire.core import CommGenerator
from gradwire.gossip.gossip import GossipMethod, MixResult, VectorMemory, decode_message, encode_message, send_to_all
from gradwire.gossip.message import GossipContext, Received

Weight: TypeAlias = float | Tensor  # of one rank, or float64 [ranks, 1]


class NeighborMessages(NamedTuple):
    """All messages of a round, as a rank decodes them.

    Attributes:
        own: Its own message, as its receivers decode it.
        own_weight: The weight it gives itself.
        others: Each neighbor's weight and message, by rising rank.
    """

    own: Tensor
    own_weight: Weight
    others: Sequence[tuple[Weight, Tensor]]

    def added_to(self, start: Tensor) -> Tensor:
        """``start`` + the weighted sum of all messages."""
        mixed = start + times(self.own_weight, self.own)
        for weight, q in self.others:
            mixed = mixed + times(weight, q)
        return mixed

    def pull(self, x: Tensor, gamma: float = 1.0) -> Tensor:
        """``x`` + gamma times the weighted differences to the neighbors' messages."""
        for weight, q in self.others:
            x = x + times(gamma * weight, q - self.own)
        return x


def times(weight: Weight, x: Tensor) -> Tensor:
    """The product, rounded alike whether the weight is one number or one for each row."""
    return (weight.to(x.dtype) if isinstance(weight, Tensor) else weight) * x


class BroadcastRules(GossipMethod):
    """A method of one message per step, the same for all neighbors."""

    stacks_if_static: ClassVar[bool] = False  # whether the two rules are complete on static graphs only

    @abstractmethod
    def message(self, x: Tensor, memory: Memory, step: int) -> Tensor:
        """What to send."""

    @abstractmethod
    def update(self, x: Tensor, memory: Memory, messages: NeighborMessages, step: int) -> MixResult:
        """New parameters and memories, from all messages."""

    def broadcast(
        self, x: Tensor, memory: Memory, codec: Codec, context: GossipContext, metadata: tuple[float, ...] = ()
    ) -> CommGenerator[tuple[MixResult, NeighborMessages, Received]]:
        """The two rules and the exchange between them; also the messages, decoded and as received."""
        own = encode_message(self.message(x, memory, context.key.step), codec, context)
        received = yield from send_to_all(own.payload, codec, context, metadata)
        weights = {peer: weight for peer, weight in context.in_weights.items() if peer in received}
        others = [(weight, decode_message(received[peer], codec, context, peer)) for peer, weight in weights.items()]
        messages = NeighborMessages(own.decoded, 1.0 - sum(weights.values()), others)
        result = self.update(x, memory, messages, context.key.step)
        if context.elastic:
            flows = {peer: weight * (q - own.decoded).norm() for peer, (weight, q) in zip(weights, others, strict=True)}
            result = result._replace(flows=flows)
        return result, messages, received


class BroadcastMethod(VectorMemory, BroadcastRules):
    """A method of which the two rules are all."""

    def mix(self, x: Tensor, memory: Memory, codec: Codec, context: GossipContext) -> CommGenerator[MixResult]:
        result, _, _ = yield from self.broadcast(x, memory, codec, context)
        return result
