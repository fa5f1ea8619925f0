"""Letter: a gossip message, and the small header that says which one it is.

Wire:     step     uint32, of the sender
          number   uint32, how many messages the sender had written before
          bytes    uint32, length of the body
          flags    uint32, 1: my parameters are no longer finite
          note     float32[k], numbers that ranks compare; k is known to both ends
          body     as the codec packs it
All integers are little-endian. Bodies of unknown length travel behind their headers, in a swap of their own.
"""

import struct
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.core.payload import CorruptMessageError, Payload
from gradwire.core.requests import CommGenerator, SendRecv

HEADER = struct.Struct("<IIII")
BROKEN = 1


class GossipMessage(NamedTuple):
    """What a peer wrote."""

    body: Payload
    note: tuple[float, ...]


class Header(NamedTuple):
    """What a header must say."""

    step: int
    number: int
    broken: bool = False
    tolerant: bool = False  # whether to do without a peer whose parameters are not finite


class Diverged(ArithmeticError):
    """Parameters of some rank are no longer finite."""


def post(
    stamp: Header, out: Mapping[int, Payload], into: Mapping[int, int | None], note: tuple[float, ...] = ()
) -> CommGenerator[dict[int, GossipMessage]]:
    """Hand each peer its letter, and read theirs. A peer that was lost meanwhile is absent from the answer.

    Args:
        stamp: Of this message, equal on all ranks but for ``broken``.
        out: Bodies by peer.
        into: Body lengths by peer; None where they vary, which must be so on all edges alike.
        note: Numbers for all peers.

    Raises:
        CorruptMessageError: A letter is not the one that was due.
        Diverged: Somebody's parameters are not finite.
    """
    head_bytes = HEADER.size + 4 * len(note)
    heads = {peer: _head(stamp, payload, note) for peer, payload in out.items()}
    if any(size is None for size in into.values()):
        heard = yield SendRecv(heads, dict.fromkeys(into, head_bytes))
        lengths = {peer: _length(payload) for peer, payload in heard.items()}
        bodies = yield SendRecv(out, lengths)
    else:
        whole = {peer: Payload(torch.cat((heads[peer].data, payload.data))) for peer, payload in out.items()}
        both = yield SendRecv(whole, {peer: head_bytes + int(size or 0) for peer, size in into.items()})
        heard = {peer: Payload(payload.data[:head_bytes]) for peer, payload in both.items()}
        bodies = {peer: Payload(payload.data[head_bytes:]) for peer, payload in both.items()}
    letters = {peer: _open(heard[peer], body, stamp, peer, len(note)) for peer, body in bodies.items() if peer in heard}
    if stamp.broken:
        raise Diverged(_diverged("this rank", stamp.step))
    return {peer: letter for peer, letter in letters.items() if letter is not None}


def _head(stamp: Header, body: Payload, note: tuple[float, ...]) -> Payload:
    if body.nbytes >= 2**32:
        raise ValueError(
            f"a letter of {body.nbytes:,} bytes is too long for its header, which counts to 2^32; use a codec"
        )
    packed = HEADER.pack(stamp.step & 0xFFFFFFFF, stamp.number & 0xFFFFFFFF, body.nbytes, BROKEN if stamp.broken else 0)
    packed += struct.pack(f"<{len(note)}f", *note)
    return Payload(torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(body.data.device))


def _fields(head: Payload) -> tuple[int, int, int, int]:
    if head.nbytes < HEADER.size:
        raise CorruptMessageError(f"a message of {head.nbytes} bytes is too short for its header of {HEADER.size}")
    step, number, length, flags = HEADER.unpack(bytes(head.data[: HEADER.size].tolist()))
    return step, number, length, flags


def _length(head: Payload) -> int:
    return _fields(head)[2]


def _open(head: Payload, body: Payload, stamp: Header, sender: int, notes: int) -> GossipMessage | None:
    step, number, length, flags = _fields(head)
    if (step, number) != (stamp.step & 0xFFFFFFFF, stamp.number & 0xFFFFFFFF):
        raise CorruptMessageError(
            f"rank {sender} sent message {number} of step {step}, where message {stamp.number} of step {stamp.step} "
            "was due; have all ranks call the net once a step, and load states of the same step"
        )
    if length != body.nbytes:
        raise CorruptMessageError(
            f"rank {sender} announced {length} bytes and sent {body.nbytes}; has it another codec?"
        )
    if flags & BROKEN and stamp.tolerant:
        return None
    if flags & BROKEN:
        raise Diverged(_diverged(f"rank {sender}", step))
    raw: Tensor = head.data[HEADER.size :]
    note = struct.unpack(f"<{notes}f", bytes(raw.tolist()))
    return GossipMessage(body, note)


def _diverged(who: str, step: int) -> str:
    return f"the parameters of {who} are no longer finite at step {step}; lower the learning rate, or gamma"
