"""Secure channel: a TCP connection whose ends have both proven the job's secret, and whose frames cannot be forged.

The handshake has fixed lengths and one deadline for all of it. The dialer proves the secret first, so that a stranger
who connects learns nothing.

    listener   MAGIC, nonce [32]
    dialer     nonce [32], HMAC(secret, "dialer" + both nonces) [32]
    listener   HMAC(secret, "listener" + both nonces) [32]

Frames follow:

    size     uint8    of the rest of the header
    kind     uint8
    step     LEB128   plus one
    index    LEB128   which exchange of the step
    length   LEB128   of the body
    body
    tag      [16]     HMAC(key, number + all of the above), its first half

Each direction has a key of its own, HMAC(secret, name + both nonces). Frames are numbered from 0, and the number is not
sent, so a frame that is forged, changed, repeated, left out or out of order has a wrong tag. The hash is SHA-256.

With ``GRADWIRE_TLS_CERT``, ``GRADWIRE_TLS_KEY`` and ``GRADWIRE_TLS_CA`` in the environment all this travels in TLS.
Both ends then need a certificate that the authority has signed; host names are not compared.
"""

import contextlib
import hmac
import math
import os
import secrets
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import TypeVar

MAGIC = b"gradwire"
HANDSHAKE_SECONDS = 5.0  # for all of it
_NONCE = _PROOF = 32
_TAG = 16
LISTENER_BYTES, DIALER_BYTES = len(MAGIC) + _NONCE + _PROOF, _NONCE + _PROOF  # that each end sends in a handshake
T = TypeVar("T")


class SecureChannel:
    """One end. Threads may send while one receives.

    Attributes:
        line: The connection.
        most_bytes: The longest body that is received. A frame that announces more ends the connection.
        seconds: How long the next bytes of a frame may take, once it has begun; all of it may take longer.
        last_read: When the last bytes came.
        amid_frame: Whether a frame is being read, or processed by the thread that reads.
    """

    def __init__(self, line: socket.socket, most_bytes: int, seconds: float) -> None:
        line.setblocking(False)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.line, self.most_bytes, self.seconds = line, most_bytes, seconds
        self.last_read, self.amid_frame = time.monotonic(), False
        self._access, self._sending = threading.Lock(), threading.Lock()  # to the socket; while a frame is sent
        self._waiting, self._closed = 0, False  # threads that wait for the socket
        self._keys: tuple[bytes, bytes] = b"", b""  # for sending, for receiving
        self._sent = self._received = 0  # frames

    def handshake(self, secret: bytes, dials: bool, deadline: float, context: ssl.SSLContext | None = None) -> None:
        """Prove the secret to the other end, and have it proven; inside of TLS, if there is a context.

        Raises:
            OSError: The other end has another secret, speaks another protocol, or is late.
        """
        if context is not None:
            secured = context.wrap_socket(self.line, server_side=not dials, do_handshake_on_connect=False)
            self.line = secured
            self._attempt(secured.do_handshake, select.POLLIN, deadline)
        own = secrets.token_bytes(_NONCE)
        if dials:
            opening = self._read(len(MAGIC) + _NONCE, deadline)
            if not opening.startswith(MAGIC):
                raise ConnectionError("the listener is not of gradwire")
            nonces = opening[len(MAGIC) :] + own
            self._write(own + _hmac(secret, b"dialer", nonces), deadline)
            _check(_hmac(secret, b"listener", nonces), self._read(_PROOF, deadline))
        else:
            self._write(MAGIC + own, deadline)
            answer = self._read(_NONCE + _PROOF, deadline)
            nonces = own + answer[:_NONCE]
            _check(_hmac(secret, b"dialer", nonces), answer[_NONCE:])
            self._write(_hmac(secret, b"listener", nonces), deadline)
        to_listener, to_dialer = (_hmac(secret, name, nonces) for name in (b"to listener", b"to dialer"))
        self._keys = (to_listener, to_dialer) if dials else (to_dialer, to_listener)

    def send(self, kind: int, step: int = 0, index: int = 0, body: bytes = b"") -> None:
        """Write a frame."""
        head = pack_head(kind, step, index, len(body))
        with self._sending:
            tag = _hmac(self._keys[0], self._sent.to_bytes(8, "little"), head, body)[:_TAG]
            self._sent += 1
            for part in (head + body + tag,) if len(body) < 2**16 else (head, body, tag):
                self._write(part, math.inf)

    def receive(self, deadline: float = math.inf) -> tuple[int, int, int, bytes]:
        """The next frame: kind, step, index and body. It must end before the deadline."""
        self.amid_frame = False  # not before: the frame before has been processed
        first = self._read(1, deadline)
        self.amid_frame = True
        head = first + self._read(first[0], deadline, self.seconds)
        kind, step, index, length = _unpack_head(head)
        if length > self.most_bytes:
            raise ConnectionError(f"a frame announces {length} bytes, where {self.most_bytes} are the most")
        body = self._read(length, deadline, self.seconds)
        expected = _hmac(self._keys[1], self._received.to_bytes(8, "little"), head, body)[:_TAG]
        _check(expected, self._read(_TAG, deadline, self.seconds))
        self._received += 1
        return kind, step, index, body

    def end_sending(self) -> None:
        """Let the other end read to the end of what was sent. TLS goes on for what it sends."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.line, socket.SHUT_WR)

    def close(self) -> None:
        """Close it, and wake the threads that wait for it.

        The last of them closes the socket: before that, its number could become another socket's, and they would wait
        for that one.
        """
        with self._access:
            self._closed = True
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self.line, socket.SHUT_RDWR)
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._closed and not self._waiting:
            self.line.close()

    def _read(self, n: int, deadline: float, pause: float = math.inf) -> bytes:
        parts, left = [], n
        while left:
            size, latest = min(left, 2**20), min(deadline, time.monotonic() + pause)
            part = self._attempt(lambda size=size: self.line.recv(size), select.POLLIN, latest)  # type: ignore[misc]
            if not part:
                raise ConnectionError("the connection ended")
            self.last_read = time.monotonic()
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def _write(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            latest = min(deadline, time.monotonic() + self.seconds)
            view = view[self._attempt(lambda view=view: self.line.send(view), select.POLLOUT, latest) :]  # type: ignore[misc]

    def _attempt(self, call: Callable[[], T], events: int, deadline: float) -> T:
        """Call until it no longer has to wait for the connection."""
        wanted: dict[type[OSError], int] = {ssl.SSLWantReadError: select.POLLIN, ssl.SSLWantWriteError: select.POLLOUT}
        while True:
            try:
                with self._access:
                    return call()
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as blocked:
                left = deadline - time.monotonic()
                if left <= 0 or not self._is_ready(wanted.get(type(blocked), events), left):
                    raise TimeoutError("the other end is late") from None

    def _is_ready(self, events: int, seconds: float) -> bool:
        with self._access:
            if self._closed:
                raise ConnectionError("the connection was closed")
            self._waiting += 1
        try:
            poll = select.poll()
            poll.register(self.line, events)
            return bool(poll.poll(None if seconds == math.inf else 1000 * seconds))
        finally:
            with self._access:
                self._waiting -= 1
                self._close_if_unused()


def pack_head(kind: int, step: int, index: int, length: int) -> bytes:
    """A frame's header. The step is -1 or more."""
    head = bytearray([0, kind])
    for number in (step + 1, index, length):
        while number > 127:
            head.append(number & 127 | 128)
            number >>= 7
        head.append(number)
    head[0] = len(head) - 1
    return bytes(head)


