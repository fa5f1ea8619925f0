"""Exchange: how workers agree on one mean.

An exchange speaks in asks and never sees the network. `encode` is local; `talk` is the conversation.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple, TypeAlias

from torch import Tensor

from gradwire.codecs.codec import Codec, Entries
from gradwire.codecs.stage import Decoded, EncodeInput, Memory, StateSpec
from gradwire.core.keys import Key
from gradwire.core.payload import Payload
from gradwire.core.requests import CommGenerator
from gradwire.core.segments import Segments
from gradwire.core.spec import write
from gradwire.exchanges.batch import RankBatch, Simulated


class CommContext(NamedTuple):
    """The circumstances of one conversation.

    Attributes:
        key: My random bits for this step.
        world: How many ranks take part.
        units: What the codec treats as one vector each.
        tensors: The parameters behind the same flat buffer, with their shapes.
        indebted: Whether the lane keeps what is lost, so that a second leg should too.
        listens: Whether anybody asks what will have been heard of this rank.
        apart: Whether a mean with few entries may be handed back as those, for somebody else to write.
    """

    key: Key
    world: int
    units: Segments
    tensors: Segments
    indebted: bool
    listens: bool = True
    apart: bool = False


class Message(NamedTuple):
    """A message ready to go. ``sent`` is None when nobody asks, or only the group's answer tells what will be heard."""

    message: Mapping[int, Payload] | Payload | Tensor
    sent: Decoded | None
    memory: Memory


class Aggregate(NamedTuple):
    """The group's mean, as a vector or, if that was asked for, as its entries; and the memory after the talk."""

    mean: Tensor | Entries
    memory: Memory
    sent: Decoded | None = None


class ShardMessage(NamedTuple):
    """The message of one stretch of the buffer. ``sent`` is None when there is nothing left to settle."""

    payload: Payload
    sent: Decoded | None
    memory: Memory


EncodeShard: TypeAlias = Callable[[int, int], ShardMessage]  # encodes the stretch [start, stop)


class Exchange(ABC):
    """A frozen rule of conversation."""

    name: ClassVar[str]
    kind: ClassVar[str]
    examples: ClassVar[tuple[str, ...]]
    exact: ClassVar[bool] = False  # with fp32 the outcome is the mean, to rounding
    late: ClassVar[bool] = False  # compresses by itself, in mid-conversation; no codec
    silent: ClassVar[bool] = False  # requests nothing from the group
    cuts: bool = False  # `collect` encodes stretches of the buffer apart
    delays: ClassVar[bool] = False  # hands back the mean of the step before
    simulates: bool = False  # has `simulate`
    serves: bool = False  # keeps an error of its own, the memory "served", where the lane keeps errors

    def __str__(self) -> str:
        return write(self)

    def check(self, codec: Codec) -> None:
        """Refuse a codec that this exchange cannot carry, with a sentence."""
        del codec

    def slots(self, around: CommContext) -> dict[str, StateSpec]:
        """Memories of the exchange's own."""
        del around
        return {}

    def encode(self, signal: EncodeInput, codec: Codec, around: CommContext) -> Message:
        """Turn what should be said into a message."""

        def say(start: int, stop: int) -> ShardMessage:
            part = signal.cut(start, stop)
            if around.listens:
                return ShardMessage(*codec.encode(part, around.key))
            payload, memory = codec.message(part, around.key)
            return ShardMessage(payload, None, memory)

        return self.collect(say, around)

    def collect(self, say: EncodeShard, around: CommContext) -> Message:
        """Have the stretches of the buffer said that this exchange sends apart; most send it whole.

        Every entry must be said once, since a stretch that is not has no memory afterwards.
        """
        return Message(*say(0, around.units.total))

    def clipped(self, sent: Decoded, codec: Codec, world: int) -> Decoded:
        """What receivers decode of a message, as this exchange limits it."""
        del codec, world
        return sent

    def simulate(self, sent: Decoded, memory: Memory, codec: Codec, batch: RankBatch) -> Simulated:
        """The exchange of all ranks at once (see `batch`); exchanges without it are run rank by rank."""
        raise NotImplementedError(f"{self} is run rank by rank")

    @abstractmethod
    def talk(self, said: Message, codec: Codec, around: CommContext) -> CommGenerator[Aggregate]:
        """Hold the conversation."""

    @abstractmethod
    def traffic(self, codec: Codec, units: Segments, world: int) -> float:
        """Bytes that one rank sends in a step, for choosing and for plans."""
