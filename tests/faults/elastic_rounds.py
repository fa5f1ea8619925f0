"""Elastic rounds of local steps: workers are killed in rounds that are drawn, and come back.

Four workers train a log-linear model on the bytes of this project's pages. Half of those that come back have a saved
state. The training goes on, all workers end with the same outer weights, their loss is within one percent of that of a
training without a fault, and no process is left.

The loss of this model has one minimum, and the rate is such that half the steps would end more than one percent above.
Inner steps are SGD's: a worker that comes back with nothing lacks its momentum alone, while AdamW without its moments
takes other steps for a while.
"""

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradwire
from faults.campaign import Campaign
from faults.processes import children, gone

WORLD, H, SPEC = 4, 5, "sparseloco(H=5, k=256)"
KILLS, ROUNDS = 30, 240
TIMEOUT, LIMIT_SECONDS = 10.0, 400.0
BATCH, LENGTH, RATE = 8, 32, 4.0
PAGES = Path(__file__).parents[2] / "docs"


class Net(nn.Module):
    """A log-linear model of the next byte, given the last two."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.before = nn.Embedding(256, 256), nn.Embedding(256, 256)
        for table in (self.last, self.before):
            nn.init.zeros_(table.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x) + self.before(F.pad(x, (1, 0))[:, :-1])


@cache
def text() -> Tensor:
    pages = b"".join(path.read_bytes() for path in sorted(PAGES.glob("*.md")))
    return torch.frombuffer(bytearray(pages[:200_000]), dtype=torch.uint8).long()


def batch(seed: int, size: int = BATCH) -> Tensor:
    starts = torch.randint(0, len(text()) - LENGTH - 1, (size,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([text()[start : start + LENGTH + 1] for start in starts.tolist()])


def loss(net: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


def take_step(net: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int, steps: int) -> None:
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["lr"] = RATE * (1 - step / steps)
    loss(net, batch(WORLD * step + rank)).backward()
    optimizer.step()


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9, nesterov=True)


def evaluate(net: nn.Module) -> float:
    with torch.no_grad():
        return float(loss(net, batch(-1, 256)))


@cache
def undisturbed(steps: int) -> float:
    """The loss of the same training without a fault, of all workers in this process."""
    nets = [Net() for _ in range(WORLD)]
    optimizers = [sgd(net) for net in nets]
    outer = gradwire.local_lockstep(nets, optimizers, SPEC)
    for step in range(steps):
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            take_step(net, optimizer, rank, step, steps)
        outer()
    return evaluate(nets[0])


# -- workers -----------------------------------------------------------------------------------------------------------


def work(rank: int, life: int, folder: str, pipe: Connection, steps: int, rest: float, resumes: bool) -> None:
    """Train until the last step, or until this process is killed. Near the end, those that come back are waited for."""
    torch.set_num_threads(1)
    net, saved = Net(), Path(folder, f"state-{rank}.pt")
    optimizer = sgd(net)
    place: dict[str, Any] = {"meeting": folder, "rank": rank, "world": WORLD, "timeout": TIMEOUT}
    outer: Any = gradwire.local(net, optimizer, SPEC, elastic=True, **place)
    if resumes and saved.exists():
        state = torch.load(saved)
        outer.load_state_dict(state["outer"])
        optimizer.load_state_dict(state["optimizer"])
    Path(folder, f"joined-{rank}-{life}").touch()
    while outer.steps < steps:
        take_step(net, optimizer, rank, outer.steps, steps)
        outer()
        if outer.inside == 0:
            Path(folder, f"steps-{rank}").write_text(str(outer.steps))
            with Path(folder, f"rounds-{rank}").open("a") as counted:
                counted.write(f"{outer.steps}\n")
            torch.save({"outer": outer.state_dict(), "optimizer": optimizer.state_dict()}, saved.with_suffix(".new"))
            saved.with_suffix(".new").rename(saved)
            time.sleep(rest)
            while outer.steps >= 0.8 * steps and not Path(folder, "all").exists():
                time.sleep(0.01)
    with outer.averaged():
        pipe.send((outer.steps, evaluate(net), outer.group.rounds.history, outer.group.missed, outer.group.resyncs))
    outer.close()


@dataclass
class Group:
    """The workers of one training.

    Attributes:
        folder: Where they meet, and tell how far they are.
        steps: That they take.
        rest: Seconds that they rest after a round.
    """

    folder: str
    steps: int
    rest: float
    processes: dict[int, Any] = field(default_factory=dict)
    pipes: dict[int, Connection] = field(default_factory=dict)
    lives: dict[int, int] = field(default_factory=dict)

    def start(self, rank: int, resumes: bool = False) -> None:
        context = multiprocessing.get_context("forkserver")
        life = self.lives[rank] = self.lives.get(rank, -1) + 1
        self.pipes[rank], theirs = context.Pipe(duplex=False)
        args = rank, life, self.folder, theirs, self.steps, self.rest, resumes
        self.processes[rank] = context.Process(target=work, args=args, daemon=True)
        self.processes[rank].start()

    def kill(self, rank: int) -> None:
        process = self.processes.pop(rank)
        os.kill(process.pid, signal.SIGKILL)
        process.join()

    def joined(self) -> list[int]:
        """The workers that take part."""
        return [rank for rank in self.processes if Path(self.folder, f"joined-{rank}-{self.lives[rank]}").exists()]

    def furthest(self) -> int:
        files = Path(self.folder).glob("steps-*")
        return max((int(path.read_text() or 0) for path in files), default=0)

    def wait(self, workers: int, steps: int = 0) -> bool:
        """Until so many workers take part, and one has taken so many steps. Returns whether that came about."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while (len(self.joined()) < workers or self.furthest() < steps) and time.monotonic() < deadline:
            time.sleep(0.01)
        return time.monotonic() < deadline

    def share(self) -> float:
        """The share of all rounds that workers took part in, on average."""
        taken = [{*path.read_text().split()} for path in Path(self.folder).glob("rounds-*")]
        return sum(map(len, taken)) * H / (WORLD * self.steps)

    def results(self) -> list[tuple[Any, ...]] | None:
        """What all workers found in the end; None if one does not end."""
        Path(self.folder, "all").touch()
        deadline = time.monotonic() + LIMIT_SECONDS
        ready = [self.pipes[rank].poll(max(0.0, deadline - time.monotonic())) for rank in range(WORLD)]
        return [self.pipes[rank].recv() for rank in range(WORLD)] if all(ready) else None


