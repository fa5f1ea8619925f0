"""Peer mesh: exchanges over TCP between neighbors, which may die, stall and come back.

A process group ends with its first dead member; here each pair of neighbors has a connection of its own, an edge. Both
ends agree on the first step of an edge, so neither waits for a message that is never sent. One end's view of an edge:

    none ---- HELLO, both ways ----> connected    the higher rank dials, again and again while there is no connection
    connected ---- READY ----------> announced    each end sends its next step once, when it has joined
    announced -- OFFER, TAKE ------> agreed       the lower rank offers the first step that neither has passed
    announced -- OFFER, REFUSE ----> announced    the higher rank has passed it meanwhile; the next offer is further
    agreed ---- MESSAGE, WAIT -----> agreed       from the first step on, one message each way and exchange
    any ---- LEAVE ----------------> none         nothing is lost
    any ---- silence, or an end ---> none         the neighbor is lost, if the edge was agreed on
    any ---- PULL, STATE ----------> the same     a rank that comes back takes a neighbor's parameters of a step
    any ---- ASK, ANSWER ----------> the same     a rank that joins, or was cut off, learns a neighbor's step of now

Offers carry a digest of an end's copies of the edge, after a checkpoint was loaded; where both are equal, the edge goes
on as it was. While a rank waits for one neighbor, it sends WAIT to the others; a neighbor that sends nothing for
`timeout` seconds is dropped. Its threads connect again, but offer no step before its caller is active again.

`secure_channel` has the wire format, which refuses connections from outside; `peer_connector` the connections,
`peer_edges` the table of edges and the kinds of frames, `peer_agreement` the answers to frames. This module has what
the caller does.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait

from gradwire.comm.peer_agreement import EdgeAgreement, Snapshot, is_pending
from gradwire.comm.peer_connector import Connector
from gradwire.comm.peer_edges import UNCOUNTED, Edge, EdgeTable, FrameKind
from gradwire.comm.rendezvous import Rendezvous

_LEAVE_SECONDS = 0.3
_TRIES = 5  # to find a peer that lives long enough to be copied
_log = logging.getLogger("gradwire.gossip")


class PeerMesh:
    """One rank's edges. Threads read; everything else happens in the caller's.

    Attributes:
        rank: This rank.
        edges: The connections, their traffic, and the neighbors that were lost.
        timeout: Seconds after which a silent neighbor is dropped. A step waits for twice as long at most, since a
            neighbor that sends WAIT is not silent.
    """

    def __init__(
        self,
        rank: int,
        neighbors: Iterable[int],
        rendezvous: Rendezvous,
        digest: bytes,
        *,
        timeout: float,
        most_bytes: int,
        host: str = "127.0.0.1",
    ) -> None:
        self.rank, self.timeout, self.edges = rank, timeout, EdgeTable(timeout)
        self._neighbors = tuple(neighbors)
        self._agreement = EdgeAgreement(rank, self.edges)
        self._deadline = 0.0  # when the step ends, with those that have answered
        self._writers = ThreadPoolExecutor(2 * len(self._neighbors) + 1, "gradwire-writer")
        self._connector = Connector(self._agreement, self._neighbors, rendezvous, digest, host, most_bytes)

    # -- joining and leaving -------------------------------------------------------------------------------------------

    def discover(self, step: int) -> int | None:
        """Wait for the neighbors, at most `timeout`, and ask them. Returns a peer that is further, if there is one.

        A neighbor that has joined at an earlier step is waited for as well: it may be about to load its state.
        """

        def all_there() -> bool:
            ready = [edge for edge in self.edges.live() if edge.peer_step is None or edge.peer_step >= step]
            return len(ready) == len(self._neighbors) or self.edges.furthest(step) is not None

        with self.edges.changed:
            self._agreement.next_step = step
            self.edges.wait_until(all_there)
            # Neighbors that only this rank connects may be at different steps; the furthest connects in a moment.
            self.edges.changed.wait_for(lambda: len(self.edges.live()) == len(self._neighbors), self.timeout / 10)
        self.edges.ask_steps(step, set(), until_further=False)  # one whose caller computes has announced nothing
        with self.edges.changed:
            return self.edges.furthest(step)

    def catch_up(self, step: int, copy: Callable[[int], bool]) -> int | None:
        """Take over what a peer holds that is further than ``step``. Returns that peer, if there is one.

        Args:
            step: The next one of this rank.
            copy: Takes over what a peer holds. Returns False where it did not live long enough; then another is tried.

        Raises:
            RuntimeError: Peers that are further are there, and none could be copied.
        """
        for _ in range(_TRIES):
            ahead = self.discover(step)
            if ahead is None or copy(ahead):
                return ahead
        tries = f"in {_TRIES} tries of {self.timeout} s; give timeout= more"
        raise RuntimeError(f"rank {self.rank} could not copy what a peer beyond its step {step} holds, {tries}")

    def await_peer(self, peer: int) -> bool:
        """Wait until a neighbor is there, at most `timeout`."""
        with self.edges.changed:
            self.edges.wait_until(lambda: peer in self.edges.by_peer)
            return peer in self.edges.by_peer

    def pull(self, peer: int, at_least: int = 0) -> tuple[int, bytes] | None:
        """A peer's next step and parameters, once it has come to some step; None if it is late, or lost meanwhile.

        One that is silent for `timeout` seconds is dropped. No edge begins before that step.
        """
        with self.edges.changed:
            edge = self.edges.by_peer.get(peer)
            self._agreement.next_step = max(self._agreement.next_step, at_least)
            if edge is not None:
                edge.state = None  # an earlier answer is out of date
        if edge is None or not self.edges.send(edge, FrameKind.PULL, at_least):
            return None
        with self.edges.changed:
            if not self.edges.await_state(edge) and time.monotonic() >= edge.last_seen + self.timeout:
                self.edges.drop(edge)
            return edge.state

    def join(self, step: int, snapshot: Snapshot, digests: Mapping[int, bytes] | None = None) -> None:
        """Exchange messages from ``step`` on, and agree on it with the neighbors that are there.

        Args:
            step: The next step.
            snapshot: This rank's parameters.
            digests: Of this rank's copies of the edge to each neighbor. These neighbors are waited for, there or not.
        """
        with self.edges.changed:
            self._agreement.join(step, snapshot, digests or {})
        self._agreement.send_state(self.edges.snapshot())
        with self._agreement.active(announces=True), self.edges.changed:
            self.edges.wait_until(lambda: self._all_agreed(digests or {}))

    def await_edges(self, peers: Iterable[int], seconds: float) -> dict[int, int]:
        """Wait for edges to some peers, at most so long. Returns the first steps of all that are agreed on, by peer."""
        others = {*peers} - {self.rank}

        def starts() -> dict[int, int]:
            return {edge.peer: edge.start for edge in self.edges.live() if edge.start is not None}

        with self.edges.changed:
            self.edges.changed.wait_for(lambda: others <= starts().keys(), seconds)
            return starts()

    def publish(self, step: int, snapshot: Snapshot) -> None:
        """Let neighbors that come back, or wait, have these parameters; ``step`` is the next one."""
        with self.edges.changed:
            self._agreement.snapshot = step, snapshot
        for edge in self.edges.snapshot():
            if edge.wanted is not None:  # by another thread: one that does not read must not stop this rank
                self._writers.submit(self._agreement.send_state, [edge])

    def leave(self) -> None:
        """Leave all edges that are agreed on, and agree on none until `join` is called again."""
        with self.edges.changed:
            agreed = self._agreement.reset()
        for edge in agreed:
            self.edges.send(edge, FrameKind.LEAVE)
        with self.edges.changed:
            for edge in agreed:
                self.edges.drop(edge)

    def close(self) -> None:
        """Leave for good, after the last message is out."""
        with self.edges.changed:
            self.edges.closed = True
            self._agreement.snapshot = None  # no thread may be the last to hold its tensors
            live = self.edges.live()
            self.edges.changed.notify_all()
        self._writers.shutdown()
        for edge in live:
            if self.edges.send(edge, FrameKind.LEAVE):
                edge.channel.end_sending()
        with self.edges.changed:
            # Closing on unread bytes would reset the connection, and destroy what the other end has not read yet.
            self.edges.changed.wait_for(lambda: not self.edges.live(), _LEAVE_SECONDS)
            for edge in self.edges.live():
                self.edges.drop(edge)
        self._connector.close()

    def yield_to_successor(self) -> None:
        """Leave for good if another process has joined as this rank, which neighbors then connect to.

        Raises:
            RuntimeError: There is such a process.
        """
        successor = self._connector.successor
        if successor is not None:
            self.close()
            raise RuntimeError(
                f"another process has joined as rank {self.rank}, at {successor[0]} port {successor[1]}, so this one "
                "leaves; give each process a rank of its own, and each job a meeting place of its own"
            )

    # -- a step --------------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> dict[int, bool]:
        """The peers that take part in a step, and whether the edge is new in it: a resumed one goes on as it was."""
        with self.edges.changed:
            self._agreement.next_step, self._deadline = step + 1, time.monotonic() + 2 * self.timeout
        with self._agreement.active(announces=True), self.edges.changed:
            # An offer for this step must be answered first: the other end may have taken it.
            self.edges.wait_until(lambda: not any(is_pending(edge, step) for edge in self.edges.live()))
            for edge in [edge for edge in self.edges.live() if is_pending(edge, step)]:
                self.edges.drop(edge)
            joined = sorted(self.edges.taking_part(step), key=lambda edge: edge.peer)
            return {edge.peer: edge.start == step and not edge.resumed for edge in joined}

    def partners(self, step: int) -> list[int]:
        """The peers that took part in the step before: one that has come back meanwhile has not made that."""
        with self.edges.changed:
            return [edge.peer for edge in self.edges.taking_part(step - 1)]

    def exchange(self, step: int, index: int, out: Mapping[int, bytes]) -> dict[int, bytes]:
        """Send each peer its message and wait for theirs. A peer that is lost is absent from the result."""
        last = step - 1 if index >= UNCOUNTED else step  # in which both ends took part
        with self.edges.changed:  # a peer that has connected again since is awaited in a later step, if at all
            edges = {edge.peer: edge for edge in self.edges.taking_part(last) if edge.peer in out}
            self._deadline = time.monotonic() + 2 * self.timeout if index >= UNCOUNTED else self._deadline
        # By other threads: a stalled peer must not keep this one from sending WAIT to the others.
        writes = {
            peer: self._writers.submit(self.edges.send, edge, FrameKind.MESSAGE, step, index, out[peer])
            for peer, edge in edges.items()
        }
        with self._agreement.active():
            self._await_messages(edges.values(), step, index)
            # The peers that answered read; so this rank's own messages are soon out, and counted.
            left = max(0.0, self._deadline - time.monotonic())
            wait([write for peer, write in writes.items() if edges[peer].alive], left)
        with self.edges.changed:
            return {p: e.messages.pop((step, index)) for p, e in edges.items() if (step, index) in e.messages}

    def _await_messages(self, edges: Collection[Edge], step: int, index: int) -> None:
        """Wait for the messages of all peers, and drop those that were silent too long."""
        began = last_sent = checked = time.monotonic()
        while True:
            with self.edges.changed:
                now = time.monotonic()
                if now > checked + self.timeout / 2:  # this process was stopped; what others have sent lies unread
                    began, self._deadline = now, self._deadline + now - checked
                checked = now
                missing = [edge for edge in edges if edge.alive and (step, index) not in edge.messages]
                for edge in missing:
                    if now > min(max(edge.last_seen, began) + self.timeout, self._deadline):
                        self.edges.drop(edge)
                if not any(edge.alive for edge in missing):
                    return
                self.edges.changed.wait(self.timeout / 10)
            if time.monotonic() - last_sent >= self.timeout / 5:
                last_sent = time.monotonic()
                for edge in self.edges.snapshot():
                    if edge.start is not None:  # it may wait in a later step already
                        self._writers.submit(self.edges.send, edge, FrameKind.WAIT, step)

    def drop(self, peer: int, why: str) -> None:
        """Drop a neighbor. It may connect again, and the edge then begins with whole parameters."""
        with self.edges.changed:
            if (edge := self.edges.by_peer.get(peer)) is not None:
                _log.warning("rank %d drops neighbor %d, which %s", self.rank, peer, why)
                self.edges.drop(edge)

    def is_left_behind(self, step: int, slack: int) -> bool:
        """Whether some peer is more than ``slack`` steps ahead, and no edge begins sooner."""
        with self.edges.changed:
            return self.edges.is_left_behind(step + slack)

    def is_cut_off(self, step: int) -> bool:
        """Whether no edge takes part in a step."""
        with self.edges.changed:
            return self.edges.is_cut_off(step)

    def ask(self, step: int, awaited: Iterable[int]) -> bool:
        """Ask all peers for their next steps, at most `timeout`. Returns whether this rank is left behind.

        An awaited peer at the same step agrees on it in a moment, or has passed it; else both would go on alone.

        Args:
            step: Of this rank.
            awaited: Peers that are waited for, there or not, unless another one is further or takes part in the step.
        """
        peers = {*awaited} - {self.rank}
        if not self.edges.ask_steps(step, peers) and self._agreement.joined:
            with self._agreement.active(announces=True), self.edges.changed:
                self.edges.wait_until(lambda: not self.edges.undecided(step, peers))
        return self.is_left_behind(step, slack=0)

    # -- with the edges' lock held -------------------------------------------------------------------------------------

    def _all_agreed(self, awaited: Iterable[int]) -> bool:
        live = {edge.peer: edge.start is not None for edge in self.edges.live()}
        return (bool(live) or not self._neighbors) and all(live.values()) and {*awaited} <= live.keys()
