"""Exchange: how workers agree on one mean.

An exchange yields requests and never sees the network. `encode` is local; `run` is the protocol.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradwire.codecs import Codec, Decoded, EncodeInput, Entries, Memory, StateSpec
from gradwire.codecs.addends import clip_for_sum
from gradwire.codecs.encoding import Encoded
from gradwire.core import CommGenerator, Key, Named, Payload, Segments
from gradwire.core.layout import Flat, Scattered
from gradwire.core.renamed import renamed_attributes
from gradwire.exchanges.batch import Simulate
from gradwire.exchanges.servers import server_slice


class ProductOutput(NamedTuple):
    """Where the mean times a vector may be written, too."""

    factor: Tensor
    out: Flat


class CommContext(NamedTuple):
    """The context of one exchange.

    Attributes:
        key: The random bits of this rank and step.
        world: Number of ranks.
        units: What the codec treats as one vector each.
        tensors: The parameters behind the same flat buffer, with their shapes.
        keeps_error: Whether the lane keeps what is lost, so that a second leg should too.
        needs_decoded: Whether the feedback uses what receivers will decode.
        allow_sparse_result: Whether a mean with few entries may be returned as those.
        out: Memory that a mean may be written to, after the first request: that of the gradient, if it lies end to
            end, or of the memory that keeps the mean.
        scattered: The same, where gradients lie in several places; a codec that takes those, and what it decodes to,
            need no vector of their own.
        simulated: Whether the buffer holds all ranks, one after the other, and no message is written (see `batch`).
        product: What else may be made of a mean that is written to ``out``.
        server_error: Memory that the new memory `SERVER_ERROR` may be written to; it may be that of the old one.
        update: Where the update may be written, after the first request: to where the gradient lies.
    """

    key: Key
    world: int
    units: Segments
    tensors: Segments
    keeps_error: bool
    needs_decoded: bool = True
    allow_sparse_result: bool = False
    out: Tensor | None = None
    simulated: bool = False
    product: ProductOutput | None = None
    server_error: Tensor | None = None
    update: Flat | None = None
    scattered: Scattered | None = None


class Message(NamedTuple):
    """What a rank sends first: payloads by rank, one payload, or a vector that is compressed in the protocol.

    ``content`` is None in a simulation. ``sent`` is None where it is not needed, or known only after the protocol.
    """

    content: Mapping[int, Payload] | Payload | Tensor | None
    sent: Decoded | None
    memory: Memory

    @classmethod
    def of(cls, encoded: Encoded, memory: Memory, context: CommContext, needs_decoded: bool = False) -> "Message":
        """The message of an encoded stretch; in a simulation, what receivers would decode of it."""
        if context.simulated:
            return cls(None, encoded.sent, memory)
        return cls(encoded.payload, encoded.sent if needs_decoded else None, memory)


class Aggregate(NamedTuple):
    """The group's mean, as a vector, where gradients lie, or as its entries; and the memory after the protocol.

    Attributes:
        mean: Of all ranks.
        memory: With what the exchange itself remembers.
        sent: What others decode of this rank's message, where only the protocol knows it.
        product: The mean times the factor of ``context.product``, where it was written there.
    """

    mean: Tensor | Entries | Scattered
    memory: Memory
    sent: Decoded | None = None
    product: Flat | None = None


_RENAMED = {  # the old names of one release
    "cuts": "sends_slices",
    "suits": "auto_may_choose",
    "serves": "keeps_server_error",
    "encode_shards": "encode_slices",
    "slots": "state_specs",
}
EncodeSlice: TypeAlias = Callable[[int, int], Message]  # encodes the stretch [start, stop)


@renamed_attributes(_RENAMED)
class Exchange(Named):
    """A frozen protocol."""

    exact: ClassVar[bool] = False  # with fp32 the outcome is the mean, to rounding
    compresses_in_protocol: ClassVar[bool] = False  # after its first request; uses no codec
    local_only: ClassVar[bool] = False  # requests nothing from the group
    # Whether `run` knows `context.scattered`, and a `context.product` in several places. Subclasses do not inherit it.
    takes_scattered: ClassVar[bool] = False
    sends_slices: bool = False  # encodes slices of the buffer apart, one for each rank
    subtracts_sent: ClassVar[bool] = False  # takes what is sent off the message, which is the memory "residual" itself
    delays: ClassVar[bool] = False  # hands back the mean of the step before
    keeps_server_error: bool = False  # keeps the memory `SERVER_ERROR` where the lane keeps errors
    adds_payloads: bool = False  # payloads are added as they are, so that values are limited
    # Optional capabilities: an exchange that has one defines a method of that name.
    auto_may_choose: Callable[[Codec], bool] | None = None  # it, for this codec; without this, `auto` never does
    check: Callable[[Codec], None] | None = None  # raises ValueError for a codec that this exchange cannot carry
    state_specs: Callable[[CommContext], dict[str, StateSpec]] | None = None  # memories of the exchange's own
    simulate: Simulate | None = None  # the exchange of all ranks at once (see `batch`); else they run one by one

    def encode(self, signal: EncodeInput, codec: Codec, context: CommContext) -> Message:
        """Encode ``signal.target``."""
        if self.compresses_in_protocol:
            return Message(signal.target, None, signal.memory)

        def encode_slice(start: int, stop: int) -> Message:
            encoded = codec.encode(signal.cut(start, stop), context.key)
            encoded = clip_for_sum(encoded, context.world) if self.adds_payloads else encoded
            return Message.of(encoded, encoded.memory, context, context.needs_decoded)

        return self.encode_slices(encode_slice, context)

    def encode_slices(self, encode: EncodeSlice, context: CommContext) -> Message:
        """Encode the buffer whole, or, where this exchange sends slices, one by one."""
        n, world = context.units.total, context.world
        if not self.sends_slices or context.simulated:  # then the table of units is cut
            return encode(0, n)
        cuts = [server_slice(n, world, rank) for rank in range(world)]
        parts = [encode(*cut) for cut in cuts]
        payloads = {rank: part.content for rank, part in enumerate(parts) if isinstance(part.content, Payload)}
        sent = _join([part.sent for part in parts], [start for start, _ in cuts])
        return Message(payloads, sent, parts[-1].memory)

    @abstractmethod
    def run(self, message: Message, codec: Codec, context: CommContext) -> CommGenerator[Aggregate]:
        """Agree on the mean with the group."""

    @abstractmethod
    def traffic(self, codec: Codec, units: Segments, world: int) -> float:
        """Bytes that one rank sends in a step, for choosing and for plans."""


def _join(parts: Sequence[Decoded | None], starts: Sequence[int]) -> Decoded | None:
    """The parts of a buffer as one."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    indices = [part.indices + start for part, start in zip(known, starts, strict=True) if part.indices is not None]
    return Decoded(torch.cat(indices) if indices else None, torch.cat([part.values for part in known]))
