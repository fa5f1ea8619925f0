"""One rank of a measurement: it sends what it measures to the process that started it, an event at a time."""

import os
import socket
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gradwire.comm import Traffic
from gradwire.comm.alphabeta import framed
from gradwire.comm.emulated import VARIABLE
from gradwire.comm.rates import LinkSpec
from gradwire_lab.bench.network.grid import Budget, Scenario
from gradwire_lab.bench.network.methods import NO_COMM, BuiltMethod, build_method
from gradwire_lab.bench.network.workloads import Workload, load
from gradwire_lab.launch import send_message
from gradwire_lab.network.hosts import DEVICE
from gradwire_lab.network.shaping import sent_bytes

GAVE_UP = 75


@contextmanager
def time_limit(method: str, seconds: float) -> Iterator[None]:
    """End the process when a turn takes too long: a collective without an answer cannot be left otherwise."""

    def end() -> None:
        send_message({"method": method, "timeout": seconds})
        os._exit(GAVE_UP)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def run_rank(rank: int, world: int, scenario: Scenario, methods: Sequence[str], budget: Budget) -> None:
    """Give every method its turns."""
    link = LinkSpec.parse(scenario.link)
    if scenario.where == "throttled":
        os.environ[VARIABLE] = "" if link == LinkSpec() else str(link)
    torch.manual_seed(rank)
    workload, refused = load(scenario.model), set[str]()
    for number in range(budget.rounds):
        for method in methods:
            if method not in refused:
                with time_limit(method, budget.timeout):
                    refused |= set() if _block(method, workload, budget, number) else {method}


def _block(method: str, workload: Workload, budget: Budget, number: int) -> bool:
    """One block of steps. Returns whether the method could be built."""
    dist.barrier()
    if dist.get_rank() == 0:
        send_message({"method": method, "round": number, "begun": True})
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.01)
    try:
        built = build_method(method, workload)
        step = partial(_timed_step, built, workload, optimizer)
        seconds = [step() for _ in range(2)]
    except (TypeError, ValueError, RuntimeError) as wrong:
        send_message({"method": method, "refused": f"{type(wrong).__name__}: {wrong}"})
        return False
    count, period = _agree_on_steps(seconds[-1], budget), built.period
    warmup = max(2, budget.warmup) if count > 2 else 2
    for _ in range(-(-warmup // period) * period + built.delay - 2):
        step()  # messages of the rounds that count then begin and end while they are timed
    count = -(-count // period) * period  # whole rounds
    reported, nic = _accounts(built)
    times = [step() for _ in range(count)]
    reported_after, nic_after = _accounts(built)
    turn = {
        "method": method,
        "round": number,
        "seconds": times,
        "nic": None if nic is None or nic_after is None else (nic_after - nic) / count,
        "became": built.became,
        "period": period,
    }
    send_message(turn | _reported(reported, reported_after, count))
    for p in workload.model.parameters():
        p.grad = None  # a view of the storage of a DDP that is about to be deleted
    return True


def _timed_step(built: BuiltMethod, workload: Workload, optimizer: torch.optim.Optimizer) -> float:
    began = time.perf_counter()
    built.step(workload.loss, optimizer)
    return time.perf_counter() - began


def _agree_on_steps(seconds: float, budget: Budget) -> int:
    """As many steps as fit, the same on all ranks."""
    return max(2, min(budget.steps, int(budget.turn_seconds / slowest([seconds])[0])))


def slowest(seconds: Sequence[float]) -> list[float]:
    """The largest of all ranks' figures, one by one."""
    figures = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    largest: list[float] = figures.tolist()
    return largest


def _accounts(built: BuiltMethod) -> tuple[Traffic | None, int | None]:
    """The accounts, once all is quiet."""
    dist.barrier()
    time.sleep(0.1)
    found = built.account(), nic_sent()
    dist.barrier()
    return found


def nic_sent() -> int | None:
    """Bytes of the frames that this host's interface has sent; None where there is no interface of its own."""
    names = [name for _, name in socket.if_nameindex()]
    own = DEVICE in names and os.environ.get("GLOO_SOCKET_IFNAME") == DEVICE
    return sent_bytes("", DEVICE) if own else None


def _reported(before: Traffic | None, after: Traffic | None, steps: int) -> dict[str, Any]:
    if before is None or after is None:
        return {"reported": None, "framed": None}
    sent, received = after.sent - before.sent, after.received - before.received
    messages = after.messages - before.messages
    return {"reported": sent / steps, "framed": framed(sent, received, messages) / steps, "messages": messages / steps}


def summarize(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of all ranks' turns of a method."""
    seconds = [one for turn in turns for one in turn["seconds"]]
    middle = statistics.median if turns[0].get("period", 1) == 1 else statistics.fmean
    row: dict[str, Any] = {
        "step_ms": 1e3 * (_unsynchronized_step(turns) if turns[0]["method"] == NO_COMM else middle(seconds)),
        "step_ms_quartiles": [1e3 * one for one in quartiles(seconds)],
        "steps": len(seconds),
    }
    for name in ("nic", "reported", "framed", "messages"):
        known = [turn[name] for turn in turns if turn.get(name) is not None]
        row[name] = statistics.fmean(known) if known else None
    became = dict.fromkeys(turn["became"] for turn in turns if turn.get("became"))
    return {**row, "became": ", ".join(became)} if became else row


def quartiles(values: Sequence[float]) -> list[float]:
    """The first and the third."""
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return [low, high]


def _unsynchronized_step(turns: list[dict[str, Any]]) -> float:
    """The step of ranks that never wait for each other, as long as all of them are at it.

    Single steps would show too little: where ranks share cores, some run ahead, and the last has them for itself.
    """
    rounds: defaultdict[int, list[list[float]]] = defaultdict(list)
    for turn in turns:
        rounds[turn["round"]].append(turn["seconds"])
    return statistics.median(map(while_all_run, rounds.values()))


def while_all_run(ranks: list[list[float]]) -> float:
    """Seconds of a rank's step until the first rank is done: the time over the steps that all have taken by then."""
    end = min(map(sum, ranks))
    # Of the step under way at the end, its share.
    taken = (np.interp(end, (0.0, *accumulate(seconds)), range(len(seconds) + 1)) for seconds in ranks)
    return float(len(ranks) * end / sum(taken))
