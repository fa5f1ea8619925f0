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
from typing import NamedTuple

import torch

from gradwire.core.payload import CorruptMessageError, Payload
from gradwire.core.requests import CommGenerator, SendRecv

HEADER = struct.Struct("<IIII")
NONFINITE = 1


class GossipMessage(NamedTuple):
    """A received message."""

    body: Payload
    metadata: tuple[float, ...]


class Header(NamedTuple):
    """The headers of one exchange, and how it is held.

    Attributes:
        rank: Of the sender.
        device: Where messages lie.
        step: Of the sender.
        number: How many messages the sender has written before.
        nonfinite: Whether the sender's parameters are not finite, so that its message must not be used.
        skip_nonfinite: Whether to go on without a peer whose parameters are not finite.
    """

    rank: int
    device: torch.device
    step: int
    number: int
    nonfinite: bool = False
    skip_nonfinite: bool = False


class Diverged(ArithmeticError):
    """Parameters of some rank are no longer finite."""


def exchange_messages(
    header: Header, out: Mapping[int, Payload], into: Mapping[int, int | None], metadata: tuple[float, ...] = ()
) -> CommGenerator[dict[int, GossipMessage]]:
    """Send each peer its message, and receive theirs. A peer that was lost meanwhile is absent from the result.

    Args:
        header: Of this exchange, equal on all ranks but for ``rank``, ``device`` and ``nonfinite``.
        out: Bodies by peer.
        into: Body lengths by peer; None where they vary, which must be so on all edges alike.
        metadata: Numbers for all peers.

    Raises:
        CorruptMessageError: A message is not the expected one.
        Diverged: Some rank's parameters are not finite.
    """
    head_bytes = HEADER.size + 4 * len(metadata)
    heads = {peer: _pack(header, payload, metadata) for peer, payload in out.items()}
    if any(size is None for size in into.values()):
        received = yield from _send_recv(header, heads, dict.fromkeys(into, head_bytes))
        lengths = {peer: _unpack(head)[2] for peer, head in received.items()}
        bodies = yield from _send_recv(header, out, lengths)
    else:
        whole = {peer: Payload(torch.cat((heads[peer].data, payload.data))) for peer, payload in out.items()}
        sizes = {peer: head_bytes + int(size or 0) for peer, size in into.items()}
        both = yield from _send_recv(header, whole, sizes)
        received = {peer: Payload(payload.data[:head_bytes]) for peer, payload in both.items()}
        bodies = {peer: Payload(payload.data[head_bytes:]) for peer, payload in both.items()}
    messages = {peer: _read(received[peer], body, header, peer) for peer, body in bodies.items() if peer in received}
    if header.nonfinite:
        raise Diverged(_diverged("this rank", header.step))
    return {peer: message for peer, message in messages.items() if message is not None}


def _send_recv(
    header: Header, out: Mapping[int, Payload], into: Mapping[int, int]
) -> CommGenerator[dict[int, Payload]]:
    """One request. A rank that sends nothing takes part all the same, since others do: with no bytes, to itself."""
    if out:
        received: dict[int, Payload] = yield SendRecv(out, into)
        return received
    empty = Payload(torch.zeros(0, dtype=torch.uint8, device=header.device))
    received = yield SendRecv({header.rank: empty}, {**into, header.rank: 0})
    return {peer: payload for peer, payload in received.items() if peer != header.rank}


def _pack(header: Header, body: Payload, metadata: tuple[float, ...]) -> Payload:
    if body.nbytes >= 2**32:
        raise ValueError(
            f"a message of {body.nbytes:,} bytes is too long for its header, which counts to 2^32; use a codec"
        )
    flags = NONFINITE if header.nonfinite else 0
    packed = HEADER.pack(header.step & 0xFFFFFFFF, header.number & 0xFFFFFFFF, body.nbytes, flags)
    packed += struct.pack(f"<{len(metadata)}f", *metadata)
    return Payload(torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(body.data.device))


def _unpack(head: Payload) -> tuple[int, int, int, int]:
    if head.nbytes < HEADER.size:
        raise CorruptMessageError(f"a message of {head.nbytes} bytes is too short for its header of {HEADER.size}")
    step, number, length, flags = HEADER.unpack(bytes(head.data[: HEADER.size].tolist()))
    return step, number, length, flags


def _read(head: Payload, body: Payload, header: Header, sender: int) -> GossipMessage | None:
    step, number, length, flags = _unpack(head)
    if (step, number) != (header.step & 0xFFFFFFFF, header.number & 0xFFFFFFFF):
        raise CorruptMessageError(
            f"rank {sender} sent message {number} of step {step}, where message {header.number} of step {header.step} "
            "was expected; have all ranks call the handle once a step, and load states of the same step"
        )
    if length != body.nbytes:
        raise CorruptMessageError(
            f"rank {sender} announced {length} bytes and sent {body.nbytes}; check that all ranks have the same codec"
        )
    if flags & NONFINITE and header.skip_nonfinite:
        return None
    if flags & NONFINITE:
        raise Diverged(_diverged(f"rank {sender}", step))
    raw = bytes(head.data[HEADER.size :].tolist())
    return GossipMessage(body, struct.unpack(f"<{len(raw) // 4}f", raw))


def _diverged(owner: str, step: int) -> str:
    return f"the parameters of {owner} are no longer finite at step {step}; lower the learning rate, or gamma"
