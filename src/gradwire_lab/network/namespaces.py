"""Network namespaces by name, and whose they are.

A name holds the process that made it and the moment that process started, so that leftovers of a dead owner can be
distinguished from the namespaces of a living one, even after its process id has been given to another.

A watchdog, which is a shell that outlives its owner by a moment, takes down the namespaces that are left: SIGKILL
leaves an owner no time to clean up, and what its children have started does not die with them. The watchdog reads a
pipe that only the owner holds: a line means that all is well, its end without one that the owner is dead.
"""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

PLACE = Path("/run/netns")  # where `ip netns` keeps its names

_OURS = re.compile(r"gw(\d+)t(\d+)s\d+(?:h\d+|hub)")
SBIN = "/usr/sbin:/sbin"  # root's tools, not on every user's path
_NEEDED = {12: "CAP_NET_ADMIN", 21: "CAP_SYS_ADMIN"}  # by the kernel's numbers
_KILL_SECONDS = 5.0  # with those that do not die at once
_serial = itertools.count(1)

# Twice, since what is about to be killed may be starting something.
_WATCH = """
read -r word && exit
for again in 1 2; do for name; do ip netns pids "$name" | xargs -r kill -9; done; done
for name; do ip netns delete "$name"; done
"""
Watchdog = subprocess.Popen[bytes]


class HostsUnavailableError(RuntimeError):
    """The machine does not give what hosts need; the message says what and why."""


def need() -> None:
    """Refuse at once where namespaces cannot be made."""
    if missing := lacking():
        raise HostsUnavailableError(missing)


def lacking() -> str:
    """A sentence saying why hosts cannot be made here; empty when they can."""
    if not Path("/proc/self/ns/net").exists():
        return "hosts need the network namespaces of a Linux kernel, which this system does not have"
    absent = [tool for tool in ("ip", "tc") if _find(tool) is None]
    if absent:
        return f"hosts need iproute2, but {' and '.join(absent)} is missing; install the package iproute2"
    if os.geteuid() != 0:
        return "hosts need root, to make network namespaces; run the command with sudo"
    denied = [name for bit, name in _NEEDED.items() if not _capabilities() >> bit & 1]
    if denied:
        return f"hosts need {' and '.join(denied)}, which root lacks here; start the container with --privileged"
    return ""


def _capabilities() -> int:
    """What this process may do, a bit for each capability."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1], 16) if found else -1


def ip(*words: str) -> str:
    return _call("ip", *words)


def tc(namespace: str, *words: str) -> str:
    """In a namespace; in this process's own, if the name is empty."""
    return _call("tc", *(("-n", namespace) if namespace else ()), *words)


def listed(*words: str) -> list[dict[str, Any]]:
    """What an ``ip`` command shows, as data."""
    found = json.loads(ip("-j", *words) or "[]")
    assert isinstance(found, list)
    return found


def family() -> str:
    """The common beginning of the names of one set of hosts, new at each call."""
    pid = os.getpid()
    return f"gw{pid}t{_started(pid)}s{next(_serial)}"


def refuse_taken(name: str) -> None:
    if exists(name):
        raise HostsUnavailableError(
            f"the network namespace {name} is in use; remove it with `ip netns del {name}` if it is stale"
        )


def create(name: str) -> None:
    ip("netns", "add", name)
    ip("-n", name, "link", "set", "lo", "up")


def exists(name: str) -> bool:
    return (PLACE / name).exists()


def inside(name: str, argv: Sequence[str]) -> list[str]:
    """The command that runs a command in a namespace."""
    return [_find("ip") or "ip", "netns", "exec", name, *argv]


def remove(names: list[str]) -> None:
    """End what runs inside, then delete; a name that is already gone is no error."""
    deadline = time.monotonic() + _KILL_SECONDS
    while (pids := residents(names)) and time.monotonic() < deadline:  # again: some may have started others meanwhile
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    stuck = []
    for name in names:
        try:
            ip("netns", "del", name)
        except HostsUnavailableError as wrong:
            stuck += [str(wrong)] if exists(name) else []
    if stuck:
        raise HostsUnavailableError("; ".join(stuck))


def residents(names: list[str]) -> list[int]:
    """Processes whose network is one of these namespaces."""
    inside = {_identity(PLACE / name) for name in names} - {None}
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [pid for pid in pids if _identity(Path(f"/proc/{pid}/ns/net")) in inside and pid != os.getpid()]


def stale() -> list[str]:
    """Namespaces made here by a process that is no more."""
    if not PLACE.is_dir():
        return []
    found = ((name, _OURS.fullmatch(name)) for name in sorted(os.listdir(PLACE)))
    return [name for name, mark in found if mark and _started(int(mark[1])) != int(mark[2])]


def sweep() -> list[str]:
    """Remove the leftovers of dead owners, and say which."""
    need()
    names = stale()
    if names:
        remove(names)
    return names


def start_watchdog(names: Sequence[str]) -> Watchdog:
    """Have namespaces watched over, in a session that no Ctrl-C reaches."""
    return subprocess.Popen(
        ["sh", "-c", _WATCH, "watchdog", *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PATH": f"{os.environ.get('PATH', '')}:{SBIN}"},
        start_new_session=True,
    )


def stop_watchdog(watchdog: Watchdog) -> None:
    """All is taken down already."""
    with suppress(BrokenPipeError):
        watchdog.communicate(b"well\n")


def _started(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when it runs no more."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else int(fields[18])


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return found.st_dev, found.st_ino


def _find(tool: str) -> str | None:
    return shutil.which(tool, path=f"{os.environ.get('PATH', '')}:{SBIN}")


def _call(tool: str, *words: str) -> str:
    done = subprocess.run([_find(tool) or tool, *words], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise HostsUnavailableError(f"`{tool} {' '.join(words)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
