"""Agreement barrier: all ranks come to an agreement, such as on a new spec or a loaded state, or none does.

A rank that agrees while another takes a step calls other collectives than that one, and gloo ends the process. So
agreements begin at the group's store, where each rank notes that it has come, and waits for the others. A thread looks
once a second whether a collective of this process has waited for long. If it waits for a rank that has come to an
agreement instead, the thread notes the error in the store. The rank that waits there raises it, and closes its
connections, which ends the collectives of the others; they find the error in the store, and raise it too.
"""

import atexit
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_process_group_store

from gradwire.comm.liveness import ProbeAddresses, diagnose, probe

STALL_SECONDS = 1.0  # how long a collective waits before the store is looked at
_PAUSE_SECONDS = 0.001, 0.05  # between two looks: at first, and at most
_STORE_SECONDS = 3.0  # until a store that has not answered is taken to be out of reach
_DEFAULT_TIMEOUT = timedelta(minutes=30)


class CollectiveProgress:
    """How many collectives of one process group this rank has begun, and since when it waits in the last of them."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group, self.begun, self.since = group, 0, 0.0
        self.members = dist.get_process_group_ranks(group)
        self._error = ""
        _all_progress.add(self)

    def close(self, error: str) -> None:
        """Close the connections of the group. Its collectives raise an error from now on."""
        group, self.group, self._error = self.group, None, error
        if group is not None:
            dist.destroy_process_group(group)

    def __enter__(self) -> None:
        if self._error:
            raise RuntimeError(self._error)
        self.begun += 1
        self.since = time.monotonic()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.since = 0.0

    @property
    def stalled(self) -> bool:
        """Whether a collective has waited for long."""
        since = self.since  # another thread may end the collective meanwhile
        return since > 0.0 and time.monotonic() - since > STALL_SECONDS


_all_progress: "weakref.WeakSet[CollectiveProgress]" = weakref.WeakSet()


@atexit.register
def _release_destroyed() -> None:
    """Drop groups that torch has destroyed, which ends their threads.

    A thread of gloo that still holds a tensor when the interpreter ends would abort the process.
    """
    if not dist.is_initialized():
        for progress in _all_progress:
            progress.group = None


class AgreementBarrier:
    """Where the ranks of one group meet before they agree on something.

    Args:
        progress: Of the group that agrees. Groups of some of its ranks can be added.
        addresses: Where its members listen for probes.
        timeout: How long to wait for the others.
    """

    def __init__(self, progress: CollectiveProgress, addresses: ProbeAddresses, timeout: timedelta | None) -> None:
        self._groups, self._addresses = [progress], addresses
        self._seconds = (timeout or _DEFAULT_TIMEOUT).total_seconds()
        self._members, self._me = progress.members, dist.get_rank()
        assert progress.group is not None
        self._store = PrefixStore("gradwire-agreements", _get_process_group_store(progress.group))
        self._count = 0  # of agreements that all ranks have come to
        self._lock = threading.Lock()  # of the count, for the thread
        _barriers.add(self)
        _watch(os.getpid())

    def add(self, progress: CollectiveProgress) -> None:
        """Watch a group of some of the members as well."""
        self._groups.append(progress)

    def enter(self, call: str) -> None:
        """Wait until all ranks have come.

        Args:
            call: What the user called, for the others' error.

        Raises:
            RuntimeError: A rank takes a step instead, or has not come in time.
            PeerLostError: A rank has ended.
        """
        note = {"call": call, "begun": [one.begun for one in self._groups]}  # groups are added in the same order
        self._store.set(self._key(self._me), json.dumps(note))
        self._store.set(self._key("any"), "")
        deadline, pause, next_probe = time.monotonic() + self._seconds, _PAUSE_SECONDS[0], time.monotonic() + 2.0
        while missing := self._missing():
            if self._store.check([self._key("error")]):
                self.check()
            if time.monotonic() > deadline:
                self._note(f"{_named(missing)} did not call {call} in {self._seconds:.0f} s")
            if time.monotonic() > next_probe:
                self._probe(missing, call)
                next_probe = time.monotonic() + 2.0
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE_SECONDS[1])
        with self._lock:
            self._count += 1
        self._forget(self._count - 2)

    def check(self) -> None:
        """Raise the error that some rank has noted. No collective of the group can be called afterwards."""
        found: list[str] = []
        # The store may be out of reach, and does not say so for minutes.
        look = threading.Thread(target=self._read_error, args=(found,), daemon=True)
        look.start()
        look.join(_STORE_SECONDS)
        if found:
            for one in self._groups:
                one.close(found[0])
            raise RuntimeError(found[0])

    def explain(self, error: RuntimeError) -> RuntimeError:
        """The error to raise instead of one that a collective of any group has raised; see `diagnose`."""
        self.check()
        return diagnose(error, self._me, self._addresses)

    def _read_error(self, into: list[str]) -> None:
        with suppress(RuntimeError):  # the store has ended with its host
            if self._store.check([self._key("error")]):
                into.append(self._store.get(self._key("error")).decode())

    def note_stalled(self) -> None:
        """Note an error if a collective waits for a rank that has come to an agreement instead."""
        with self._lock:
            stalled = [(i, one) for i, one in enumerate(self._groups) if one.stalled]
            if not stalled or not self._store.check([self._key("any")]) or self._store.check([self._key("error")]):
                return
            for i, one in stalled:
                for peer in one.members:
                    if self._store.check([self._key(peer)]):
                        self._compare(json.loads(self._store.get(self._key(peer))), peer, i, one)

    def _compare(self, note: dict[str, Any], peer: int, i: int, progress: CollectiveProgress) -> None:
        """Note an error if a rank that has come to an agreement did not begin the collective that waits here."""
        if sum(note["begun"][i : i + 1]) < progress.begun and progress.stalled:
            self._note(f"rank {peer} called {note['call']}, and rank {self._me} takes a step")

    def _missing(self) -> list[int]:
        if self._store.check([self._key(rank) for rank in self._members]):
            return []
        return [rank for rank in self._members if not self._store.check([self._key(rank)])]

    def _probe(self, missing: Sequence[int], call: str) -> None:
        found = probe({rank: self._addresses[rank] for rank in missing if self._addresses[rank].address}, 1.0)
        if any(found.values()):
            error = RuntimeError(f"the connection to other ranks was lost in {call}")
            raise diagnose(error, self._me, self._addresses)

    def _note(self, text: str) -> None:
        sentence = f"{text}; all ranks must call it, between the same two steps. Start the ranks again"
        self._store.set(self._key("error"), sentence)

    def _forget(self, number: int) -> None:
        """Delete this rank's keys of an agreement that all ranks have left, since all have come to the next."""
        for what in (self._me, "any") if self._me == self._members[0] else (self._me,):
            self._store.delete_key(self._key(what, number))

    def _key(self, what: object, number: int | None = None) -> str:
        return f"{self._count if number is None else number}/{what}"


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


_barriers: "weakref.WeakSet[AgreementBarrier]" = weakref.WeakSet()


@lru_cache(maxsize=1)
def _watch(process: int) -> None:
    """Start the thread, once in a process; a forked child needs its own."""
    threading.Thread(target=_note_all_stalled, name="gradwire-stalls", daemon=True).start()


def _note_all_stalled(pause: Callable[[float], None] = time.sleep) -> None:
    while True:
        pause(STALL_SECONDS / 2)
        for barrier in list(_barriers):
            with suppress(RuntimeError):  # the store has ended with its host
                barrier.note_stalled()