def _unpack_head(head: bytes) -> tuple[int, int, int, int]:
    """Kind, step, index and length."""
    numbers, number, shift = [], 0, 0
    for byte in head[2:]:
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            numbers.append(number)
            number = shift = 0
    if len(numbers) != 3:
        raise ConnectionError("a frame has a damaged header")
    step, index, length = numbers
    return head[1], step - 1, index, length


def frame_bytes(step: int, index: int, body: bytes) -> int:
    """The length of a frame."""
    return len(pack_head(0, step, index, len(body))) + len(body) + _TAG


def listen(host: str) -> socket.socket:
    """A listening socket at a port that is free."""
    return socket.create_server((host, 0), backlog=1024)  # a neighbor behind many strangers is not turned away


def accept_all(listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
    """Serve each connection, until the listener is closed by `shut`."""
    while listener.fileno() >= 0:
        try:
            serve(listener.accept()[0])
        except (OSError, RuntimeError):  # it was closed, the connection ended, or descriptors or threads are used up
            if listener.fileno() >= 0:  # or the thread may end with the interpreter, and torch aborts the process then
                time.sleep(0.05)


def shut(line: socket.socket) -> None:
    """Close a socket, and wake the threads that wait for it."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(line, socket.SHUT_RDWR)
    line.close()


def _hmac(key: bytes, *parts: bytes) -> bytes:
    code = hmac.new(key, digestmod="sha256")
    for part in parts:
        code.update(part)
    return code.digest()


def _check(expected: bytes, received: bytes) -> None:
    if not hmac.compare_digest(expected, received):
        raise ConnectionError("the other end has another secret, or the connection was tampered with")


def tls_context(dials: bool) -> ssl.SSLContext | None:
    """From the environment; None where it names no certificate."""
    certificate, authority = os.environ.get("GRADWIRE_TLS_CERT"), os.environ.get("GRADWIRE_TLS_CA")
    if not certificate:
        return None
    if not authority:
        raise ValueError("GRADWIRE_TLS_CERT needs GRADWIRE_TLS_CA: the authority that signed all ranks' certificates")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if dials else ssl.PROTOCOL_TLS_SERVER)
    context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(certificate, os.environ.get("GRADWIRE_TLS_KEY") or None)
    context.load_verify_locations(authority)
    return context
