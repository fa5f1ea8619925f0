"""An Ethernet switch in user space, for kernels that cannot delay frames by themselves.

Every port is a TAP device inside a host's namespace. A frame read from one port waits its delay, then its turn on the
way out of the other: a port sends at its rate, and drops what would wait there too long. Frames from one port to
another never overtake each other, whatever the jitter.

The switch runs as a process of its own, this file started as a script, so that it shares no interpreter with the
training and imports the standard library only. It ends when its standard input does: a dead owner leaves no switch.
"""

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_CLONE_NEWNET = 0x40000000
_BATCH = 64  # frames read from one port before the others get their turn
_LONGEST = 65536  # bytes, more than any frame


@dataclass(frozen=True)
class Port:
    """One host's plug: where its device lives, and what the way to it does to frames."""

    namespace: str
    device: str
    mac: str
    rate_bits: float | None
    queue_seconds: float
    delay_seconds: float
    jitter_seconds: float
    loss: float


def start(ports: list[Port], home: str) -> "subprocess.Popen[str]":
    """Start a switch and wait for its devices; close its standard input to end it.

    Args:
        ports: Its ports; their devices appear, down and without addresses, in the namespaces they name.
        home: The namespace the switch itself stays in.

    Raises:
        OSError: The devices cannot be made; the message holds the switch's last words.
    """
    script = [sys.executable, "-I", "-S", __file__]
    pipe = subprocess.PIPE
    process = subprocess.Popen(script, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        assert process.stdin and process.stdout
        with contextlib.suppress(BrokenPipeError):  # it died, and its last words say why
            process.stdin.write(json.dumps({"home": home, "ports": [asdict(port) for port in ports]}) + "\n")
            process.stdin.flush()
        ready = process.stdout.readline()
    except BaseException:
        stop(process)
        raise
    if not ready:
        raise OSError(f"the switch of the delayed links did not start: {stop(process)}")
    return process


def stop(process: "subprocess.Popen[str]") -> str:
    """End a switch; its last words, if it had any."""
    try:
        return process.communicate(timeout=5)[1].strip().rpartition("\n")[2]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[1].strip().rpartition("\n")[2]


class Switch:
    """The waiting frames, by the time they are due."""

    def __init__(self, ports: list[Port], devices: list[int], seed: int = 0) -> None:
        self.ports = ports
        self.devices = devices
        self.random = random.Random(seed)
        self.table = {bytes.fromhex(port.mac.replace(":", "")): index for index, port in enumerate(ports)}
        self.waiting: list[tuple[float, int, int, bytes, bool]] = []  # due, order, port, frame, had its turn
        self.order = 0
        self.latest = [[0.0] * len(ports) for _ in ports]  # by source and target, when the last frame arrives
        self.idle_at = [0.0] * len(ports)  # when the way out is free

    def take(self, source: int, frame: bytes, now: float) -> None:
        """A frame came in: to the port that owns its address, to all others if none does."""
        target = self.table.get(frame[:6])
        for out in range(len(self.ports)) if target is None else (target,):
            port = self.ports[out]
            if out == source or (port.loss and self.random.random() < port.loss):
                continue
            delay = port.delay_seconds
            if port.jitter_seconds:
                delay += self.random.uniform(-port.jitter_seconds, port.jitter_seconds)
            due = self.latest[source][out] = max(now + delay, self.latest[source][out])
            self._wait(due, out, frame, False)

    def give(self, now: float) -> None:
        """Send every frame that is due; first come, first served at each way out."""
        while self.waiting and self.waiting[0][0] <= now:
            due, _, out, frame, turn = heapq.heappop(self.waiting)
            if not turn:
                due = self._queue(due, out, len(frame))
            if due <= now:
                with contextlib.suppress(OSError):  # a full device drops, a device that is down refuses
                    os.write(self.devices[out], frame)
            elif due < float("inf"):
                self._wait(due, out, frame, True)

    def _queue(self, due: float, out: int, length: int) -> float:
        """When a frame's turn comes, by the rate of the port; never if the queue is full."""
        port = self.ports[out]
        if port.rate_bits is None:
            return due
        turn = max(due, self.idle_at[out])
        if turn - due > port.queue_seconds:
            return float("inf")
        self.idle_at[out] = turn + 8 * length / port.rate_bits
        return turn

    def _wait(self, due: float, out: int, frame: bytes, turn: bool) -> None:
        self.order += 1
        heapq.heappush(self.waiting, (due, self.order, out, frame, turn))

    def serve(self, until: int) -> None:
        """Carry frames until this file descriptor ends."""
        source = {device: index for index, device in enumerate(self.devices)}
        while True:
            pause = max(0.0, self.waiting[0][0] - time.monotonic()) if self.waiting else None
            # select counts in microseconds, epoll's timeout in whole milliseconds
            ready = select.select([*self.devices, until], [], [], pause)[0]
            for device in ready:
                if device == until:
                    return
                self._read(device, source[device])
            self.give(time.monotonic())

    def _read(self, device: int, source: int) -> None:
        with contextlib.suppress(OSError):  # nothing more to read, or the device is down
            for _ in range(_BATCH):
                frame = os.read(device, _LONGEST)
                self.take(source, frame, time.monotonic())


def enter(namespace: str) -> None:
    """Let the sockets and devices that this thread makes from now on be those of a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as place:
        if libc.setns(place.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")


def _open(port: Port) -> int:
    """A TAP device in the namespace of its port: it is made where the process is at that moment."""
    enter(port.namespace)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", port.device.encode(), _IFF_TAP | _IFF_NO_PI))
    return device


def main() -> None:
    wish = json.loads(sys.stdin.readline())
    ports = [Port(**port) for port in wish["ports"]]
    devices = [_open(port) for port in ports]
    enter(wish["home"])
    with contextlib.suppress(OSError):  # a container may not let even root ask for more
        os.nice(-10)  # the busy workers must not hold up the frames between them
    print("ready", flush=True)
    Switch(ports, devices).serve(until=sys.stdin.fileno())


if __name__ == "__main__":
    main()
