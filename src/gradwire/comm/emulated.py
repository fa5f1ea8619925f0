"""Emulated: a slow link on a fast one, without root.

A collective ends when its alpha-beta model says, and never earlier. All emulated backends of a process share one link,
so that what is sent at once takes as long as what is sent in turn.

Ranks of one machine share a clock. A long collective begins when the last rank has called it, so ranks first exchange
the times of their calls; a short one costs less than that, and is taken to begin when it has been carried out.
"""

import os
import threading
import time

import torch
from torch import Tensor

from gradwire.comm.alphabeta import AlphaBeta, Cost, Kind, cost
from gradwire.comm.backend import Backend, CountingBackend, SingleBackend
from gradwire.comm.collectives import AllGatherOp, AllReduceOp, AllToAllOp, BroadcastOp, Collective
from gradwire.comm.rates import LinkSpec

VARIABLE = "GRADWIRE_LINK"  # the link that all backends emulate, where it is set
_LONG_BYTES = 2**16
_STAMP_BYTES = 8
_KINDS: dict[type[Collective], Kind] = {AllReduceOp: "all_reduce", AllGatherOp: "all_gather", BroadcastOp: "broadcast"}


class SharedLink:
    """The one link of a process: when it is free again."""

    def __init__(self) -> None:
        self._free = 0.0
        self._lock = threading.Lock()

    def reserve(self, start: float, took: Cost) -> float:
        """The moment at which a collective ends that could begin at ``start``."""
        with self._lock:
            self._free = max(start, self._free) + took.busy
            return self._free + took.wait


SHARED_LINK = SharedLink()


class EmulatedBackend(CountingBackend):
    """Carries out collectives by another backend, and takes as long as a slower link would."""

    def __init__(self, inner: CountingBackend, spec: LinkSpec | str, shared: SharedLink = SHARED_LINK) -> None:
        super().__init__()
        self.inner, self.rank, self.world, self.device = inner, inner.rank, inner.world, inner.device
        self.barrier = inner.barrier
        self.spec = LinkSpec.parse(spec) if isinstance(spec, str) else spec
        if self.spec.jitter_seconds or self.spec.loss:
            raise ValueError(
                f"an emulated link has a rate and a delay, but {self.spec} has jitter or loss too; "
                "leave them out, or use gradwire hosts"
            )
        self._shared = shared
        self._costs = AlphaBeta.of(self.spec)

    def move(self, collective: Collective, out: Tensor | None = None) -> Tensor:
        called = self._last_call(collective)
        out = self.inner.move(collective, out)
        due = self._shared.reserve(called or time.monotonic(), self.cost(collective))
        time.sleep(max(0.0, due - time.monotonic()))
        return out

    def cost(self, collective: Collective) -> Cost:
        """What this rank pays for a collective."""
        if isinstance(collective, AllToAllOp):
            sent, received = (sum(n) - n[self.rank] for n in (collective.out, collective.into))
            return cost("all_to_all", max(sent, received), self.world, self._costs)
        return cost(_KINDS[type(collective)], collective.tensor.nbytes, self.world, self._costs)

    def _last_call(self, collective: Collective) -> float | None:
        """When the last of the ranks called that this one receives from; None for a short collective."""
        now = time.monotonic()
        if isinstance(collective, AllToAllOp):
            return self._last_peer(collective, now) if self.device.type == "cpu" else None
        if collective.tensor.nbytes < _LONG_BYTES:
            return None
        called = torch.tensor([now], dtype=torch.float64, device=self.device)
        return float(self.inner.move(AllReduceOp(called, "max")))

    def _last_peer(self, collective: AllToAllOp, now: float) -> float | None:
        """The same for an all-to-all. Both ends know how long a message is, so both know whether it has a time."""
        out, into = (
            tuple(_STAMP_BYTES if n >= _LONG_BYTES and peer != self.rank else 0 for peer, n in enumerate(lengths))
            for lengths in (collective.out, collective.into)
        )
        if not any(out) and not any(into):
            return None
        stamps = torch.tensor([now], dtype=torch.float64).repeat(sum(map(bool, out))).view(torch.uint8)
        received: list[float] = self.inner.move(AllToAllOp(stamps, out, into)).view(torch.float64).tolist()
        return max([now, *received])


def set_emulated_link(spec: str) -> None:
    """Have all backends of this process, and of those that it starts, emulate a link; refuse one that they cannot."""
    if spec:
        EmulatedBackend(SingleBackend(), spec)
        os.environ[VARIABLE] = spec


def maybe_emulated(backend: CountingBackend) -> Backend:
    """The backend itself, or one that emulates the link that the environment names."""
    spec = os.environ.get(VARIABLE)
    return EmulatedBackend(backend, spec) if spec else backend
