"""Calibrate: measure what a forecast must know, in as many processes as will share this machine's cores.

Every worker computes, compresses and decodes at the same time as the others do, as in the training that is meant. What
would cross the network stays in each process, but for short collectives between them that measure what those cost when
the link is no hindrance.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the types themselves.

import gc
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks

from gradwire.comm.backend import Backend
from gradwire.comm.emulated import EmulatedBackend
from gradwire.comm.torch_backend import connect
from gradwire.engine.plan import BUCKET_BYTES
from gradwire_lab.bench.network import devices
from gradwire_lab.bench.network.methods import ddp_of
from gradwire_lab.bench.network.rank_main import slowest, while_all_run
from gradwire_lab.bench.network.workloads import CPU, Workload
from gradwire_lab.launch import launch
from gradwire_lab.network.hosts import Hosts
from gradwire_lab.perf_model.calibration import Calibration, CodingCost
from gradwire_lab.perf_model.comm_schedule import SETTLED, schedule, sent, sent_by
from gradwire_lab.perf_model.microbenchmark import WARMUP, time_coding
from gradwire_lab.perf_model.model import DENSE, ModelProfile
from gradwire_lab.perf_model.software import FREE, Software, measure
from gradwire_lab.perf_model.timing import Moment, Stopwatch, cores_per_thread

BOUTS = 2  # of computing, before and after the microbenchmarks: the speed of shared machines drifts within a minute
MOST_DECODED = 16  # ranks whose messages are decoded in a microbenchmark; more are extrapolated

Make = Callable[[], Workload]


@dataclass(frozen=True)
class CalibrationJob:
    """What to measure.

    Attributes:
        make: Builds the workload; lives at the top of a module.
        specs: Ways to synchronize, dense ones aside.
        world: Ranks of the training that is meant.
        steps: That count, all bouts together.
        most_elements: That all microbenchmarks of a spec handle together; there are three at least, and nine at most.
        seconds: To be spent on all microbenchmarks together, and half as many on steps, as far as there is a choice.
        device: Where: ``cpu``, ``cuda`` for the GPUs in turn, or ``cuda:1``; nothing for where the model is made.
        dtype: Of a model on a GPU, unless its maker decides.
    """

    make: Make
    specs: tuple[str, ...]
    world: int
    steps: int = 16
    most_elements: int = 160_000_000
    seconds: float = math.inf
    device: str = ""
    dtype: str = ""

    def repeats(self, elements: int) -> int:
        """Of each microbenchmark: short ones are disturbed more easily."""
        return max(3, min(9, self.most_elements // elements))

    def affordable(self, wanted: int, share: float, fewest: int, took: float) -> int:
        """How many steps to count, when one of those that warm up took so long on the slowest rank. All ranks ask."""
        (longest,) = slowest([took])
        spare = min(self.seconds * share / max(longest, 1e-9), WARMUP + wanted) - WARMUP
        return max(fewest, int(spare))


def checked(job: CalibrationJob) -> CalibrationJob:
    """The job, with the device that it will be done on.

    Raises:
        ValueError: The model cannot be measured.
    """
    device = devices.check(devices.placed(job.make, devices.of_rank(job.device, 0), job.dtype))
    if device.type == "cuda":
        torch.cuda.empty_cache()  # ranks need the room
    return replace(job, device=job.device or device.type)


def calibrate(job: CalibrationJob, workers: int) -> Calibration:
    """Measure with ``workers`` workers on this machine at once; figures are those of the slowest of them."""
    found: Calibration = launch(_rank, workers, job)[0]
    if workers > 1 or job.device.startswith("cuda"):
        return found
    return replace(found, software=launch(_software, 2)[0])


def calibrate_in(hosts: Hosts, job: CalibrationJob) -> Calibration:
    """Measure with a worker in every host."""
    found: Calibration = hosts.call(_rank, job, threads=1)[0]
    return found


def _software(rank: int, world: int) -> Software:
    return measure(_bare(), dist.barrier)


def _bare() -> Backend:
    """The link as it is, without the slower one that it may emulate: a forecast adds that."""
    link = connect()
    return link.inner if isinstance(link, EmulatedBackend) else link


class Pass(NamedTuple):
    """Seconds of one step without communication."""

    forward: float
    backward: float
    arrival: Mapping[str, float]


def _rank(rank: int, world: int, job: CalibrationJob) -> Calibration:
    workload = devices.placed(job.make, devices.of_rank(job.device, rank), job.dtype)
    torch.manual_seed(rank)
    first = _compute(workload, job)
    parameters = {name: p for name, p in workload.model.named_parameters() if p.requires_grad}
    model = ModelProfile.of(parameters, first.arrival)
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in parameters.items()}
    decoded = min(job.world, MOST_DECODED)
    costs = {spec: _dense(grads, model.summed(spec), job.world, job.repeats(model.elements)) for spec in DENSE}
    costs |= {spec: _coding_cost(model, spec, grads, decoded, job) for spec in job.specs}
    device = next(iter(parameters.values())).device
    # Between GPUs it is NCCL that costs, and what that costs between hosts cannot be seen on one of them.
    software = measure(_bare(), dist.barrier) if world > 1 and device == CPU else FREE
    bouts = first, *(_compute(workload, job) for _ in range(BOUTS - 1))
    passes = fmean(one.forward for one in bouts), fmean(one.backward for one in bouts)
    numbers = [*passes, *(x for c in costs.values() for x in (c.encode, c.decode, c.per_peer))]
    largest = iter(slowest(numbers))
    forward, backward = next(largest), next(largest)
    agreed = {spec: CodingCost(next(largest), next(largest), next(largest), cost.fill) for spec, cost in costs.items()}
    cores = cores_per_thread(device, world)
    return Calibration(model, forward, backward, agreed, cores, software, decoded, _note(device, world))


def _note(device: torch.device, world: int) -> str:
    if device.type == "cuda":
        gpus = f"{min(world, torch.cuda.device_count())} x {torch.cuda.get_device_name(device)}"
        return f"measured on {gpus}, {world} at a time, without what collectives cost beyond the link"
    return f"measured on the CPU of this machine, {world} at a time, {torch.get_num_threads()} threads each"


def _compute(workload: Workload, job: CalibrationJob) -> Pass:
    """Time steps under DDP that does not communicate, and leave the last gradients where they are."""
    ddp = ddp_of(workload.model)
    ddp.register_comm_hook(None, debugging_hooks.noop_hook)
    counted = _counted(ddp, workload, job)
    arrival = _arrival(ddp, workload)
    del ddp
    gc.collect()  # DDP takes its hooks off the parameters when it goes
    backward = fmean(one.backward for one in counted)
    share = backward / (backward + fmean(one.forward for one in counted))
    whole = _together([one.forward + one.backward for one in counted])
    return Pass(whole * (1 - share), whole * share, arrival)


def _together(mine: list[float]) -> float:
    """The step of all ranks, none of whom waits for another."""
    of_all: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_all, mine)
    return while_all_run(of_all)


def _counted(ddp: nn.Module, workload: Workload, job: CalibrationJob) -> list[Pass]:
    """Steps after two that warm up. Ranks do not meet between them: who shares a core with whom then evens out."""
    watch = Stopwatch(next(workload.model.parameters()).device)
    step = partial(_step, ddp, workload, torch.optim.SGD(workload.model.parameters(), lr=0.0), watch)
    dist.barrier()
    last = _read(watch, [step() for _ in range(WARMUP)][-1])
    count = job.affordable(math.ceil(job.steps / BOUTS), 0.5 / BOUTS, 2, last.forward + last.backward)
    return [_read(watch, moments) for moments in [step() for _ in range(count)]]


Step = tuple[Moment, Moment, Moment, Moment]  # it begins, turns round, is back, and ends


def _step(ddp: nn.Module, workload: Workload, optimizer: torch.optim.Optimizer, watch: Stopwatch) -> Step:
    began = watch()
    optimizer.zero_grad(set_to_none=False)
    loss = workload.loss(ddp)
    turned = watch()
    loss.backward()
    back = watch()
    optimizer.step()
    return began, turned, back, watch()


def _read(watch: Stopwatch, step: Step) -> Pass:
    began, turned, back, ended = step
    return Pass(watch.seconds(back, ended) + watch.seconds(began, turned), watch.seconds(turned, back), {})


def _arrival(ddp: nn.Module, workload: Workload) -> dict[str, float]:
    """When in the backward pass each gradient is there."""
    watch = Stopwatch(next(workload.model.parameters()).device)
    moments: dict[str, Moment] = {}
    named = [(name, p) for name, p in workload.model.named_parameters() if p.requires_grad]

    def note(name: str) -> Callable[[Tensor], None]:
        return lambda _: moments.__setitem__(name, watch())

    handles = [p.register_post_accumulate_grad_hook(note(name)) for name, p in named]
    dist.barrier()
    loss = workload.loss(ddp)
    began = watch()
    loss.backward()
    whole = max(watch.seconds(began, watch()), 1e-9)
    for handle in handles:
        handle.remove()
    return {name: min(1.0, watch.seconds(began, moment) / whole) for name, moment in moments.items()}


def _dense(grads: Mapping[str, Tensor], dtype: torch.dtype, world: int, repeats: int) -> CodingCost:
    """What DDP's hooks do besides the all-reduce: divide and cast, and cast back."""
    buckets = torch.cat([grad.flatten() for grad in grads.values()]).split(BUCKET_BYTES // 4)
    watch = Stopwatch(buckets[0].device)
    found = []
    for _ in range(repeats + 1):
        dist.barrier()
        began = watch()
        encoded = [bucket.to(dtype).div_(world) if dtype != bucket.dtype else bucket.div_(1.0) for bucket in buckets]
        encoded_at = watch()
        if dtype != buckets[0].dtype:
            for bucket, received in zip(buckets, encoded, strict=True):
                bucket.copy_(received)
        found.append((watch.seconds(began, encoded_at), watch.seconds(encoded_at, watch())))
    encode, decode = zip(*found[1:], strict=True)
    return CodingCost(median(encode), median(decode))


def _coding_cost(
    model: ModelProfile, spec: str, grads: Mapping[str, Tensor], decoded: int, job: CalibrationJob
) -> CodingCost:
    plan = model.plan(spec, decoded)
    repeats = partial(job.affordable, job.repeats(model.elements), 1 / len(job.specs), 1)
    whole = time_coding(plan, grads, repeats=repeats, meet=dist.barrier)
    per_peer = 0.0
    if job.world > decoded:
        few = decoded // 4
        less = time_coding(model.plan(spec, few), grads, repeats=repeats, meet=dist.barrier)
        per_peer = max(0.0, whole.decode - less.decode) / (decoded - few)
    most = sent(schedule(plan, SETTLED), decoded)
    really = sum(sent_by(call, decoded) for call in whole.calls)
    return CodingCost(whole.encode, whole.decode, per_peer, min(1.0, really / most) if most else 1.0)
