"""Strangers and damage at the sockets of elastic gossip: none changes, reads, stops or holds a rank."""

import contextlib
import logging
import os
import resource
import select
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import gradwire
from fixtures import free_port
from gradwire.comm import peer_connector, secure_channel
from gradwire.comm.job_secret import job_secret, secret_variable
from gradwire.comm.rendezvous import FolderRendezvous, rendezvous
from gradwire.comm.secure_channel import (
    DIALER_BYTES,
    LISTENER_BYTES,
    MAGIC,
    SecureChannel,
    accept_all,
    frame_bytes,
    pack_head,
    shut,
)
from gradwire_lab.launch import join_group, launch
from gradwire_lab.launcher_env import LauncherRank

HELLO, READY, TAKE, MESSAGE, PULL, STATE, OFFER = 1, 2, 4, 6, 8, 9, 3
SECRET = b"a secret of this job"
PATIENCE = 30.0  # seconds of a busy machine


def together(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(3 * PATIENCE) for future in [pool.submit(call) for call in calls]]


@contextlib.contextmanager
def group(folder: Path, world: int = 2, timeout: float = PATIENCE, **options: Any) -> Iterator[list[Any]]:
    """Elastic ranks on a ring, after one step."""
    place = {"world": world, "meeting": folder, "timeout": timeout, "elastic": True, **options}
    models = [nn.Linear(20, 10) for _ in range(world)]
    calls = [partial(gradwire.gossip, model, "dpsgd(ring)", rank=i, **place) for i, model in enumerate(models)]
    nets = together(*calls)
    together(*nets)
    try:
        yield nets
    finally:
        for net in nets:
            net.close()


def address(folder: Path, rank: int) -> tuple[str, int]:
    found = FolderRendezvous(folder).read(rank)
    assert found is not None
    return found


def weights(net: Any) -> torch.Tensor:
    return net.flat.read()


