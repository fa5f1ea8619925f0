"""Throttled: a fast link that pretends to be a thin one, without root.

What it carries arrives when the alpha-beta model of the collective says, and never earlier. All throttled links of a
process share one wire, so that what is sent at once takes as long as what is sent in turn.

Ranks of one machine share a clock. A long collective begins when the last rank has called it, so ranks first tell one
another when that was; a short one costs less than that question, and is taken to begin when it has been carried out.
"""

import os
import threading
import time

import torch
from torch import Tensor

from gradwire.comm.alphabeta import AlphaBeta, Cost, Kind, cost
from gradwire.comm.backend import Backend, CountingBackend
from gradwire.comm.collectives import AllGatherOp, AllReduceOp, AllToAllOp, BroadcastOp, Collective
from gradwire.comm.rates import LinkSpec
from gradwire.comm.single import SingleBackend

VARIABLE = "GRADWIRE_LINK"  # every door takes a link like this for granted, where it is set
_LONG_BYTES = 2**16
_STAMP_BYTES = 8
_KINDS: dict[type[Collective], Kind] = {AllReduceOp: "all_reduce", AllGatherOp: "all_gather", BroadcastOp: "broadcast"}


class Medium:
    """The one wire of a process: when it is free again."""

    def __init__(self) -> None:
        self._free = 0.0
        self._lock = threading.Lock()

    def book(self, start: float, took: Cost) -> float:
        """The moment at which something arrives that could leave at ``start``."""
        with self._lock:
            self._free = max(start, self._free) + took.busy
            return self._free + took.wait


MEDIUM = Medium()


class EmulatedBackend(CountingBackend):
    """Carries over another link, and takes as long as a thinner one would."""

    def __init__(self, inner: CountingBackend, spec: LinkSpec | str, medium: Medium = MEDIUM) -> None:
        super().__init__()
        self.inner, self.rank, self.world, self.device = inner, inner.rank, inner.world, inner.device
        self.spec = LinkSpec.parse(spec) if isinstance(spec, str) else spec
        if self.spec.jitter_seconds or self.spec.loss:
            raise ValueError(
                f"a pretended link has a rate and a delay, but {self.spec} has jitter or loss too; "
                "leave them out, or use gradwire hosts"
            )
        self._medium = medium
        self._costs = AlphaBeta.of(self.spec)

    def move(self, collective: Collective) -> Tensor:
        called = self._last_call(collective)
        out = self.inner.move(collective)
        due = self._medium.book(called or time.monotonic(), self.cost(collective))
        time.sleep(max(0.0, due - time.monotonic()))
        return out

    def move_into(self, collective: Collective, out: Tensor) -> None:
        out.copy_(self.move(collective))

    def cost(self, collective: Collective) -> Cost:
        """What this rank pays for a collective."""
        x = collective.tensor
        nbytes = x.numel() * x.element_size()
        if isinstance(collective, AllToAllOp):
            sent, received = (sum(n) - n[self.rank] for n in (collective.out, collective.into))
            return cost("all_to_all", max(sent, received), self.world, self._costs)
        return cost(_KINDS[type(collective)], nbytes, self.world, self._costs)

    def _last_call(self, collective: Collective) -> float | None:
        """When the last rank of those that this one hears called, for what is long on both ends."""
        x = collective.tensor
        now = time.monotonic()
        if isinstance(collective, AllToAllOp):
            return self._last_peer(collective, now) if self.device.type == "cpu" else None
        if x.numel() * x.element_size() < _LONG_BYTES:
            return None
        told = torch.tensor([now], dtype=torch.float64, device=self.device)
        return float(self.inner.move(AllReduceOp(told, "max")))

    def _last_peer(self, collective: AllToAllOp, now: float) -> float | None:
        """The same among those who swap; both ends know how long a message is, so both know whether to ask."""
        out, into = (
            tuple(_STAMP_BYTES if n >= _LONG_BYTES and peer != self.rank else 0 for peer, n in enumerate(lengths))
            for lengths in (collective.out, collective.into)
        )
        if not any(out) and not any(into):
            return None
        stamps = torch.tensor([now], dtype=torch.float64).repeat(sum(map(bool, out))).view(torch.uint8)
        heard: list[float] = self.inner.move(AllToAllOp(stamps, out, into)).view(torch.float64).tolist()
        return max(now, *heard) if heard else now


def ask_for(spec: str) -> None:
    """Have all links of this process, and of those that it starts, pretend; refuse one that cannot be pretended."""
    if spec:
        EmulatedBackend(SingleBackend(), spec)
        os.environ[VARIABLE] = spec


def pretended(link: CountingBackend) -> Backend:
    """The link itself, or a throttled one where the environment asks for it."""
    asked = os.environ.get(VARIABLE)
    return EmulatedBackend(link, asked) if asked else link
