"""Gossip messages: what one rank sends to a neighbor, and the small header that identifies it.

Wire:     step      uint32, of the sender
          number    uint32, how many messages the sender had written before
          bytes     uint32, length of the body
          flags     uint32, 1: the sender's parameters are no longer finite
          metadata  float32[k], numbers that ranks compare; k is known to both ends
          body      as the codec packs it
All integers are little-endian. Bodies of unknown length travel after their headers, in an exchange of their own.
"""

import struct
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import torch

from gradwire.core import CommGenerator, CorruptMessageError, Key, Payload, Segments, SendRecv, byte_tensor
from gradwire.topology import Topology

HEADER = struct.Struct("<IIII")
NONFINITE = 1
CPU = torch.device("cpu")


class GossipMessage(NamedTuple):
    """A received message."""

    body: Payload
    metadata: tuple[float, ...]


Received: TypeAlias = dict[int, GossipMessage]  # by sender


class GossipContext(NamedTuple):
    """Context of one round on one rank.

    Attributes:
        key: This rank's random bits for this step; it holds the rank.
        topology: The mixing weights.
        units: What the codec treats as one vector each.
        tensors: The parameters behind the same flat buffer, with their shapes.
        number: How many messages this rank has written before.
        nonfinite: Whether this rank's parameters are not finite, so that its messages must not be used.
        live: With elastic training, the peers that take part in this step, and whether the edge is new to both ends;
            None where all peers always take part.
        device: Where messages lie.
    """

    key: Key
    topology: Topology
    units: Segments
    tensors: Segments
    number: int = 0
    nonfinite: bool = False
    live: Mapping[int, bool] | None = None
    device: torch.device = CPU

    @property
    def rank(self) -> int:
        return self.key.rank

    @property
    def elastic(self) -> bool:
        return self.live is not None

    @property
    def in_weights(self) -> dict[int, float]:
        """The peers that this rank receives from in this step, with the weight it gives them."""
        return self._of_live(self.topology.peers(self.rank, self.key.step))

    @property
    def out_weights(self) -> dict[int, float]:
        """The peers that this rank sends to in this step, with the weight they give it."""
        return self._of_live(self.topology.out_peers(self.rank, self.key.step))

    def _of_live(self, peers: Mapping[int, float]) -> dict[int, float]:
        return {peer: weight for peer, weight in sorted(peers.items()) if self.live is None or peer in self.live}


class Diverged(ArithmeticError):
    """Parameters of some rank are no longer finite."""


def diverged(owner: str, step: int) -> Diverged:
    """The error of a rank's parameters."""
    return Diverged(f"the parameters of {owner} are no longer finite at step {step}; lower the learning rate, or gamma")


def exchange_messages(
    context: GossipContext,
    out: Mapping[int, Payload],
    into: Mapping[int, int | None],
    metadata: tuple[float, ...] = (),
    iteration: int = 0,
) -> CommGenerator[Received]:
    """Send each peer its message, and receive theirs. A peer that was lost meanwhile is absent from the result.

    Args:
        context: Of this round.
        out: Bodies by peer.
        into: Body lengths by peer; None where they vary, which must be so on all edges alike.
        metadata: Numbers for all peers.
        iteration: The number of this exchange within the round.

    Raises:
        CorruptMessageError: A message is not the expected one.
        Diverged: Some rank's parameters are not finite.
    """
    context = context._replace(number=context.number + iteration)
    head_bytes = HEADER.size + 4 * len(metadata)
    heads = {peer: _pack(context, payload, metadata) for peer, payload in out.items()}
    if any(size is None for size in into.values()):
        received = yield from _send_recv(context, heads, dict.fromkeys(into, head_bytes))
        lengths = {peer: _unpack(head)[2] for peer, head in received.items()}
        bodies = yield from _send_recv(context, out, lengths)
    else:
        whole = {peer: Payload(torch.cat((heads[peer].data, payload.data))) for peer, payload in out.items()}
        sizes = {peer: head_bytes + int(size or 0) for peer, size in into.items()}
        both = yield from _send_recv(context, whole, sizes)
        received = {peer: Payload(payload.data[:head_bytes]) for peer, payload in both.items()}
        bodies = {peer: Payload(payload.data[head_bytes:]) for peer, payload in both.items()}
    messages = {peer: _read(received[peer], body, context, peer) for peer, body in bodies.items() if peer in received}
    if context.nonfinite:
        raise diverged("this rank", context.key.step)
    return {peer: message for peer, message in messages.items() if message is not None}


def _send_recv(
    context: GossipContext, out: Mapping[int, Payload], into: Mapping[int, int]
) -> CommGenerator[dict[int, Payload]]:
    """One request. A rank that sends nothing takes part all the same, since others do: with no bytes, to itself."""
    if out:
        received: dict[int, Payload] = yield SendRecv(out, into)
        return received
    empty = Payload(torch.zeros(0, dtype=torch.uint8, device=context.device))
    received = yield SendRecv({context.rank: empty}, {**into, context.rank: 0})
    return {peer: payload for peer, payload in received.items() if peer != context.rank}


def _identity(context: GossipContext) -> tuple[int, int]:
    """Step and number, as headers carry them."""
    return context.key.step & 0xFFFFFFFF, context.number & 0xFFFFFFFF


def _pack(context: GossipContext, body: Payload, metadata: tuple[float, ...]) -> Payload:
    if body.nbytes >= 2**32:
        raise ValueError(
            f"a message of {body.nbytes:,} bytes is too long for its header, which counts to 2^32; use a codec"
        )
    packed = HEADER.pack(*_identity(context), body.nbytes, NONFINITE if context.nonfinite else 0)
    packed += struct.pack(f"<{len(metadata)}f", *metadata)
    return Payload(byte_tensor(packed).to(body.data.device))


def _unpack(head: Payload) -> tuple[int, int, int, int]:
    if head.nbytes < HEADER.size:
        raise CorruptMessageError(f"a message of {head.nbytes} bytes is too short for its header of {HEADER.size}")
    step, number, length, flags = HEADER.unpack(bytes(head.data[: HEADER.size].tolist()))
    return step, number, length, flags


def _read(head: Payload, body: Payload, context: GossipContext, sender: int) -> GossipMessage | None:
    step, number, length, flags = _unpack(head)
    if (step, number) != _identity(context):
        raise CorruptMessageError(
            f"rank {sender} sent message {number} of step {step}, where message {context.number} of step "
            f"{context.key.step} was expected; call the handle once a step on all ranks, and load states of one step"
        )
    if length != body.nbytes:
        raise CorruptMessageError(
            f"rank {sender} announced {length} bytes and sent {body.nbytes}; check that all ranks have the same codec"
        )
    if flags & NONFINITE and context.elastic:
        return None  # continue without it
    if flags & NONFINITE:
        raise diverged(f"rank {sender}", step)
    raw = bytes(head.data[HEADER.size :].tolist())
    return GossipMessage(body, struct.unpack(f"<{len(raw) // 4}f", raw))