@contextmanager
def group(steps: int, rest: float) -> Iterator[Group]:
    with tempfile.TemporaryDirectory() as folder:
        made = Group(folder, steps, rest)
        try:
            for rank in range(WORLD):
                made.start(rank)
            yield made
        finally:
            for process in made.processes.values():
                process.join(TIMEOUT)
                process.kill()
                process.join()


# -- faults ------------------------------------------------------------------------------------------------------------


def run(
    campaign: Campaign, kills: int = KILLS, rounds: int = ROUNDS, rest: float = 0.06, tolerance: float = 0.01
) -> None:
    torch.set_num_threads(1)
    while campaign.going():
        before, found, share = children(), None, 0.0
        with group(rounds * H, rest) as workers:
            if strike(campaign, workers, kills):
                found, share = workers.results(), workers.share()
        if found is None:
            campaign.fail("hang", f"workers {workers.joined()} came to step {workers.furthest()}")
        else:
            check(campaign, found, rounds * H, tolerance, share)
        campaign.expect(gone(lambda before=before: children() - before), "orphan", "after the last worker has ended")


def strike(campaign: Campaign, workers: Group, kills: int) -> bool:
    """Kill workers in rounds that are drawn; each comes back after a while. Returns whether all did."""
    draw = campaign.random
    for step in sorted(draw.randrange(int(0.8 * workers.steps)) for _ in range(kills)):
        if not workers.wait(2, step):
            return False
        victim, resumes = draw.choice(workers.joined()), draw.random() < 0.5
        workers.kill(victim)
        campaign.made("killed, back with its state" if resumes else "killed, back with nothing")
        time.sleep(draw.uniform(0.0, 0.4))
        workers.start(victim, resumes)
    return workers.wait(WORLD)


def check(campaign: Campaign, found: list[tuple[Any, ...]], steps: int, tolerance: float, share: float) -> None:
    ended, losses, histories, missed, resyncs = zip(*found, strict=True)
    campaign.expect(len({*histories}) == 1, "wrong result", f"histories {histories}")
    campaign.expect({*ended} == {steps}, "wrong result", f"workers ended at steps {ended}")
    right = undisturbed(steps)
    worst = max(losses, key=lambda loss: abs(loss - right))
    figures = {"steps": steps, "loss": worst, "undisturbed": right, "missed": missed, "resyncs": resyncs}
    figures["rounds taken part in"] = round(share, 3)
    campaign.facts.setdefault("runs", []).append(figures)
    campaign.expect(abs(worst - right) <= tolerance * right, "wrong result", f"{figures}")
