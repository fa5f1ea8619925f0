"""Connector: opens connections to neighbors, with retries while there is none, and accepts theirs."""

import contextlib
import logging
import socket
import struct
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from gradwire.comm.collectives import Traffic
from gradwire.comm.job_secret import job_secret
from gradwire.comm.peer_agreement import EdgeAgreement
from gradwire.comm.peer_edges import BROKEN_CONNECTION, Edge, FrameKind
from gradwire.comm.rendezvous import Address, Rendezvous
from gradwire.comm.secure_channel import (
    DIALER_BYTES,
    HANDSHAKE_SECONDS,
    LISTENER_BYTES,
    SecureChannel,
    accept_all,
    frame_bytes,
    listen,
    shut,
    tls_context,
)

_REDIAL_SECONDS = 0.05
_WATCH_SECONDS = 0.5
_END_SECONDS = 1.0  # for threads; one that dials a host out of reach takes longer
_MOST_HANDSHAKES = 64  # at a time, so that connections from outside hold no more threads than that
_WARN_AFTER = 20  # handshakes; a peer that is about to end may break off some
_log = logging.getLogger("gradwire.gossip")


class Connector:
    """Threads that accept and dial, and one thread for each edge, which reads until the connection ends.

    Attributes:
        strangers: How many connections were dropped because their other end did not prove the job's secret.
        successor: Where another process listens that has joined as this rank; None where there is none.
    """

    successor: Address | None = None

    def __init__(
        self,
        agreement: EdgeAgreement,
        neighbors: Iterable[int],
        rendezvous: Rendezvous,
        digest: bytes,
        host: str,
        most_bytes: int,
    ) -> None:
        self._rank, self._edges, self._agreement = agreement.rank, agreement.edges, agreement
        self._neighbors, self._rendezvous, self._most_bytes = tuple(neighbors), rendezvous, most_bytes
        self._hello = struct.pack("<I", self._rank) + digest
        self._secret = job_secret(rendezvous, host)
        self._tls = {dials: tls_context(dials) for dials in (False, True)}
        self._refused: set[int] = set()  # peers of another training, which are logged once
        self._unproven: Counter[int] = Counter()  # how often a peer that was dialed did not prove the secret
        self._handshakes: dict[SecureChannel, None] = {}  # of accepted connections, the oldest first
        self.strangers = 0
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._listener = listen(host)
        self._address = (host, self._listener.getsockname()[1])
        rendezvous.write(self._rank, self._address)
        self._start(accept_all, self._listener, self._accept)
        self._start(self._watch)
        for peer in self._neighbors:
            if peer < self._rank:  # the higher rank of an edge dials
                self._start(self._dial, peer)

    def close(self) -> None:
        """Stop to accept, and wait for the threads to end. The edges are closed already.

        A thread that frees a tensor while the interpreter ends aborts the process.
        """
        shut(self._listener)
        with self._edges.changed:
            for channel in self._handshakes:
                channel.close()
            threads = list(self._threads)
        deadline = time.monotonic() + _END_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start(self, work: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=work, args=args, name=f"gradwire-{work.__name__}", daemon=True)
        thread.start()
        with self._edges.changed:
            self._threads.add(thread)

    def _channel(self, line: socket.socket) -> SecureChannel:
        return SecureChannel(line, len(self._hello), 2 * self._edges.timeout)

    def _accept(self, line: socket.socket) -> None:
        """Of too many handshakes, the oldest is closed: that of a neighbor takes little time."""
        channel = self._channel(line)
        with self._edges.changed:
            self._handshakes[channel] = None
            if self._edges.closed:
                return channel.close()
            if len(self._handshakes) > _MOST_HANDSHAKES:
                oldest = next(iter(self._handshakes))
                del self._handshakes[oldest]
                oldest.close()
        self._start(self._serve, channel, None)

    def _watch(self) -> None:
        """Look whether another process has joined as this rank. In a thread, since the table may be out of reach."""
        edges = self._edges
        while not edges.closed and not self._has_successor():
            with edges.changed:
                edges.changed.wait_for(lambda: edges.closed, _WATCH_SECONDS)

    def _has_successor(self) -> bool:
        last = self._rendezvous.read(self._rank)
        if last not in (None, self._address):
            self.successor = last
        return self.successor is not None

    def _dial(self, peer: int) -> None:
        """Connect to a peer whose address is known, again and again while there is no connection.

        Beside a successor, which has perhaps taken the connection, it would take that back.
        """
        edges = self._edges
        while not edges.closed:
            address = self._rendezvous.read(peer) if peer not in edges.by_peer else None
            with contextlib.suppress(OSError):
                if address is not None and not self._has_successor():
                    self._serve(self._channel(socket.create_connection(address, timeout=HANDSHAKE_SECONDS)), peer)
            with edges.changed:
                edges.changed.wait_for(lambda: edges.closed, _REDIAL_SECONDS)

    def _serve(self, channel: SecureChannel, dialed: int | None) -> None:
        """Authenticate, exchange hellos, then read until the end. Runs in the edge's own thread."""
        try:
            edge, same_training = self._greet(channel, dialed is not None)
        except BROKEN_CONNECTION as error:
            self._drop_stranger(dialed, error)
            channel.close()
            return
        finally:
            with self._edges.changed:
                self._handshakes.pop(channel, None)
        if not same_training or edge.peer not in self._neighbors or dialed not in (None, edge.peer):
            if edge.peer in self._neighbors and not same_training:
                self._refuse(edge.peer)
            channel.close()
            return
        self._edges.add(edge)
        if self._agreement.is_active():
            self._agreement.announce([edge])
        self._edges.read(edge, self._agreement.handle)

    def _greet(self, channel: SecureChannel, dials: bool) -> tuple[Edge, bool]:
        """Authenticate and exchange hellos. Returns the edge, and whether its peer has the same training."""
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        channel.handshake(self._secret, dials, deadline, self._tls[dials])
        next_step = self._agreement.next_step if self._agreement.is_active() else -1
        channel.send(FrameKind.HELLO, next_step, body=self._hello)
        kind, step, _, body = channel.receive(deadline)
        if kind != FrameKind.HELLO:
            raise ConnectionError("the first frame is no HELLO")
        (peer,) = struct.unpack_from("<I", body)
        sent, received = (DIALER_BYTES, LISTENER_BYTES) if dials else (LISTENER_BYTES, DIALER_BYTES)
        sent += frame_bytes(next_step, 0, self._hello)
        self._edges.count(Traffic(sent, received + frame_bytes(step, 0, body), 0))
        channel.most_bytes = self._most_bytes
        return Edge(peer, channel, peer_step=step if step >= 0 else None), body[4:] == self._hello[4:]

    def _drop_stranger(self, dialed: int | None, error: Exception) -> None:
        """Log connections from outside at debug level, and warn of a neighbor's address that proves no secret."""
        with self._edges.changed:
            self.strangers += 1
            if dialed is not None:
                self._unproven[dialed] += 1
        _log.debug("rank %d dropped a stranger, %d so far: %s", self._rank, self.strangers, error)
        if dialed is not None and self._unproven[dialed] == _WARN_AFTER:
            _log.warning(
                "what listens at the address of rank %d does not prove the job's secret to rank %d; give all ranks the "
                "same GRADWIRE_SECRET",
                *(dialed, self._rank),
            )

    def _refuse(self, peer: int) -> None:
        """A peer of another training is an error for a rank that is about to join; a joined rank ignores it."""
        message = (
            f"rank {peer} trains something else than rank {self._rank}; start both with the same model, method, codec "
            "and seed"
        )
        with self._edges.changed:
            if not self._agreement.joined_before:
                self._edges.error = message
                self._edges.changed.notify_all()
            elif peer not in self._refused:
                self._refused.add(peer)
                _log.warning("%s. This rank continues without it.", message)
