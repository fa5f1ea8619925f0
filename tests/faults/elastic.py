"""Ranks of elastic gossip, in processes, that are killed and come back, or stall, at steps that are drawn.

Each rank pulls its model towards a target of its own. Whoever is away, all ranks go on, take part again, and end near
the mean of the targets. A rank that comes back takes a neighbor's step, and none waits for long.
"""

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

import gradwire
from faults.campaign import Campaign
from faults.processes import LIMIT_SECONDS, children, gone
from gossip_fixtures import LENGTH, Vector
from gradwire.kernels.dispatch import reference_only
from gradwire_lab.launch import RankError, launch, send_message

WORLD, STEPS, TIMEOUT = 4, 240, 2.0  # steps that go on for longer than the longest stall
STEP_SECONDS = 0.02  # so that a process can start again while the others train
WAIT_SECONDS = 20.0  # of one round: a few times the timeout, since other work may hold the cores
FAR, NEAR = 10.0, 1.0  # where models start, and how far from the mean of all targets they may end
METHODS = (("choco(ring, gamma=0.5)", "sign"), ("choco(ring)", "topk(0.3)"), ("dpsgd(ring)", None))
TWIN = "a second process joins as a rank that is there"
FAULTS = {  # how many ranks; the signals that each gets, one in each life; for how long it is stopped
    "a rank is killed and comes back": (1, ("SIGKILL",), 0.0),
    "a rank is ended and comes back": (1, ("SIGTERM",), 0.0),
    "a rank is killed in both of its lives": (1, ("SIGKILL", "SIGKILL"), 0.0),
    "two ranks are killed in one step": (2, ("SIGKILL",), 0.0),
    "a rank stalls for less than the timeout": (1, ("SIGSTOP",), 0.3),
    "a rank stalls for longer than the timeout": (1, ("SIGSTOP",), 2 * TIMEOUT),
    "two ranks stall for longer than the timeout": (2, ("SIGSTOP",), 2 * TIMEOUT),
    TWIN: (1, (TWIN,), 0.0),
}


class Fault(NamedTuple):
    method: int
    victims: tuple[int, ...]
    at: int
    signals: tuple[str, ...]


class Ended(NamedTuple):
    step: int
    began: int  # the step that it took over
    lives: int
    farthest: float  # from the mean of all targets
    longest: float  # seconds of a round
    error: str = ""  # with which it left


def targets() -> torch.Tensor:
    return 0.5 * torch.randn(WORLD, LENGTH, generator=torch.Generator().manual_seed(0))


def strike(folder: str, rank: int, fault: Fault, step: int) -> None:
    """Send this process the signal of its present life, at its step."""
    struck = list(Path(folder).glob(f"struck-{rank}-*"))
    if rank not in fault.victims or len(struck) >= len(fault.signals) or step < fault.at + 10 * len(struck):
        return
    Path(folder, f"struck-{rank}-{len(struck)}").touch()
    name = fault.signals[len(struck)]
    if name == TWIN:
        return
    if name == "SIGSTOP":
        send_message(os.getpid())
    os.kill(os.getpid(), getattr(signal, name))


def work(rank: int, world: int, folder: str, fault: Fault) -> Ended:
    """Train as a rank; the process beyond all ranks joins as the victim, when that has come to its step."""
    if rank == WORLD:
        rank = fault.victims[0]
        while not Path(folder, f"struck-{rank}-0").exists():
            time.sleep(STEP_SECONDS)
    try:
        return train(rank, folder, fault)
    except RuntimeError as error:
        if "another process has joined" not in str(error):
            raise
        return Ended(0, 0, 1, 0.0, 0.0, str(error))


@reference_only()
def train(rank: int, folder: str, fault: Fault) -> Ended:
    torch.set_num_threads(1)
    model, (spec, codec), own = Vector(), METHODS[fault.method], targets()
    torch.nn.utils.vector_to_parameters(torch.full((LENGTH,), FAR), model.parameters())
    Path(folder, f"life-{rank}-{os.getpid()}").touch()
    place: dict[str, Any] = {"meeting": folder, "rank": rank, "world": WORLD, "timeout": TIMEOUT}
    net: Any = gradwire.gossip(model, spec, codec, elastic=True, **place)
    optimizer, began, longest = torch.optim.SGD(model.parameters(), lr=0.1), net.step, 0.0
    while net.step < STEPS:
        strike(folder, rank, fault, net.step)
        time.sleep(STEP_SECONDS)
        optimizer.zero_grad()
        x = torch.nn.utils.parameters_to_vector(model.parameters())
        (0.5 * (x - own[rank]).square().sum()).backward()
        optimizer.step()
        asked = time.monotonic()
        net()
        longest = max(longest, time.monotonic() - asked)
    x = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    net.close()
    lives = len(list(Path(folder).glob(f"life-{rank}-*")))
    return Ended(net.step, began, lives, float((x - own.mean(0)).abs().max()), longest)


def check(campaign: Campaign, where: str, rank: int, end: Ended | None, fault: Fault) -> None:
    """What one rank returned; None of one that came back when the others were done."""
    if end is None or end.error:
        campaign.expect(rank in fault.victims, "wrong result", f"{where}: rank {rank} is gone")
        return
    campaign.expect(end.farthest < NEAR, "wrong result", f"{where}: rank {rank} ends {end.farthest} away")
    campaign.expect(end.step >= STEPS, "wrong result", f"{where}: rank {rank} ends at step {end.step}")
    campaign.expect(end.longest < WAIT_SECONDS, "hang", f"{where}: rank {rank} waited {end.longest:.0f} s in a round")
    came_back = end.lives > 1
    campaign.facts["ranks that came back"] = campaign.facts.get("ranks that came back", 0) + came_back
    campaign.expect(
        not came_back or end.began > 0, "wrong result", f"{where}: rank {rank} came back, and began at step 0"
    )


def fault_of_elastic(campaign: Campaign) -> None:
    draw = campaign.random
    kind = draw.choice(list(FAULTS))
    count, signals, stopped = FAULTS[kind]
    method, victims = draw.randrange(len(METHODS)), tuple(draw.sample(range(WORLD), count))
    fault = Fault(method, victims, draw.randrange(5, STEPS // 6), signals)
    campaign.made(kind)
    where, before = f"{METHODS[method]}, {kind}: {fault}", children()

    def go_on(rank: int, process: int) -> None:
        time.sleep(stopped / count)
        os.kill(process, signal.SIGCONT)

    options: dict[str, Any] = {"backend": "", "restarts": 2, "limit_seconds": LIMIT_SECONDS, "threads": 1}
    with tempfile.TemporaryDirectory() as folder:
        try:
            ends = launch(work, WORLD + (kind == TWIN), folder, fault, on_message=go_on, **options)
            for rank, end in enumerate(ends):
                check(campaign, where, rank if rank < WORLD else victims[0], end, fault)
            left = [end for end in ends if end is not None and end.error]
            campaign.expect(len(left) == (kind == TWIN), "wrong result", f"{where}: {left}")
        except TimeoutError:
            campaign.fail("hang", where)
        except RankError as error:
            campaign.fail("traceback", f"{where}: {error}")
    campaign.expect(gone(lambda: children() - before), "orphan", where)


def run(campaign: Campaign) -> None:
    torch.set_num_threads(1)
    while campaign.going():
        fault_of_elastic(campaign)