def frame(kind: int, step: int = 0, index: int = 0, body: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<BqIQ", kind, step, index, len(body) if length is None else length) + body


def read_to_the_end(line: socket.socket) -> None:
    """Until the other end closes the connection, which it must do in time."""
    line.settimeout(PATIENCE)
    try:
        while line.recv(2**16):
            pass
    except TimeoutError:
        pytest.fail("the connection is still open")


def falls_below(limit: int, count: Callable[[], int]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while count() >= limit and time.monotonic() < deadline:
        time.sleep(0.01)
    return count() < limit


def raw_frames(line: socket.socket) -> Iterator[tuple[int, int, int, bytes]]:
    """Frames without tags, as long as they come."""
    line.settimeout(1.0)
    with contextlib.suppress(OSError, struct.error), line.makefile("rb") as file:
        while head := file.read(21):
            kind, step, index, length = struct.unpack("<BqIQ", head)
            yield kind, step, index, file.read(min(length, 2**20))


def impersonate(where: tuple[str, int], rank: int, step: int, size: int) -> list[int]:
    """Pretend to be a rank: take the hello's digest from one dial, then send huge parameters over another.

    Returns:
        The kinds of frames that came back.
    """
    with socket.create_connection(where) as line:
        digest = next((body[4:] for kind, _, _, body in raw_frames(line) if kind == HELLO), b"\0" * 32)
    kinds = []
    with socket.create_connection(where) as line, contextlib.suppress(OSError):
        line.sendall(frame(HELLO, step, body=struct.pack("<I", rank) + digest) + frame(READY, step) + frame(PULL))
        for kind, at, index, body in raw_frames(line):
            kinds.append(kind)
            if kind == OFFER:
                line.sendall(frame(TAKE, at))
            if kind == MESSAGE:
                line.sendall(frame(MESSAGE, at, index, body[:16] + struct.pack(f"<{size}f", *[1e6] * size)))
    return kinds


def test_a_stranger_neither_changes_nor_downloads_a_model(tmp_path: Path) -> None:
    """Without authentication, two dials and six frames moved the weights far away, and PULL was answered."""
    with group(tmp_path) as (first, second):
        second.close()
        first()
        before, size = weights(first), weights(first).numel()
        with ThreadPoolExecutor(1) as pool:
            kinds = pool.submit(impersonate, address(tmp_path, 0), 1, first.step, size)
            for _ in range(20):
                first()
                time.sleep(0.05)
            assert STATE not in kinds.result(PATIENCE) and MESSAGE not in kinds.result()
        assert torch.equal(weights(first), before)
        assert falls_below(1, lambda: 2 - first.mesh._connector.strangers)
        assert first.mesh._connector.strangers == 2 and first.report().dropped == 0


STRANGERS: dict[str, bytes] = {
    "a hello of 64 GiB": frame(HELLO, length=2**36 - 1) + b"x" * 2**16,
    "a hello of 2^64 bytes": frame(HELLO, length=2**64 - 1),
    "HTTP": b"GET / HTTP/1.1\r\nHost: gradwire\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "zeros": bytes(2**20),
    "ones": b"\xff" * 2**20,
    "noise": os.urandom(2**16),
    "its own magic": MAGIC * 20,
    "the end": b"",
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_strangers_are_dropped_without_noise(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hello of 64 GiB was read into memory as far as it came."""
    monkeypatch.setattr(peer_connector, "HANDSHAKE_SECONDS", 2 * PATIENCE)  # it is not dropped for being late
    caplog.set_level(logging.DEBUG, "gradwire.gossip")
    with group(tmp_path) as nets:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with socket.create_connection(address(tmp_path, 0)) as line, contextlib.suppress(OSError):
            line.sendall(STRANGERS[kind])
            line.shutdown(socket.SHUT_WR)
            read_to_the_end(line)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < most + 100_000  # KiB
        together(*nets)
        assert [net.report().dropped for net in nets] == [0, 0]
        assert nets[0].mesh._connector.strangers == 1
    noise = [record for record in caplog.records if "stranger" in record.getMessage()]
    assert [record.levelno for record in noise] == [logging.DEBUG]


def test_one_byte_at_a_time_holds_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline was that of one byte, so a thread could be held for ever."""
    monkeypatch.setattr(peer_connector, "HANDSHAKE_SECONDS", 0.5)
    with group(tmp_path) as nets:
        threads = threading.active_count()
        with socket.create_connection(address(tmp_path, 0)) as line:
            sent = 0
            with contextlib.suppress(OSError):
                while sent < DIALER_BYTES:
                    line.sendall(b"g")
                    sent += 1
                    time.sleep(0.1)
            assert sent < DIALER_BYTES, "the connection was open until the handshake was whole"
        assert falls_below(threads + 1, threading.active_count)
        together(*nets)


def test_a_crowd_of_idle_strangers_leaves_room_for_a_neighbor(tmp_path: Path) -> None:
    with group(tmp_path) as (first, second):
        threads = threading.active_count()
        with contextlib.ExitStack() as crowd:
            for _ in range(200):
                crowd.enter_context(socket.create_connection(address(tmp_path, 0)))
            second.mesh.drop(0, "must dial again")
            deadline = time.monotonic() + PATIENCE
            while not (first.mesh.partners(first.step) and first.step > 1) and time.monotonic() < deadline:
                together(first, second)
            assert first.mesh.partners(first.step) == [1]
            assert falls_below(threads + 80, threading.active_count)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialed = socket.create_connection(server.getsockname())
        return dialed, server.accept()[0]


class LatePoll:
    """`select.poll` of a thread that the machine lets run only after `resume`."""

    def __init__(self, entered: threading.Event, resume: threading.Event) -> None:
        self._poll, self._entered, self._resume = select.poll(), entered, resume

    def register(self, line: socket.socket, events: int) -> None:
        self._poll.register(line, events)

    def poll(self, milliseconds: float | None) -> list[tuple[int, int]]:
        self._entered.set()
        self._resume.wait()
        return self._poll.poll(milliseconds)


def test_a_thread_that_reads_ends_with_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of the closed socket became that of the next one, which the thread then waited for without end."""
    entered, resume = threading.Event(), threading.Event()
    fake = SimpleNamespace(poll=lambda: LatePoll(entered, resume), POLLIN=select.POLLIN, POLLOUT=select.POLLOUT)
    monkeypatch.setattr(secure_channel, "select", fake)
    line, other = tcp_pair()
    with contextlib.ExitStack() as opened, other:
        channel = SecureChannel(line, 100, 1.0)
        with ThreadPoolExecutor(1) as pool:
            frame_read = pool.submit(channel.receive)
            entered.wait()
            channel.close()
            for _ in range(20):
                for end in socket.socketpair():
                    opened.enter_context(end)
            resume.set()
            with pytest.raises(OSError):
                frame_read.result(PATIENCE)
        assert line.fileno() < 0


def test_a_damaged_frame_ends_its_edge_and_not_the_rank(tmp_path: Path) -> None:
    """A neighbor's bytes change on their way. A payload of a wrong length raised `CorruptMessageError` in the rank."""
    with group(tmp_path) as (first, second):
        channel = second.mesh.edges.by_peer[0].channel
        send = channel._write
        channel._write = lambda data, deadline: send(data[:-20] + bytes([data[-20] ^ 1]) + data[-19:], deadline)
        together(first, second)
        assert first.mesh.edges.lost == [1] and first.step == 2
        assert _rejoins(first, second)


def test_a_neighbor_that_sends_nonsense_is_dropped_and_the_rank_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tag is right, so the neighbor itself is broken. The others' messages are used: 0 and 2 mix as a pair."""
    with group(tmp_path, world=3) as nets:
        edges = nets[1].mesh.edges
        send = edges.send
        monkeypatch.setattr(
            edges, "send", lambda edge, kind, step=0, index=0, body=b"": send(edge, kind, step, index, body[:-4])
        )
        for rank, net in enumerate(nets):
            net.flat.write_(torch.full_like(weights(net), float(rank)))
        together(*nets)
        assert [net.step for net in nets] == [2, 2, 2]
        assert nets[0].mesh.edges.lost == nets[2].mesh.edges.lost == [1]
        assert float(weights(nets[0])[0]) == pytest.approx(2 / 3) and float(weights(nets[2])[0]) == pytest.approx(4 / 3)


def test_parameters_and_models_of_a_wrong_length_are_refused(tmp_path: Path) -> None:
    with group(tmp_path) as (first, second):
        first.mesh.publish(1, lambda: b"123")
        assert not second._membership._copy(0) and second.mesh.edges.lost == [0]
        assert _rejoins(first, second)
        assert second._unpack(0, b"12345", torch.zeros(1)) == {} and second.mesh.edges.lost == [0, 0]
        assert second._unpack(0, struct.pack("<If", 7, 1.0), torch.zeros(1)) == {}, "there is no rank 7"


def _rejoins(first: Any, second: Any) -> bool:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        together(first, second)
        if first.mesh.partners(first.step) and second.mesh.partners(second.step):
            return True
    return False


# -- the channel itself ------------------------------------------------------------------------------------------------


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        line = socket.create_connection(listener.getsockname())
        return line, listener.accept()[0]


def channels(secrets: tuple[bytes, bytes] = (SECRET, SECRET), most_bytes: int = 100) -> list[SecureChannel]:
    """A dialer's and a listener's, after the handshake."""
    ends = [SecureChannel(line, most_bytes, seconds=PATIENCE) for line in connected()]
    together(*(partial(handshake, end, secret, end is ends[0]) for end, secret in zip(ends, secrets, strict=True)))
    return ends


def handshake(end: SecureChannel, secret: bytes, dials: bool) -> None:
    try:
        end.handshake(secret, dials, time.monotonic() + PATIENCE)
    except OSError:
        end.close()
        raise


class Recorder:
    """Passes bytes on between a dialer and a listener, and keeps them."""

    def __init__(self) -> None:
        self.dialer, self.to_dialer = connected()
        self.to_listener, self.listener = connected()
        self.bytes = {self.to_dialer: bytearray(), self.to_listener: bytearray()}

    def run(self) -> None:
        pairs = ((self.to_dialer, self.to_listener), (self.to_listener, self.to_dialer))
        self._threads = [threading.Thread(target=self._forward, args=pair, daemon=True) for pair in pairs]
        for thread in self._threads:
            thread.start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(2**16):
                self.bytes[source] += part
                target.sendall(part)

    def close(self) -> None:
        """A thread that still waited for a closed socket could read from the next one with its number."""
        lines = (self.dialer, self.to_dialer, self.to_listener, self.listener)
        for line in lines:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE)
        for line in lines:
            line.close()


def recorded(*bodies: bytes) -> tuple[Recorder, SecureChannel, bytes]:
    """A connection over which a dialer has sent frames that were received; and these, as they crossed it."""
    recorder = Recorder()
    recorder.run()
    dialer, listener = (SecureChannel(line, 100, seconds=PATIENCE) for line in (recorder.dialer, recorder.listener))
    deadline = time.monotonic() + PATIENCE
    together(partial(dialer.handshake, SECRET, True, deadline), partial(listener.handshake, SECRET, False, deadline))
    for body in bodies:
        dialer.send(MESSAGE, body=body)
        assert listener.receive()[3] == body
    return recorder, listener, bytes(recorder.bytes[recorder.to_dialer])[DIALER_BYTES:]


def test_frames_arrive_in_both_directions_and_too_long_ones_do_not() -> None:
    dialer, listener = channels()
    dialer.send(MESSAGE, -1, 7, b"there")
    listener.send(MESSAGE, 2**62, 2**32 - 1, b"back")
    assert listener.receive() == (MESSAGE, -1, 7, b"there") and dialer.receive() == (MESSAGE, 2**62, 2**32 - 1, b"back")
    dialer.send(MESSAGE, body=bytes(101))
    with pytest.raises(ConnectionError, match="101"):
        listener.receive()
    for end in (dialer, listener):
        end.close()


@pytest.mark.parametrize("head", [b"\0", b"\x01\x06", b"\x04" + b"\xff" * 4, b"\xff" * 256, b"\x05\6\0\0\0\0"])
def test_a_header_that_cannot_be_read_is_refused(head: bytes) -> None:
    dialer, listener = channels()
    dialer.line.send(head)
    with pytest.raises(ConnectionError, match="header"):
        listener.receive()
    for end in (dialer, listener):
        end.close()


@pytest.mark.parametrize("secrets", [(SECRET, b"another"), (b"another", SECRET)], ids=["listener", "dialer"])
def test_a_wrong_secret_is_refused(secrets: tuple[bytes, bytes]) -> None:
    with pytest.raises(OSError):
        channels(secrets)


def test_a_replayed_frame_is_refused() -> None:
    recorder, listener, crossed = recorded(b"one", b"two")
    recorder.to_listener.sendall(crossed[len(crossed) // 2 :])
    with pytest.raises(ConnectionError, match="tampered"):
        listener.receive()
    recorder.close()


def test_frames_of_another_connection_and_of_the_other_direction_are_refused() -> None:
    first, _, crossed = recorded(b"one")
    second, listener, _ = recorded()
    second.to_listener.sendall(crossed)
    with pytest.raises(ConnectionError, match="tampered"):
        listener.receive()
    third, listener, _ = recorded()
    listener.send(MESSAGE, body=b"one")
    while len(back := bytes(third.bytes[third.to_listener])[LISTENER_BYTES:]) < frame_bytes(0, 0, b"one"):
        time.sleep(0.01)
    third.to_listener.sendall(back)
    with pytest.raises(ConnectionError, match="tampered"):
        listener.receive()
    for each in (first, second, third):
        each.close()


@pytest.mark.parametrize("at", [0, 1, 2, 4, 5, 7, 8, -1])
def test_a_changed_byte_of_a_frame_is_refused(at: int) -> None:
    recorder = Recorder()
    dialer, listener = (SecureChannel(line, 100, seconds=0.5) for line in (recorder.dialer, recorder.listener))
    recorder.run()
    deadline = time.monotonic() + PATIENCE
    together(partial(dialer.handshake, SECRET, True, deadline), partial(listener.handshake, SECRET, False, deadline))
    write = dialer._write

    def damage(data: bytes, deadline: float) -> None:
        changed = bytearray(data)
        changed[at] ^= 1
        write(bytes(changed), deadline)

    dialer._write = damage  # type: ignore[method-assign]
    dialer.send(MESSAGE, body=b"abc")
    with pytest.raises(OSError):
        listener.receive()
    recorder.close()


def test_a_replayed_and_a_reflected_handshake_are_refused() -> None:
    recorder, _, _ = recorded()
    crossed = bytes(recorder.bytes[recorder.to_dialer])[:DIALER_BYTES]
    own, theirs = connected()
    own.sendall(crossed)
    listener = SecureChannel(theirs, 100, seconds=PATIENCE)
    with pytest.raises(ConnectionError, match="another secret"):
        listener.handshake(SECRET, False, time.monotonic() + PATIENCE)
    for each in (own, listener, recorder):
        each.close()
    mirror, line = connected()
    dialer = SecureChannel(line, 100, seconds=PATIENCE)

    def reflect() -> None:
        nonce = bytes(32)
        mirror.sendall(MAGIC + nonce)
        answer = mirror.recv(64)
        mirror.sendall(answer[32:])

    with pytest.raises(ConnectionError, match="another secret"):
        together(reflect, partial(dialer.handshake, SECRET, True, time.monotonic() + PATIENCE))
    for end in (mirror, dialer):
        end.close()


def test_a_frame_that_never_ends_is_late() -> None:
    dialer, listener = channels()
    listener.seconds = 0.2
    dialer.line.send(pack_head(MESSAGE, 0, 0, 50))
    with pytest.raises(TimeoutError):
        listener.receive()
    for end in (dialer, listener):
        end.close()


def test_large_frames_cross_in_both_directions_at_once() -> None:
    ends = channels(most_bytes=2**24)
    body = os.urandom(2**23)

    def both(end: SecureChannel) -> bytes:
        sender = threading.Thread(target=end.send, args=(MESSAGE, 0, 0, body))
        sender.start()
        received = end.receive()[3]
        sender.join(PATIENCE)
        return received

    assert together(*(partial(both, end) for end in ends)) == [body, body]
    for end in ends:
        end.close()


def test_a_listener_outlives_connections_that_fail() -> None:
    served: list[socket.socket] = []

    def serve(line: socket.socket) -> None:
        served.append(line)
        line.close()
        raise OSError

    listener = secure_channel.listen("127.0.0.1")
    thread = threading.Thread(target=accept_all, args=(listener, serve))
    thread.start()
    for _ in range(3):
        socket.create_connection(listener.getsockname()).close()
    deadline = time.monotonic() + PATIENCE
    while len(served) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    shut(listener)
    thread.join(PATIENCE)
    assert len(served) == 3 and not thread.is_alive()


class ShutMeanwhile:
    """A listener that is shut while a thread waits for connections."""

    number = 3

    def fileno(self) -> int:
        return self.number

    def accept(self) -> None:
        self.number = -1
        raise OSError("it was shut")


def test_the_thread_of_a_listener_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It slept once more, and aborted an interpreter that ended meanwhile where it was the last to hold tensors."""
    monkeypatch.setattr(secure_channel, "time", SimpleNamespace(sleep=lambda seconds: pytest.fail("it sleeps")))
    listener: Any = ShutMeanwhile()
    accept_all(listener, socket.socket.close)
    assert listener.fileno() < 0


# -- TLS ---------------------------------------------------------------------------------------------------------------


def certificates(folder: Path) -> dict[str, str]:
    key, certificate = str(folder / "key.pem"), str(folder / "certificate.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", key, "-out", certificate, "-days", "2", "-subj", "/CN=gradwire"]
    subprocess.run(command, check=True, capture_output=True)
    return {"GRADWIRE_TLS_CERT": certificate, "GRADWIRE_TLS_KEY": key, "GRADWIRE_TLS_CA": certificate}


@pytest.mark.skipif(not Path("/usr/bin/openssl").exists(), reason="makes certificates by openssl")
def test_ranks_with_certificates_train_in_tls_and_others_are_strangers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in certificates(tmp_path).items():
        monkeypatch.setenv(name, value)
    with group(tmp_path) as (first, second):
        for net, value in ((first, 0.0), (second, 1.0)):
            net.flat.write_(torch.full_like(weights(net), value))
        together(first, second)
        assert float(weights(first)[0]) == pytest.approx(0.5)
        assert first.mesh.edges.by_peer[1].channel.line.version() == "TLSv1.3"
        with socket.create_connection(address(tmp_path, 0)) as line:
            channel = SecureChannel(line, 100, 1.0)
            with pytest.raises(OSError):
                channel.handshake(b"any", True, time.monotonic() + 1.0)
        together(first, second)
    monkeypatch.delenv("GRADWIRE_TLS_CA")
    with pytest.raises(ValueError, match="GRADWIRE_TLS_CA"), group(tmp_path):
        pass


# -- where the secret comes from ---------------------------------------------------------------------------------------


def test_without_a_secret_only_loopback_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADWIRE_SECRET", raising=False)
    table = rendezvous(tmp_path / "meeting")
    with pytest.raises(ValueError, match="GRADWIRE_SECRET_FILE"):
        job_secret(table, "0.0.0.0")
    with pytest.raises(ValueError, match="GRADWIRE_SECRET"):
        options = {"rank": 0, "world": 2, "meeting": tmp_path / "meeting", "host": "0.0.0.0"}
        gradwire.gossip(nn.Linear(2, 2), "dpsgd(ring)", elastic=True, **options)
    first = job_secret(table, "127.0.0.1")
    assert len(first) == 64 and job_secret(rendezvous(tmp_path / "meeting"), "localhost") == first
    assert (tmp_path / "meeting" / "secret").stat().st_mode & 0o077 == 0
    monkeypatch.setenv("GRADWIRE_SECRET_FILE", str(tmp_path / "file"))
    (tmp_path / "file").write_text("from the file of the job\n")
    assert job_secret(table, "0.0.0.0") == b"from the file of the job"
    assert secret_variable() == {"GRADWIRE_SECRET": "from the file of the job"}
    monkeypatch.setenv("GRADWIRE_SECRET", "from the environment")
    assert job_secret(table, "0.0.0.0") == b"from the environment"
    for short in ("short", "  short  "):
        monkeypatch.setenv("GRADWIRE_SECRET", short)
        with pytest.raises(ValueError, match="5 characters"):
            job_secret(table, "127.0.0.1")


def test_a_rank_with_another_secret_is_a_stranger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peer_connector, "_WARN_AFTER", 2)  # handshakes, which take long on a busy machine
    with group(tmp_path) as (first, second):
        second.close()
        monkeypatch.setenv("GRADWIRE_SECRET", "the secret of another job")
        place = {"rank": 1, "world": 2, "meeting": tmp_path, "timeout": 2.0}
        with pytest.raises(RuntimeError, match="rank 1"):
            gradwire.gossip(nn.Linear(20, 10), "dpsgd(ring)", elastic=True, **place)
        assert first.mesh._connector.strangers > 0 and not first.mesh.edges.by_peer
        first()
    assert any("rank 0" in text and "GRADWIRE_SECRET" in text for text in caplog.messages)


def secret_of_rank(rank: int, world: int) -> str:
    return os.environ["GRADWIRE_SECRET"]


def test_launchers_hand_one_random_secret_to_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADWIRE_SECRET", raising=False)
    runs = [launch(secret_of_rank, 2, backend="", limit_seconds=60) for _ in range(2)]
    assert all(a == b and len(a) == 64 for a, b in runs) and runs[0] != runs[1]
    monkeypatch.setenv("GRADWIRE_SECRET", "chosen by the user")
    assert launch(secret_of_rank, 2, backend="", limit_seconds=60) == ["chosen by the user"] * 2


def test_the_store_of_rank_0_listens_at_its_own_address_alone() -> None:
    """torch's own listener answered at every address of the host."""
    port = free_port()
    rank = LauncherRank(rank=0, world=1, local_rank=0, local_world=1, address="127.0.0.1", port=port)
    with join_group(rank, "gloo"):
        socket.create_connection(("127.0.0.1", port), timeout=3.0).close()
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.2", port), timeout=3.0)
