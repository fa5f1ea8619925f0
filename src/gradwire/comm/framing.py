"""Frames between two peers: what each kind means, and the state that one end keeps of a connection."""

import time
from dataclasses import dataclass, field
from enum import IntEnum

from gradwire.comm.secure_channel import SecureChannel

UNCOUNTED = 2**31  # exchanges from this index on are not counted: they are no part of training
MOST_MESSAGES = 64  # that wait to be used; neighbors are at most an exchange apart


class FrameKind(IntEnum):
    """What a frame is. Steps and bodies are the sender's."""

    HELLO = 1  # step: its next one, or -1; body: its rank, and the digest of its training
    READY = 2  # step: its next one, now that it is known
    OFFER = 3  # step: from which the edge may take part; body: the digest of its copies of the edge, if it has any
    TAKE = 4  # step: as offered; body: the same digest, if its own is equal
    REFUSE = 5  # step: its next one, which is beyond the offered one
    MESSAGE = 6  # step, index; body: a payload
    WAIT = 7  # it waits for another peer
    PULL = 8  # it asks for parameters
    STATE = 9  # step: its next one; body: its parameters
    LEAVE = 10  # it leaves; nothing is lost
    ASK = 11  # it asks for the next step
    ANSWER = 12  # step: its next one, or -1 where it has not joined


@dataclass
class Edge:
    """One end of a connection.

    Attributes:
        peer: The rank at the other end.
        channel: The connection.
        alive: Until it is dropped.
        peer_step: The peer's next step, as it last announced it.
        announced: Whether this end has announced its own.
        offered: The step that this end has offered, until it is taken or refused.
        tries: How many offers were made.
        start: The first step in which the edge takes part, once both ends agree.
        resumed: Whether both ends have the same copies of an earlier life of the edge.
        last_seen: When the last frame came.
        messages: Received ones, by step and index, until they are used.
        state: The peer's next step and parameters, after a PULL.
        asked: Whether this end has asked for the peer's next step.
        answer: That step, or -1, once the peer has answered.
        wants_state: Whether the peer waits for this end's parameters, which are not there yet.
    """

    peer: int
    channel: SecureChannel
    alive: bool = True
    peer_step: int | None = None
    announced: bool = False
    offered: int | None = None
    tries: int = 0
    start: int | None = None
    resumed: bool = False
    last_seen: float = field(default_factory=time.monotonic)
    messages: dict[tuple[int, int], bytes] = field(default_factory=dict)
    state: tuple[int, bytes] | None = None
    asked: bool = False
    answer: int | None = None
    wants_state: bool = False
