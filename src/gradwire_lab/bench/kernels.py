"""How fast each kernel is: against the memory it must touch, against its definition, and against plain torch.

The floor of a kernel is the time of a copy that reads and writes as many bytes as the kernel must, in the same run.
On a CPU, a copy of few bytes is made often in each turn, by all threads and by one, and the fastest counts: one thread
that wakes up late makes all wait a hundred times as long as such a copy takes.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from gradwire.engine.precompile import compile_notice
from gradwire.kernels.dispatch import reference_only
from gradwire_lab.bench import cases
from gradwire_lab.bench.kernel_inputs import Case, KernelInputs
from gradwire_lab.bench.selections import GAUSSIAN
from gradwire_lab.perf_model.timing import Stopwatch
from gradwire_lab.train import models

# The same work as a person would write it, timed before the kernel.
COMPOSED = {
    "dgc": "torch_dgc",
    "dgc_turns": "torch_dgc",
    "topk": "torch_topk",
    "onebit_adam": "torch_onebit_adam",
    "onebit_adam_lane": "torch_onebit_adam",
    "sign_encode": "torch_sign",
    "qsgd_encode": "torch_qsgd",
    "int4_encode": "torch_int4",
}

# On a CPU a turn copies at least so many bytes, which take about a millisecond, in no more copies than that.
TURN, COPIES = 2**24, 40


def resnet50() -> tuple[int, ...]:
    """The sizes of ResNet-50's 161 tensors: each convolution is followed by the two of its norm."""
    with torch.device("meta"):
        return tuple(p.numel() for p in models.build("resnet50").parameters())


def chosen(only: str, lengths: tuple[int, ...]) -> list[str]:
    """The kernels whose name holds ``only``.

    Raises:
        ValueError: None does.
    """
    known = cases.names(lengths)
    if found := [name for name in known if only in name]:
        return found
    raise ValueError(f"there is no kernel {only!r}; those of {len(lengths)} segments are {', '.join(known)}")


def measure(
    device: torch.device | str, tables: Iterable[tuple[int, ...]], only: str = "", repeats: int = 30
) -> Iterator[dict[str, Any]]:
    """Time every kernel whose name contains ``only``, on buffers of segments of these lengths.

    Raises:
        ValueError: No kernel has such a name.
    """
    device = torch.device(device)
    with compile_notice(device, first=True):
        for lengths, names in [(lengths, chosen(only, lengths)) for lengths in tables]:
            inputs, took = KernelInputs(lengths, device), dict[str, float]()
            for name in names:
                row = _row(name, cases.CASES[name](inputs), inputs, repeats)
                took[name] = row["ms"]
                row["to_torch"] = took[COMPOSED[name]] / row["ms"] if COMPOSED.get(name) in took else None
                row["to_gaussian"] = row["ms"] / took[GAUSSIAN[name]] if GAUSSIAN.get(name) in took else None
                yield row


def _row(name: str, case: Case, inputs: KernelInputs, repeats: int) -> dict[str, Any]:
    device = inputs.device
    needed = int(case.bytes * inputs.n)
    if device.type == "cpu":
        floor, ms = _in_turns(_copies(needed), case.run, repeats)
    else:
        floor, ms = _median(_copier(needed, device), device, repeats), _median(case.run, device, repeats)
    replayed = _replayed(case.run, repeats) if device.type == "cuda" and case.repeatable else None
    plain = ms if case.composed else _defined(case, device, repeats)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return {
        "kernel": name,
        "device": device.type,
        "n": inputs.n,
        "segments": len(inputs.lengths),
        "bytes_per_element": case.bytes,
        "ms": ms,
        "graph_ms": replayed,
        "floor_ms": floor,
        "reference_ms": plain,
        "gb_per_s": needed / ms / 1e6,
        "to_floor": ms / floor,
        "graph_to_floor": replayed / floor if replayed else None,
        "to_reference": plain / ms,
        "load": os.getloadavg()[0],  # of the machine: others' work shows in a CPU's figures
    }


def _copier(needed: int, device: torch.device) -> Callable[[], object]:
    """A copy that reads and writes so many bytes in all."""
    source = torch.empty(max(needed // 8, 1), device=device).uniform_()
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _copies(needed: int) -> list[Callable[[], object]]:
    """The copies of one turn on a CPU: a single long one, or several short ones by all threads and by one."""
    copy = _copier(needed, torch.device("cpu"))
    times = min(COPIES, -(-TURN // max(needed, 1)))
    if times == 1:
        return [copy]
    source = torch.empty(max(needed // 8, 1)).uniform_().numpy()
    target = source.copy()
    return [copy] * times + [lambda: np.copyto(target, source)] * times  # NumPy's is by one thread


def _in_turns(copies: Sequence[Callable[[], object]], run: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Medians of the fastest copy of a turn and of a kernel, in milliseconds.

    They run by turns: what else the machine does hits both alike.
    """
    for _ in range(3):
        copies[0]()
        run()
    pairs = [(min(map(_clocked, copies)), _clocked(run)) for _ in range(repeats)]
    return statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs)


def _defined(case: Case, device: torch.device, repeats: int) -> float:
    with reference_only():
        return _median(case.run, device, min(repeats, max(3, repeats // 10)), warm=1)


def _median(run: Callable[[], object], device: torch.device, repeats: int, warm: int = 3) -> float:
    """Milliseconds of one call: the median of several, after some that do not count."""
    for _ in range(warm):
        run()
    watch, moments = Stopwatch(device), []
    for _ in range(repeats):
        began = watch()
        run()
        moments.append((began, watch()))
    return 1e3 * statistics.median(watch.seconds(began, ended) for began, ended in moments)


def _replayed(run: Callable[[], object], repeats: int) -> float:
    """Milliseconds of one call as a captured graph: without the launches' cost on the host."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return _median(graph.replay, torch.device("cuda"), repeats)


def _clocked(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3
