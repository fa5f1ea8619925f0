"""Software: what a collective costs a worker's own machine, however fast the link is.

Copies, additions and system calls take processor time for every byte, and a hop takes a wake-up of its receiver. Both
are measured between the ranks of this machine, over a link that is as fast as the machine: with several workers to a
core, they are what unshaped training waits for.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

import torch

from gradwire.comm.backend import Backend
from gradwire.comm.collectives import AllGatherOp, AllReduceOp, AllToAllOp, Collective
from gradwire_lab.perf_model.comm_schedule import sent_by
from gradwire_lab.perf_model.loopback import CollectiveCall
from gradwire_lab.perf_model.timing import now, slowest

_SMALL = 4096  # bytes
_LARGE = {"all_reduce": 2**23, "all_gather": 2**21, "all_to_all": 2**21}  # about what a step sends; caches matter
_REPEATS = 5


@dataclass(frozen=True)
class Software:
    """Affine costs of a collective.

    Attributes:
        latency: Seconds of an all but empty one, by kind.
        per_byte: Seconds for each byte that a rank sends, by kind; sums also by dtype, as ``all_reduce bfloat16``.
        world: Of how many ranks that was.
    """

    latency: Mapping[str, float] = field(default_factory=dict)
    per_byte: Mapping[str, float] = field(default_factory=dict)
    world: int = 2

    def hold(self, call: CollectiveCall, world: int) -> float:
        """Seconds of waiting that no link shortens: so much for every hop."""
        return self.latency.get(call.kind, 0.0) * _hops(call.kind, world) / _hops(call.kind, self.world)

    def work(self, call: CollectiveCall, world: int) -> float:
        """Seconds of the processor."""
        known = self.per_byte.get(key(call.kind, call.dtype), self.per_byte.get(call.kind, 0.0))
        return known * sent_by(call, world)


def _hops(kind: str, world: int) -> int:
    return {"all_reduce": 2 * (world - 1), "all_gather": world - 1}.get(kind, 1)


FREE = Software()


def key(kind: str, dtype: torch.dtype) -> str:
    """What a cost is filed under."""
    return f"{kind} {str(dtype).removeprefix('torch.')}" if dtype in _SUMMED else kind


_SUMMED = (torch.float16, torch.bfloat16)


def measure(link: Backend, meet: Callable[[], None] = lambda: None) -> Software:
    """Time collectives among all ranks of a link; every rank calls this at once and gets the same figures."""
    assert link.world > 1, "one rank has no other to send to"
    latency, per_byte = {}, {}
    for name, make in _makers(link).items():
        kind = name.partition(" ")[0]
        small, large = (_seconds(link, make(nbytes), meet) for nbytes in (_SMALL, _LARGE[kind]))
        if kind == name:
            latency[kind] = small
        more = sent_by(CollectiveCall(kind, _LARGE[kind] - _SMALL), link.world)  # type: ignore[arg-type]
        per_byte[name] = max(0.0, large - small) / more
    shared = iter(slowest(link, [*latency.values(), *per_byte.values()]))
    return Software(dict(zip(latency, shared, strict=False)), dict(zip(per_byte, shared, strict=True)), link.world)


def _makers(link: Backend) -> dict[str, Callable[[int], Collective]]:
    device, world = link.device, link.world

    def spread(nbytes: int) -> AllToAllOp:
        each = max(1, nbytes // (world - 1))
        return AllToAllOp(torch.zeros(each * world, dtype=torch.uint8, device=device), (each,) * world, (each,) * world)

    def total(dtype: torch.dtype) -> Callable[[int], Collective]:
        return lambda nbytes: AllReduceOp(torch.zeros(nbytes // dtype.itemsize, dtype=dtype, device=device), "sum")

    return {
        "all_reduce": total(torch.float32),
        **{key("all_reduce", dtype): total(dtype) for dtype in _SUMMED},
        "all_gather": lambda nbytes: AllGatherOp(torch.zeros(nbytes, dtype=torch.uint8, device=device)),
        "all_to_all": spread,
    }


def _seconds(link: Backend, collective: Collective, meet: Callable[[], None]) -> float:
    times = []
    for _ in range(_REPEATS):
        meet()
        began = now(link.device)
        link.move(collective)
        times.append(now(link.device) - began)
    return median(times[1:])
