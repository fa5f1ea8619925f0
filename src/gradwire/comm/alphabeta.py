"""Alpha and beta: how long a collective takes on a link, by the algorithm that gloo really runs.

A message of n bytes arrives alpha + n beta after it was sent, and a rank's messages share its link. Gloo moves

    all-reduce   around a ring, 2 (N-1) hops of n/N bytes, each hop in pieces of at most 1 MiB, two or more of them
    all-gather   around the same ring, N-1 hops of n bytes in two pieces
    all-to-all   straight to each peer (a gossip swap is one with few peers); by our own link, in turns
    broadcast    down a binomial tree

A receiver announces that it is ready before a message leaves, so each costs alpha twice. Around a ring, a rank sends
the announcement for the next hop during the current one, which hides more of the second alpha, the longer a hop takes.
With c the bytes of a hop, the h hops of a ring take

    h (c beta + alpha + max(0, alpha - c beta / 4))

Between two ranks nothing is hidden: the announcement takes the same connection, behind the hop's own bytes.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

from gradwire.comm.rates import LinkSpec

Kind: TypeAlias = Literal["all_reduce", "all_gather", "all_to_all", "broadcast", "swap"]

HEADERS = 66  # bytes of Ethernet, IPv4 and TCP with timestamps around a packet's data
MTU = 1500
ACKNOWLEDGED = 0.35  # packets of nothing but an acknowledgment for each that arrives, measured
MESSAGE_BYTES = 380  # around each message: announcements both ways, gloo's header, their own packets; measured
_SEGMENT = MTU + 14 - HEADERS
_PIECE_BYTES = 2**20  # gloo's largest message within a ring
_SINGLE_BYTES = 16  # one piece, for which the receiver has waited long before it arrives
_HIDES = 0.25  # of a hop's time, which hides the announcement for the next hop

# How much longer TCP takes than an ideal link of that rate, measured among 2 and 4 hosts at 100 mbit: streams that meet
# at a port drain unevenly, and who finishes early leaves its share of the link idle. What queues and sockets hold does
# not meet.
_RING, _MEETING, _TREE = 1.07, 0.25, 1.4
_BUFFERED = 2**20  # bytes, of which half of that loss is felt


@dataclass(frozen=True)
class AlphaBeta:
    """What a link costs.

    Attributes:
        alpha: Seconds from one rank to another, however short the message.
        beta: Seconds that a byte of a tensor occupies the link, headers included.
        duplex: Whether a rank sends at full rate while it receives.
    """

    alpha: float = 0.0
    beta: float = 0.0
    duplex: bool = True

    @staticmethod
    def of(link: LinkSpec, message_seconds: float = 0.0, duplex: bool = True) -> "AlphaBeta":
        """The costs of a link, whose ranks need ``message_seconds`` of software for each message."""
        beta = 0.0 if link.rate_bits is None else 8 * framed(1.0) / link.rate_bits
        return AlphaBeta(link.delay_seconds + message_seconds, beta, duplex)

    def carry(self, sent: float, received: float) -> float:
        """Seconds for which bytes occupy a rank's link."""
        return self.beta * (max(sent, received) if self.duplex else sent + received)


def framed(sent: float, received: float | None = None, messages: float = 0.0) -> float:
    """Bytes that a rank puts on the wire, for bytes of tensors that it sends and receives in so many messages."""
    answers = ACKNOWLEDGED * (sent if received is None else received)
    return sent + HEADERS * (sent + answers) / _SEGMENT + MESSAGE_BYTES * messages


class Cost(NamedTuple):
    """How a collective spends its time.

    Attributes:
        busy: Seconds in which a rank's link carries it, and nothing else.
        wait: Seconds beyond that, in which others may use the link.
    """

    busy: float
    wait: float


def seconds(kind: Kind, nbytes: float, world: int, link: AlphaBeta | LinkSpec) -> float:
    """How long a collective takes from the moment at which all ranks have called it.

    Args:
        kind: Which collective.
        nbytes: Of the tensor that is reduced or broadcast; of what each rank shows to all; of what a rank hands to all
            peers together, itself excluded.
        world: How many ranks take part.
        link: What every rank's link costs.
    """
    costs = AlphaBeta.of(link) if isinstance(link, LinkSpec) else link
    if world < 2:
        return 0.0
    if kind == "all_reduce":
        return ring(2 * (world - 1), nbytes / world, costs, world > 2)
    if kind == "all_gather":
        return ring(world - 1, nbytes, costs, world > 2, pieces=2)
    if kind == "broadcast":
        return math.ceil(math.log2(world)) * (costs.alpha + _TREE * nbytes * costs.beta)
    return scatter(nbytes, nbytes, costs, world - 1)


def ring(hops: int, chunk: float, costs: AlphaBeta, hides: bool, pieces: int | None = None) -> float:
    """Hops of ``chunk`` bytes around a ring, which hide announcements if these take another connection."""
    travel = _RING * costs.carry(chunk, chunk)
    if pieces is None and chunk <= _SINGLE_BYTES:
        return hops * travel + (hops + 2) * costs.alpha
    return hops * (travel + costs.alpha + max(0.0, costs.alpha - (_HIDES * travel if hides else 0.0)))


def ring_pieces(chunk: float) -> int:
    """In how many messages a hop of an all-reduce travels."""
    return max(2, math.ceil(chunk / _PIECE_BYTES))


def scatter(sent: float, received: float, costs: AlphaBeta, peers: int = 1) -> float:
    """Messages straight to so many peers. One that the receiver does not wait for yet is announced first."""
    most = max(sent, received)
    meeting = 1 + _MEETING * most / (most + _BUFFERED) if peers > 1 else 1.0
    return 2 * costs.alpha + meeting * costs.carry(sent, received)


def cost(kind: Kind, nbytes: float, world: int, link: AlphaBeta | LinkSpec) -> Cost:
    """`seconds`, divided into those that occupy a rank's link and those that do not."""
    costs = AlphaBeta.of(link) if isinstance(link, LinkSpec) else link
    busy = seconds(kind, nbytes, world, replace(costs, alpha=0.0))
    return Cost(busy, seconds(kind, nbytes, world, costs) - busy)
