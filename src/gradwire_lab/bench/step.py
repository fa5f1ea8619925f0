"""Step: what compression costs a training step where no network slows it down.

Every method trains its own copy of the model, in the same processes and in turns of a few steps, so that whatever else
the machine does hits all alike. Ratios are of neighbors in time: a block of steps over the block of plain DDP in the
same round.
"""

import copy
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradwire.optim import AdamW
from gradwire_lab.bench import memory
from gradwire_lab.bench.network import methods
from gradwire_lab.bench.network.devices import of_rank
from gradwire_lab.bench.network.methods import NO_COMM, POWERSGD, build_method
from gradwire_lab.bench.network.rank_main import quartiles
from gradwire_lab.bench.network.workloads import SMALL_GPT, Workload, images, text
from gradwire_lab.launch import launch, send_message
from gradwire_lab.perf_model.timing import now
from gradwire_lab.train.time_left import TimeLeft

DENSE = "ddp-fp32"
ALWAYS = (NO_COMM, DENSE)  # what all others are compared with
METHODS = (
    *ALWAYS,
    "ddp-bf16",
    "ddp-fp16",
    POWERSGD,
    "topk(0.01)",
    "dgc(0.01)",
    "dgc(0.001)",
    "ef_signsgd",
    "int8",
    "powersgd(4)",
)
OPTIMIZERS = ("sgd", "adamw")
WARM = 3  # steps of each method before anything counts: kernels are compiled, DDP rebuilds its buckets
_SPARE = 1  # steps of each block that do not count: caches are the last method's


@dataclass(frozen=True)
class StepBench:
    """What one group of ranks measures.

    Attributes:
        workload: A name of `WORKLOADS`.
        device: ``cpu`` or ``cuda``.
        methods: As `bench network` names them.
        batch: Of each rank; 0 for the workload's own.
        rounds: Blocks of each method.
        steps: Of a block.
        optimizer: ``sgd``, or ``adamw``: torch's own for torch's methods, and `gradwire.AdamW` for ours; both fused.
        warm: Steps before anything counts. A method with a start is past it then.
    """

    workload: str
    device: str
    methods: tuple[str, ...] = METHODS
    batch: int = 0
    rounds: int = 10
    steps: int = 4
    optimizer: str = "sgd"
    warm: int = WARM


# -- what is trained ---------------------------------------------------------------------------------------------------


# By name: how to make it of a batch and a device, and the batch that a person would take.
WORKLOADS: dict[str, tuple[Callable[[int, torch.device], Workload], int]] = {
    "resnet20": (partial(images, "resnet20", 32, 10), 64),
    "gpt": (partial(text, "gpt", SMALL_GPT, 1024, 128), 8),
    "resnet50": (partial(images, "resnet50", 224, 1000), 64),
    "gpt2": (partial(text, "gpt2", {}, 50257, 1024), 32),
}


# -- one rank ----------------------------------------------------------------------------------------------------------


class Runner:
    """One method with a model of its own."""

    def __init__(self, method: str, job: StepBench, workload: Workload, device: torch.device) -> None:
        self.method, self._device = method, device
        counted = device.type == "cuda"  # on a CPU, other memory of the process would count
        begun = memory.resident(device) if counted else 0
        model = copy.deepcopy(workload.model)
        made = _optimizer(job.optimizer, method, model)
        built = build_method(method, Workload(model, workload.loss), made)
        self.step = partial(built.step, workload.loss, made)
        for _ in range(job.warm):
            self.step()
        self.held = self._held(begun) if counted else (None, None)

    def _held(self, begun: int) -> tuple[int, int]:
        """Bytes beyond so many: what is kept after a step, and the most that are held within it."""
        memory.set_back(self._device)
        self.step()
        return memory.resident(self._device) - begun, memory.highest(self._device) - begun

    def block(self, steps: int) -> dict[str, float]:
        """Seconds of a step, by the clock and of this process's processors."""
        for _ in range(_SPARE):
            self.step()
        dist.barrier()
        began, worked = now(self._device), time.process_time()
        for _ in range(steps):
            self.step()
        seconds, busy = now(self._device) - began, time.process_time() - worked
        return {"seconds": seconds / steps, "busy": busy / steps}


def _optimizer(name: str, method: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-3)
    make = torch.optim.AdamW if method.startswith("ddp-") else AdamW
    return make(model.parameters(), lr=1e-5, fused=True)


