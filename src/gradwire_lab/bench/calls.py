"""Calls: what one call of a user costs, beside the bytes that it cannot avoid.

Every spec is called as a training loop calls it, through the public interface, on gradients that are equal at every
step. Before each call the gradients are written again, which is not timed. The floor is the time of a copy of the bytes
that the call must read and write, at the bandwidth measured in the same run: the gradient is read, the update is
written, memories are read and written, and the message is written and read. On a CPU the time inside of kernels is
measured too, in calls of their own.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire.engine import method
from gradwire.integrations import DistributedOptimizer, compress
from gradwire.kernels.dispatch import faster
from gradwire_lab.bench import plain
from gradwire_lab.bench.fixed_gradients import MODELS, FixedGradients, shapes_of
from gradwire_lab.bench.network.devices import of_rank
from gradwire_lab.launch import launch
from gradwire_lab.perf_model.timing import Stopwatch, now

SPECS = (
    "dgc(0.001)",
    "topk(0.001)",
    "topk(0.01) | sign",
    "ef_signsgd",
    "int4",
    "qsgd",
    "powersgd(4)",
    "topk(0.001) | rows",
)
ENTRY_POINTS = ("loop", "ddp", "optimizer", "hosts")
ADDRESSES = ("same", "moving")
PLAIN = "plain torch DGC"  # compression alone: nothing is exchanged or decoded
PLAIN_RATIO = 0.001
WARM_CALLS = 6  # kernels are compiled, DDP rebuilds its buckets, steps are captured
_PLAIN_BYTES = 20.0  # a parameter: read the gradient, read and write the momentum and the residual
_SECOND_PASS = {"ef_signsgd": 8.0}  # a scale of the whole tensor: gradient and residual are read twice
_COPY_BYTES = 2**28  # of the copy that measures the bandwidth, at least on a GPU

Timing = dict[str, float]


@dataclass(frozen=True)
class CallBench:
    """What is measured.

    Attributes:
        model: A name of `MODELS`: one tensor, or the weights of two dimensions or more.
        entry_point: A name of `ENTRY_POINTS`: how the training loop calls gradwire.
        specs: What is compressed how.
        size: Parameters in all, about; 0 for the model's own.
        device: ``cpu`` or ``cuda``.
        addresses: ``same``: gradients stay where they are; ``moving``: they are freed and allocated at every step.
        repeats: Medians are of this many calls.
    """

    model: str
    entry_point: str = "loop"
    specs: tuple[str, ...] = SPECS
    size: int = 0
    device: str = "cpu"
    addresses: str = "same"
    repeats: int = 20


def measure(bench: CallBench, ranks: int = 1) -> Iterator[dict[str, Any]]:
    """Time every spec, in this process or in several ranks; of those, the slowest counts.

    Raises:
        ValueError: There is no such model, entry point, kind of address or spec.
    """
    check(bench, ranks)
    if ranks == 1 and bench.entry_point != "ddp":  # which needs a process group even for one
        yield from _rows(bench, 0, 1)
        return
    alone = bench.device == "cuda" and torch.cuda.device_count() >= ranks
    by_rank = launch(_run_rank, ranks, bench, backend="nccl" if alone else "gloo")
    for same in zip(*by_rank, strict=True):
        yield max(same, key=lambda row: row["ms"])


def check(bench: CallBench, ranks: int) -> None:
    for what, value, known in (
        ("model", bench.model, MODELS),
        ("entry point", bench.entry_point, ENTRY_POINTS),
        ("kind of addresses", bench.addresses, ADDRESSES),
    ):
        if value not in known:
            raise ValueError(f"there is no {what} {value!r}; take {', '.join(known)}")
    for spec in bench.specs:
        method(spec)
    if bench.entry_point == "hosts" and ranks > 1 and ranks % 2:
        raise ValueError(f"{ranks} ranks do not make two equal hosts; take --workers {ranks + 1}")


def _run_rank(rank: int, world: int, bench: CallBench) -> list[dict[str, Any]]:
    return list(_rows(bench, rank, world))


def _rows(bench: CallBench, rank: int, world: int) -> Iterator[dict[str, Any]]:
    device = of_rank(bench.device, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(rank)
    weights = FixedGradients(shapes_of(bench.model, bench.size), device)
    about = {
        "model": bench.model,
        "params": weights.total,
        "tensors": len(weights.weights),
        "entry_point": bench.entry_point,
        "addresses": bench.addresses,
        "device": device.type,
        "ranks": world,
        "repeats": bench.repeats,
    }
    speed = _bandwidth(weights.total, device)
    plain = 0.0
    for row in _timed(bench, weights, world):
        floor = row["bytes_per_param"] * weights.total / speed * 1e3
        plain = plain or row["call_ms"]  # comes first
        ratios = {"to_floor": row["call_ms"] / floor, "to_plain": row["call_ms"] / plain}
        yield about | row | {"floor_ms": floor, **ratios, "gb_per_s": speed / 1e9}


def _timed(bench: CallBench, weights: FixedGradients, world: int) -> Iterator[dict[str, Any]]:
    """Plain torch first, then every spec; ``call_ms`` is the call without what it costs without gradwire."""
    took = _time(bench, weights, _plain_step(weights))
    alone = {"without_ms": 0.0, "call_ms": took["ms"], "bytes_per_param": _PLAIN_BYTES, "to_kernels": None}
    yield {"spec": PLAIN, **took, **alone}
    without = 0.0
    if bench.entry_point in ("ddp", "optimizer"):
        without = _time(bench, weights, _caller(bench.entry_point, weights, None, world)[0])["ms"]
    for spec in bench.specs:
        call, wire = _caller(bench.entry_point, weights, spec, world)
        took = _time(bench, weights, call)
        yield {
            "spec": spec,
            **took,
            "without_ms": without,
            "call_ms": took["ms"] - without,
            "bytes_per_param": _bytes_per_param(spec, wire, weights.total),
            "to_kernels": _to_kernels(bench, weights, call) if bench.entry_point == "loop" else None,
        }
        wire.off()
        del call, wire
        if weights.fixed[0].is_cuda:
            torch.cuda.empty_cache()


# -- what is called ----------------------------------------------------------------------------------------------------


def _caller(
    entry_point: str, weights: FixedGradients, spec: str | None, world: int
) -> tuple[Callable[[], object], Any]:
    """The call of one step and its handle; without a spec, the same call without gradwire."""
    if entry_point == "ddp":
        ddp = DistributedDataParallel(weights)
        wire = compress(ddp, spec) if spec else None
        return lambda: ddp().backward(), wire
    if entry_point == "optimizer":
        inner = torch.optim.SGD(weights.parameters(), lr=1e-3)
        if spec is None:
            return inner.step, None
        outer = DistributedOptimizer(inner, weights.named_parameters(), spec)
        return outer.step, outer.wire
    assert spec is not None
    hosts = [[0]] if world == 1 else [list(range(world // 2)), list(range(world // 2, world))]
    wire = compress(weights, spec, across=hosts if entry_point == "hosts" else None)
    return wire, wire


def _plain_step(weights: FixedGradients) -> Callable[[], None]:
    memories = [(torch.zeros_like(g).view(-1), torch.zeros_like(g).view(-1)) for g in weights.fixed]

    def step() -> None:
        for grad, (momentum, residual) in zip(weights.fixed, memories, strict=True):
            plain.dgc_(grad.view(-1), momentum, residual, max(1, round(PLAIN_RATIO * grad.numel())))

    return step


def _bytes_per_param(spec: str, wire: Any, params: int) -> float:
    """What a call must read and write: by the memories in the checkpoint and by the bytes of a message."""
    account = wire.report()
    message: float = account.payload / max(1, account.steps)
    memories: int = sum(x.nbytes for x in wire.state_dict().values() if x.is_floating_point())
    return 8 + (2 * memories + 2 * message) / params + _SECOND_PASS.get(spec, 0.0)


# -- time --------------------------------------------------------------------------------------------------------------


def _time(bench: CallBench, weights: FixedGradients, call: Callable[[], object]) -> Timing:
    """Milliseconds of a call: the median, the slowest, and the median until it returns to the host."""
    fill, pairs = _preparation(bench, weights), []
    for number in range(WARM_CALLS + bench.repeats):
        fill()
        took = _clock(call, weights.fixed[0].device)
        pairs += [took] if number >= WARM_CALLS else []
    weights.zero_grad()
    times, host = zip(*pairs, strict=True)
    return {"ms": statistics.median(times), "worst_ms": max(times), "host_ms": statistics.median(host)}


def _to_kernels(bench: CallBench, weights: FixedGradients, call: Callable[[], object]) -> float | None:
    """How many times as long as its kernels a call takes, in the median; None where kernels run by themselves."""
    if bench.device != "cpu":
        return None
    fill, ratios = _preparation(bench, weights), []
    for _ in range(bench.repeats):
        fill()
        with _kernel_clock() as inside:
            took, _ = _clock(call, weights.fixed[0].device)
        ratios += [took / (1e3 * inside[0])] if inside[0] else []  # what torch does is in none
    weights.zero_grad()
    return statistics.median(ratios) if ratios else None


@contextmanager
def _kernel_clock() -> Iterator[list[float]]:
    """Until the end, the seconds inside of CPU kernels are added up; of kernels that call others, the outer counts."""
    table, seconds, depth = faster("cpu"), [0.0], [0]
    before = dict(table)

    def timed(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            began, depth[0] = time.perf_counter(), depth[0] + 1
            try:
                return kernel(*args, **named)
            finally:
                depth[0] -= 1
                seconds[0] += 0.0 if depth[0] else time.perf_counter() - began

        return run

    table.update({name: timed(kernel) for name, kernel in before.items()})
    try:
        yield seconds
    finally:
        table.update(before)


def _preparation(bench: CallBench, weights: FixedGradients) -> Callable[[], None]:
    moving = bench.addresses == "moving"
    if bench.entry_point == "ddp":
        return partial(weights.zero_grad, moving)
    return weights.fill_elsewhere if moving else weights.fill_in_place


def _clock(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Milliseconds of a call on the device, and until it returns to the host."""
    watch = Stopwatch(device)
    now(device)  # which waits until the device is idle, so that the time of launches counts
    start, began = watch(), time.perf_counter()
    call()
    host, end = time.perf_counter() - began, watch()
    return 1e3 * watch.seconds(start, end), 1e3 * host


def _bandwidth(params: int, device: torch.device) -> float:
    """Bytes a second of the fastest of ten copies, read and written bytes together."""
    n = max(params, _COPY_BYTES // 4 if device.type == "cuda" else 1)
    source = torch.ones(n, device=device)
    target = torch.empty_like(source)
    times = [_clock(lambda: target.copy_(source), device)[0] for _ in range(13)]
    return 8 * n / min(times[3:]) * 1e3
