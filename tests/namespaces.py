"""Ranks in network namespaces of their own, joined by a bridge, so that the kernel counts what each of them sends.

Rendezvous goes through a file: no byte on the interfaces is anybody's but gloo's, TCP's and ARP's.
"""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shutil import which
from typing import NamedTuple

import torch.distributed as dist

from spawn import COLLECTIVE_TIMEOUT

FRAME = 66  # bytes of headers that open a frame: Ethernet 14, IPv4 20, TCP 20, and its timestamps 12
SEGMENT = 1448  # bytes of data that fill a frame
CLONE_NEWNET = 0x40000000


class Counters(NamedTuple):
    """What an interface counts, and the TCP segments that its namespace sent again."""

    sent: int
    sent_frames: int
    received: int
    received_frames: int
    resent: int

    @property
    def data(self) -> int:
        """Bytes that TCP took from its users and sent: no headers, no acknowledgements, nothing twice."""
        return self.sent - FRAME * self.sent_frames - SEGMENT * self.resent

    def carried(self, expected: float, rel: float, leeway: float = 0.0) -> bool:
        """Whether TCP may have been given as many bytes, but for a share of them or a leeway, whichever is more.

        Segments are sent again on a busy machine. They may be shorter than a full one, and those between ranks of one
        namespace never reach its interface.
        """
        off = max(rel * expected, leeway)
        return self.data - off <= expected <= self.data + SEGMENT * self.resent + off

    def since(self, before: "Counters") -> "Counters":
        return Counters(*(now - then for now, then in zip(self, before, strict=True)))


class Unavailable(RuntimeError):
    """This machine, or this user, cannot make network namespaces."""


@contextmanager
def namespaces(world: int) -> Iterator[list[str]]:
    """The names of as many namespaces as there are ranks; gone at the end, whatever happens.

    Offloads are limited to one segment, so that the interfaces count the frames a cable would carry.

    Raises:
        Unavailable: They cannot be made here.
    """
    if sys.platform != "linux" or os.geteuid() != 0 or which("ip") is None:
        raise Unavailable("network namespaces need Linux, root and the ip command")
    switch, *names = [f"gradwire-{os.getpid()}-{end}" for end in ("switch", *range(world))]
    with ExitStack() as cleanup:
        try:
            for name in (switch, *names):
                _ip("netns", "add", name)
                cleanup.callback(_ip, "netns", "delete", name)
            _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            _up(switch, "bridge")
            for rank, name in enumerate(names):
                _ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", f"p{rank}", "netns", switch)
                _ip("-n", switch, "link", "set", f"p{rank}", "master", "bridge")
                _ip("-n", name, "link", "set", "eth0", "gso_max_segs", "1")
                _ip("-n", name, "address", "add", f"10.77.0.{rank + 1}/24", "dev", "eth0")
                _up(switch, f"p{rank}")
                _up(name, "eth0")
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as wrong:
            raise Unavailable(f"network namespaces cannot be made here: {wrong}: {wrong.stderr}") from wrong
        yield names


def enter(name: str) -> None:
    """Move this thread, and those that it will start, into a namespace. Gloo sockets that exist stay where they are."""
    with open(f"/run/netns/{name}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {name}")
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"


def meet(store: dist.Store, world: int, place: str) -> None:
    """A barrier that stays off the interfaces."""
    if store.add(place, 1) == world:
        store.set(f"{place}, all", "")
    store.wait([f"{place}, all"], COLLECTIVE_TIMEOUT)


def read() -> Counters:
    """The counters of the namespace that this thread is in."""
    # Not /sys, which shows the namespace it was mounted in.
    counters = Path("/proc/thread-self/net/dev").read_text().split("eth0:")[1].split()
    names, values = [
        line.split() for line in Path("/proc/thread-self/net/snmp").read_text().splitlines() if line.startswith("Tcp:")
    ]
    tcp = dict(zip(names, values, strict=True))
    return Counters(*(int(counters[i]) for i in (8, 9, 0, 1)), int(tcp["RetransSegs"]))


def _up(namespace: str, link: str) -> None:
    _ip("-n", namespace, "link", "set", link, "addrgenmode", "none", "up")  # no IPv6 address, hence no IPv6 chatter


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=10)
