"""Agreement on the first step of an edge, so that neither end waits for a message that is never sent."""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from gradwire.comm.peer_edges import MOST_MESSAGES, Edge, EdgeTable, FrameKind

Snapshot = Callable[[], bytes]


class EdgeAgreement:
    """One rank's part in the protocol that `peer_mesh` draws. Reader threads call `handle`.

    Attributes:
        edges: The connections.
        next_step: The step in which this rank exchanges messages next.
        joined: Whether that is known, so that edges may be agreed on.
        joined_before: Whether it ever was.
        snapshot: This rank's next step and parameters, for peers that ask.
    """

    def __init__(self, rank: int, edges: EdgeTable) -> None:
        self.rank, self.edges = rank, edges
        self.next_step = 0
        self.joined = self.joined_before = False
        self.snapshot: tuple[int, Snapshot] | None = None
        self._digests: tuple[int, Mapping[int, bytes]] = (-1, {})  # of this rank's copies, and the step that they fit
        self._active = 0.0  # when the caller was last in here; infinite while it is

    def join(self, step: int, snapshot: Snapshot, digests: Mapping[int, bytes]) -> None:
        """Exchange messages from ``step`` on. With the edges' lock held."""
        self.next_step, self.snapshot = step, (step, snapshot)
        self.joined = self.joined_before = True
        self._digests = step, digests

    def is_active(self) -> bool:
        """Whether the caller is active, so that it will do what its threads agree to.

        Else peers would wait for a rank that hangs, in one step after the other.
        """
        return self.joined and time.monotonic() < self._active + self.edges.timeout / 2

    @contextlib.contextmanager
    def active(self, announces: bool = False) -> Iterator[None]:
        """The caller is in here, and announces it on all edges. Edges that are added now are announced by threads."""
        self._active = math.inf
        try:
            if announces:
                self.announce(self.edges.snapshot())
            yield
        finally:
            self._active = time.monotonic()

    def announce(self, edges: Iterable[Edge]) -> None:
        """Send this rank's next step, once for each edge, and offer a first step."""
        for edge in edges:
            if not edge.announced:
                edge.announced = True
                self.edges.send(edge, FrameKind.READY, self.next_step)
            self._offer(edge)

    def _offer(self, edge: Edge) -> None:
        """The lower rank offers the first step that neither has passed, a little further after each refusal."""
        with self.edges.changed:
            possible = self.is_active() and edge.peer_step is not None and edge.alive and edge.start is None
            if not possible or self.rank > edge.peer or edge.offered is not None:
                return
            assert edge.peer_step is not None
            step = edge.offered = max(self.next_step, edge.peer_step) + (2**edge.tries - 1)
            edge.tries = min(edge.tries + 1, 6)
            own, digest = self.next_step, self._digest(edge, step)
        self.edges.send(edge, FrameKind.OFFER, step, own, digest)

    def _digest(self, edge: Edge, step: int) -> bytes:
        """Of this rank's copies of an edge, if it goes on with the step that they fit."""
        return self._digests[1].get(edge.peer, b"") if self._digests[0] == step else b""

    def send_state(self, edges: Iterable[Edge]) -> None:
        """Send this rank's parameters to the peers that wait for them, if it has come to the step that they want."""
        for edge in edges:
            with self.edges.changed:
                step, snapshot = self.snapshot or (-1, bytes)
                wanted = edge.wanted is not None and edge.wanted <= step
                edge.wanted = None if wanted else edge.wanted
            if wanted:
                self.edges.send(edge, FrameKind.STATE, step, 0, snapshot())

    def handle(self, edge: Edge, kind: int, step: int, index: int, body: bytes) -> None:
        """Process a frame, and answer it."""
        with self.edges.changed:
            _record(edge, kind, step, index, body)
            taken = kind == FrameKind.OFFER and self.joined and step >= self.next_step
            if taken:
                edge.start, edge.resumed = step, bool(body) and body == self._digest(edge, step)
            self.edges.changed.notify_all()
        if kind in (FrameKind.READY, FrameKind.REFUSE) and step >= 0:  # one that has not joined will announce its step
            self._offer(edge)
        elif taken:
            self.edges.send(edge, FrameKind.TAKE, step, body=body if edge.resumed else b"")
        elif kind == FrameKind.OFFER:
            self._refuse(edge)
        elif kind == FrameKind.PULL:
            self.send_state([edge])
        elif kind == FrameKind.ASK:  # answered while the caller computes, too: nothing is agreed on
            self.edges.send(edge, FrameKind.ANSWER, self.next_step if self.joined else -1)

    def _refuse(self, edge: Edge) -> None:
        """Answer an offer with this rank's next step, or -1; who reads that waits for an announcement."""
        step = self.next_step if self.joined else -1
        self.edges.send(edge, FrameKind.REFUSE, step)
        if step < 0 and self.joined:  # it has joined meanwhile, and perhaps announced it before this refusal
            self.edges.send(edge, FrameKind.READY, self.next_step)

    def reset(self) -> list[Edge]:
        """Agree to nothing until `join` is called again. Returns the edges that were agreed on. With the lock held."""
        self.joined = False
        agreed = [edge for edge in self.edges.live() if edge.start is not None or edge.offered is not None]
        for edge in self.edges.live():
            edge.announced, edge.start, edge.tries, edge.answer = False, None, 0, None
        return agreed


def is_pending(edge: Edge, step: int) -> bool:
    """Whether an offer for this step or an earlier one is not answered yet."""
    return edge.offered is not None and edge.offered <= step


def _record(edge: Edge, kind: int, step: int, index: int, body: bytes) -> None:
    if kind == FrameKind.MESSAGE:
        if len(edge.messages) >= MOST_MESSAGES:
            raise ConnectionError(f"rank {edge.peer} sent {MOST_MESSAGES} messages ahead; close the connection")
        edge.messages[step, index] = body
    elif kind == FrameKind.LEAVE:
        edge.start = None
    elif kind == FrameKind.STATE:
        edge.state = step, body
    elif kind == FrameKind.PULL:
        edge.wanted = step
    elif kind == FrameKind.ANSWER:
        edge.answer = step
    elif kind == FrameKind.READY:
        edge.peer_step = edge.answer = step
    elif kind == FrameKind.OFFER:
        edge.peer_step = index
    elif kind == FrameKind.REFUSE and step < 0:  # it has passed no step, so the next offer need not be further
        edge.offered, edge.tries = None, 0
    elif kind == FrameKind.REFUSE:
        edge.peer_step, edge.offered = step, None
    elif kind == FrameKind.TAKE and edge.offered == step:
        edge.start, edge.offered, edge.resumed = step, None, bool(body)