def run_rank(rank: int, world: int, job: StepBench) -> None:
    """Build every method, and give each its blocks."""
    device = of_rank(job.device, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(rank)
    make, usual = WORKLOADS[job.workload]
    workload = make(job.batch or usual, device)
    runners = list(_runners(job, workload, device))
    for number in range(job.rounds):
        turn = number % max(len(runners), 1)
        for runner in runners[turn:] + runners[:turn]:  # no method always follows the same one
            send_message({"method": runner.method, "round": number, **runner.block(job.steps)})


def _runners(job: StepBench, workload: Workload, device: torch.device) -> Iterator[Runner]:
    params = sum(p.numel() for p in workload.model.parameters() if p.requires_grad)
    for method in job.methods:
        try:
            runner = Runner(method, job, workload, device)
        except (TypeError, ValueError, RuntimeError) as wrong:
            send_message({"method": method, "refused": f"{type(wrong).__name__}: {wrong}"})
            continue
        kept, peak = runner.held
        send_message({"method": method, "params": params, "kept": kept, "peak": peak})
        yield runner


# -- all of them -------------------------------------------------------------------------------------------------------


def check(job: StepBench) -> None:
    """Refuse a job that no rank could do.

    Raises:
        ValueError: It names a workload, an optimizer or a method that is none, or leaves out what all are compared
            with.
    """
    if job.workload not in WORKLOADS:
        raise ValueError(f"there is no workload {job.workload!r}; take {', '.join(WORKLOADS)}")
    if job.optimizer not in OPTIMIZERS:
        raise ValueError(f"there is no optimizer {job.optimizer!r} here; take {' or '.join(OPTIMIZERS)}")
    if DENSE not in job.methods:
        raise ValueError(f"all is compared with {DENSE}; add it to the methods")
    for method in job.methods:
        methods.check(method)


def measure(
    job: StepBench,
    world: int,
    report: Callable[[str], object] = lambda line: None,
    left: TimeLeft | None = None,
) -> list[dict[str, Any]]:
    """Start the ranks, and make a row of each method. ``left`` counts blocks: `blocks` of every job.

    Raises:
        RankError: A rank died.
    """
    check(job)
    events: list[dict[str, Any]] = []
    left = left or TimeLeft(blocks(job))

    def add(rank: int, event: dict[str, Any]) -> None:
        events.append(event)
        if rank == 0:
            if "round" in event:
                left.finish()
            left.total -= job.rounds * ("refused" in event)
            report(left.after(f"{job.workload}, {event['method']}: {_progress(event)}"))

    before = os.getloadavg()[0]
    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    launch(run_rank, world, job, on_message=add, backend="nccl" if job.device == "cuda" else "gloo", threads=threads)
    about = {"workload": job.workload, "device": job.device, "world": world, "rounds": job.rounds, "steps": job.steps}
    about["optimizer"] = job.optimizer
    load = {"load_before": before, "load_after": os.getloadavg()[0]}
    return [about | row | load for row in _rows(events, job.methods)]


def blocks(job: StepBench) -> int:
    """How many turns there are, of all methods together."""
    return job.rounds * len(job.methods)


def _progress(event: dict[str, Any]) -> str:
    if "round" in event:
        return f"round {event['round'] + 1}"
    return f"refused, {event['refused']}" if "refused" in event else "built"


def _rows(events: Sequence[dict[str, Any]], methods: Sequence[str]) -> Iterator[dict[str, Any]]:
    facts = {event["method"]: event for event in events if "params" in event or "refused" in event}
    clock, busy = _by_round(events, "seconds"), _by_round(events, "busy")
    for method in methods:
        if "refused" in facts.get(method, {}):
            yield {"method": method, "refused": facts[method]["refused"]}
        elif method in clock:
            yield {
                "method": method,
                "params": facts[method]["params"],
                "step_ms": statistics.median(clock[method]),
                **_compared(clock, method),
                "busy_ms": statistics.median(busy[method]),
                "busy_to_dense": _compared(busy, method)["to_dense"],
                **_memory(facts[method], facts[DENSE]),
            }


def _by_round(events: Sequence[dict[str, Any]], what: str) -> dict[str, list[float]]:
    """Milliseconds of every method's blocks, the ranks' mean, in the order of rounds."""
    blocks: defaultdict[str, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        if what in event:
            blocks[event["method"]][event["round"]].append(1e3 * event[what])
    return {method: [statistics.fmean(rounds[i]) for i in sorted(rounds)] for method, rounds in blocks.items()}


def _compared(times: dict[str, list[float]], method: str) -> dict[str, Any]:
    """With plain DDP and with no communication at all, round by round."""
    compared: dict[str, Any] = {}
    for name, other in (("dense", DENSE), ("silent", NO_COMM)):
        if other in times:
            ratios = [mine / theirs for mine, theirs in zip(times[method], times[other], strict=True)]
            compared[f"to_{name}"] = statistics.median(ratios)
            compared[f"to_{name}_quartiles"] = quartiles(ratios)
    return compared


def _memory(mine: dict[str, Any], dense: dict[str, Any]) -> dict[str, Any]:
    """Floats per parameter, beyond what plain DDP takes."""
    if mine["kept"] is None or dense.get("kept") is None:
        return {"kept_floats": None, "peak_floats": None}
    n = 4 * mine["params"]
    return {"kept_floats": (mine["kept"] - dense["kept"]) / n, "peak_floats": (mine["peak"] - dense["peak"]) / n}
