"""Strangers at every port that the package opens: none changes, reads, stops, slows or fills a rank.

The ports are those of elastic gossip and of the probes. After each batch of strangers all ranks mix, and their
parameters are what they would be without any stranger.
"""

import os
import random
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gradwire
from faults.campaign import Campaign
from gradwire.comm.liveness import probe, probe_address
from gradwire.comm.rendezvous import FolderRendezvous
from gradwire.comm.secure_channel import DIALER_BYTES, LISTENER_BYTES, MAGIC, SecureChannel

Address = tuple[str, int]
Stranger = Callable[[socket.socket, random.Random], None]
WORLD, TIMEOUT = 3, 20.0


def say(data: bytes) -> Stranger:
    def act(line: socket.socket, draw: random.Random) -> None:
        line.sendall(data)
        line.shutdown(socket.SHUT_WR)

    return act


def hello(length: int) -> bytes:
    return struct.pack("<BqIQ", 1, 0, 0, length) + b"x" * 1000


def send_noise(line: socket.socket, draw: random.Random) -> None:
    line.sendall(draw.randbytes(draw.choice((1, 40, 200, 2**16))))


def stay_idle(line: socket.socket, draw: random.Random) -> None:
    time.sleep(draw.choice((0.0, 0.1, 0.5)))


def send_slowly(line: socket.socket, draw: random.Random) -> None:
    for byte in MAGIC + bytes(5):
        line.sendall(bytes([byte]))
        time.sleep(0.02)


def reset(line: socket.socket, draw: random.Random) -> None:
    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    line.sendall(draw.randbytes(10))


def reflect(line: socket.socket, draw: random.Random) -> None:
    """Send back whatever comes."""
    for _ in range(3):
        if not (data := line.recv(2**12)):
            return
        line.sendall(data)


def guess_proof(line: socket.socket, draw: random.Random) -> None:
    """A handshake of the right form and length, with a proof that is drawn."""
    line.sendall(MAGIC + draw.randbytes(DIALER_BYTES - len(MAGIC)))
    with suppress(TimeoutError):
        line.recv(LISTENER_BYTES)


def use_another_secret(line: socket.socket, draw: random.Random) -> None:
    SecureChannel(line, 100, 2.0).handshake(draw.randbytes(32), True, time.monotonic() + 2.0)


def stop_half_way(line: socket.socket, draw: random.Random) -> None:
    line.sendall((MAGIC + bytes(DIALER_BYTES))[: draw.randrange(1, DIALER_BYTES)])
    line.shutdown(socket.SHUT_WR)


KINDS: dict[str, Stranger] = {
    "a hello of 64 GiB": say(hello(2**36 - 1)),
    "a hello of 2^64 bytes": say(hello(2**64 - 1)),
    "HTTP": say(b"GET / HTTP/1.1\r\nHost: gradwire\r\n\r\n"),
    "TLS": say(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200)),
    "SSH": say(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "zeros": say(bytes(2**18)),
    "ones": say(b"\xff" * 2**18),
    "noise": send_noise,
    "its own magic": say(MAGIC * 20),
    "the end": say(b""),
    "idle": stay_idle,
    "one byte at a time": send_slowly,
    "reset": reset,
    "reflection": reflect,
    "a guessed proof": guess_proof,
    "another secret": use_another_secret,
    "half a handshake": stop_half_way,
}


def connect(where: Address, kind: str, seed: int) -> bool:
    """One connection of a stranger; whether it was accepted at all."""
    try:
        line = socket.create_connection(where, timeout=5.0)
    except OSError:
        return False
    with line, suppress(OSError):  # it may be closed at any moment
        KINDS[kind](line, random.Random(seed))
        line.settimeout(0.05)
        line.recv(1)
    return True


def together(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(60) for future in [pool.submit(call) for call in calls]]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def run(campaign: Campaign, batch: int = 40) -> None:
    """Connections in batches, from several threads; then a round of gossip that must be exact."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        options = {"world": WORLD, "meeting": Path(folder), "timeout": TIMEOUT, "elastic": True}
        models = [nn.Linear(20, 10) for _ in range(WORLD)]
        start = [partial(gradwire.gossip, net, "dpsgd(ring)", rank=i, **options) for i, net in enumerate(models)]
        nets = together(*start)
        try:
            together(*nets)
            probe_address()
            # A rank has a thread to write to each neighbor, and starts the second when it needs it.
            before = descriptors(), threading.active_count() + WORLD
            ports = [FolderRendezvous(Path(folder)).read(rank) for rank in range(WORLD)]
            ports.append(probe_address()[1:])
            while campaign.going():
                visit(campaign, nets, [port for port in ports if port], batch)
            campaign.facts = {"ports": len(ports)} | settled(campaign, before)
        finally:
            for net in nets:
                net.close()


def visit(campaign: Campaign, nets: list[Any], ports: list[Address], batch: int) -> None:
    """A batch of strangers at random ports, while all ranks mix; then a round that is compared."""
    draw = campaign.random
    chosen = [(draw.choice(ports), draw.choice(list(KINDS)), draw.randrange(2**31)) for _ in range(batch)]
    for where, kind, _ in chosen:
        campaign.made(f"{kind}, probes" if where == ports[-1] else kind)
    with ThreadPoolExecutor(8) as pool:
        visits = [pool.submit(connect, *one) for one in chosen]
        together(*nets)
        accepted = [one.result(60) for one in visits]
    campaign.expect(all(accepted), "hang", f"{accepted.count(False)} of {batch} connections were not accepted")
    for rank, net in enumerate(nets):
        net.flat.write_(torch.full_like(net.flat.read(), float(3 * rank)))
    together(*nets)
    mixed = [float(net.flat.read()[0]) for net in nets]
    campaign.expect(all(abs(x - 3.0) < 1e-6 for x in mixed), "wrong result", f"ranks mixed to {mixed}")
    campaign.expect(not any(net.report().dropped for net in nets), "wrong result", "a neighbor was dropped")
    answered = probe({0: probe_address()}, 5.0) == {0: 0}
    campaign.expect(answered, "wrong result", "a living rank does not answer a probe")


def settled(campaign: Campaign, before: tuple[int, int]) -> dict[str, Any]:
    """Descriptors and threads come back to what they were."""
    deadline = time.monotonic() + 15.0
    while time.monotonic() < deadline and (descriptors() > before[0] or threading.active_count() > before[1]):
        time.sleep(0.1)
    after = descriptors(), threading.active_count()
    campaign.expect(after[0] <= before[0] + 2, "orphan", f"{before[0]} descriptors became {after[0]}")
    campaign.expect(after[1] <= before[1] + 2, "orphan", f"{before[1]} threads at most became {after[1]}")
    return {"descriptors": [before[0], after[0]], "threads": [before[1], after[1]]}
