"""Public: methods that tell all neighbors the same: what a rank says, and what it makes of the answers, are two rules.

The rules never ask whether they are given one rank's vectors [N] or those of all ranks, stacked as rows [ranks, N]:
`Stack` runs them on rows, and gets the same bits as ranks that talk.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from torch import Tensor

from gradwire.codecs.codec import Codec
from gradwire.codecs.stage import Memory
from gradwire.core.requests import CommGenerator
from gradwire.gossip.gossip import Gossip, GossipContext, MixResult, hear, say, size_of
from gradwire.gossip.message import GossipMessage, post
from gradwire.topology import Topology

Weight: TypeAlias = float | Tensor  # of one rank, or float64 [ranks, 1]


class Heard(NamedTuple):
    """All that a rank heard in a round.

    Attributes:
        mine: Its own message, as everybody decodes it.
        own: The weight it gives itself.
        others: Each neighbor's weight and message, by rising rank.
    """

    mine: Tensor
    own: Weight
    others: Sequence[tuple[Weight, Tensor]]

    def onto(self, start: Tensor) -> Tensor:
        """``start`` + the weighted sum of all messages."""
        mixed = start + times(self.own, self.mine)
        for weight, q in self.others:
            mixed = mixed + times(weight, q)
        return mixed

    def toward(self, x: Tensor, gamma: float = 1.0) -> Tensor:
        """``x``, moved by gamma times the weighted differences to the neighbors' messages."""
        for weight, q in self.others:
            x = x + times(gamma * weight, q - self.mine)
        return x


def times(weight: Weight, x: Tensor) -> Tensor:
    """The product, rounded alike whether the weight is one number or one for each row."""
    return (weight.to(x.dtype) if isinstance(weight, Tensor) else weight) * x


class BroadcastMethod(Gossip):
    """A method of one message per step, the same for all neighbors."""

    @abstractmethod
    def words(self, x: Tensor, memory: Memory, step: int) -> Tensor:
        """What to say."""

    @abstractmethod
    def learn(self, x: Tensor, memory: Memory, heard: Heard, step: int) -> MixResult:
        """What to make of what was said."""

    def stacks(self, topology: Topology) -> bool:
        """Whether the two rules are all there is to it, on this graph."""
        del topology
        return True

    def talk(self, x: Tensor, memory: Memory, codec: Codec, around: GossipContext) -> CommGenerator[MixResult]:
        met, _, _ = yield from self.exchange(x, memory, codec, around)
        return met

    def exchange(
        self, x: Tensor, memory: Memory, codec: Codec, around: GossipContext, note: tuple[float, ...] = ()
    ) -> CommGenerator[tuple[MixResult, Heard, dict[int, GossipMessage]]]:
        """The two rules and the talk between them; also what was heard, and the letters with their notes."""
        mine = say(self.words(x, memory, around.key.step), codec, around)
        letters = yield from post(
            around.stamp(),
            dict.fromkeys(around.tells, mine.payload),
            dict.fromkeys(around.hears, size_of(codec, around)),
            note,
        )
        there = {peer: weight for peer, weight in around.hears.items() if peer in letters}
        others = [(weight, hear(letters[peer], codec, around, peer)) for peer, weight in there.items()]
        heard = Heard(mine.heard, 1.0 - sum(there.values()), others)
        met = self.learn(x, memory, heard, around.key.step)
        if around.elastic:
            flows = {peer: weight * (q - heard.mine).norm() for peer, (weight, q) in zip(there, others, strict=True)}
            met = met._replace(flows=flows)
        return met, heard, letters
