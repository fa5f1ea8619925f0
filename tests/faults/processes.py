"""Process faults: ranks and commands that are killed, stopped or fail, at moments that are drawn.

Ranks of a plain loop, DDP, gossip, elastic gossip and local steps: the launcher names the rank, and no process is left.
Ranks that were only stopped for a while end with the same bits. A `train` command that was ended leaves no process, and
`--resume` ends with the bits of a run without a fault.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fixtures
import gradwire
from faults.campaign import Campaign
from gradwire_lab.launch import RankError, launch, send_message
from training_fixtures import DIGITS, saved

STEPS, WORLD = 12, 3
LIMIT_SECONDS, ORPHAN_SECONDS = 240.0, 30.0  # generous, since other work may hold the cores
MARK = "GRADWIRE_FAULT_MARK"
COMMAND = [sys.executable, "-c", "from gradwire_lab.command import run; run()"]


# -- ranks -------------------------------------------------------------------------------------------------------------


def plain(rank: int, step: Callable[[int], None], options: dict[str, Any]) -> torch.nn.Module:
    net = fixtures.model()
    wire, optimizer = gradwire.compress(net, **options), fixtures.sgd(net)
    for number in range(STEPS):
        step(number)
        fixtures.plain_loop(net, wire, optimizer, range(number, number + 1), rank)
    return net


def ddp(rank: int, step: Callable[[int], None], options: dict[str, Any]) -> torch.nn.Module:
    net = fixtures.model()
    outer, optimizer = fixtures.ddp(net), fixtures.sgd(net)
    gradwire.compress(outer, **options)
    for number in range(STEPS):
        step(number)
        optimizer.zero_grad()
        fixtures.loss(outer, rank, number).backward()
        optimizer.step()
    return net


def gossip(rank: int, step: Callable[[int], None], options: dict[str, Any]) -> torch.nn.Module:
    net = fixtures.model()
    handle, optimizer = gradwire.gossip(net, **options), fixtures.sgd(net)
    for number in range(STEPS):
        step(number)
        optimizer.zero_grad()
        fixtures.loss(net, rank, number).backward()
        optimizer.step()
        handle()
    return net


def local(rank: int, step: Callable[[int], None], options: dict[str, Any]) -> torch.nn.Module:
    net = fixtures.model()
    optimizer = fixtures.sgd(net)
    handle = gradwire.local(net, optimizer, **options)
    for number in range(STEPS):
        step(number)
        optimizer.zero_grad()
        fixtures.loss(net, rank, number).backward()
        optimizer.step()
        handle()
    return net


JOBS: dict[str, tuple[Callable[..., torch.nn.Module], list[dict[str, Any]]]] = {
    "plain loop": (plain, [{"spec": "topk(0.1)"}, {"spec": "int8", "exchange": "two_way"}, {"spec": "powersgd(2)"}]),
    "DDP": (ddp, [{"spec": "topk(0.1) | sign"}, {"spec": "fp16"}, {"spec": "dgc(0.1)"}]),
    "gossip": (gossip, [{"spec": "choco(ring, gamma=0.5)", "codec": "sign"}, {"spec": "dpsgd(ring)"}]),
    "local steps": (local, [{"spec": "diloco(H=3)"}, {"spec": "local_sgd(H=4)"}]),
}


def fail_by_itself(how: str) -> None:
    """End this process, or stop it until its launcher has it go on."""
    if how == "an exception":
        raise ValueError("this rank fails")
    if how == "exit":
        os._exit(3)
    send_message((how, os.getpid()))
    os.kill(os.getpid(), getattr(signal, how))
    time.sleep(0.05)


def work(rank: int, world: int, job: str, index: int, victim: int, at: int, how: str) -> dict[str, Tensor]:
    """A short training, in which one rank has a fault."""

    def step(number: int) -> None:
        if rank == victim and number == at and how:
            fail_by_itself(how)

    make, several = JOBS[job]
    return fixtures.tensors(make(rank, step, several[index]))


@cache
def without_fault(job: str, index: int) -> list[dict[str, Tensor]]:
    return launch(work, WORLD, job, index, 0, 0, "", limit_seconds=LIMIT_SECONDS, threads=1)


RANK_FAULTS = ("SIGKILL", "SIGTERM", "SIGSEGV", "SIGABRT", "SIGBUS", "an exception", "exit", "SIGSTOP")


def fault_of_rank(campaign: Campaign) -> None:
    draw = campaign.random
    job = draw.choice(list(JOBS))
    index, victim, at = draw.randrange(len(JOBS[job][1])), draw.randrange(WORLD), draw.randrange(STEPS)
    how = draw.choice(RANK_FAULTS)
    campaign.made(f"{job}: {how}")
    where = f"{job} {JOBS[job][1][index]}, rank {victim} at step {at}: {how}"
    right = without_fault(job, index)
    before, began = children(), time.monotonic()
    try:
        options: dict[str, Any] = {"timeout": timedelta(seconds=120), "limit_seconds": LIMIT_SECONDS, "threads": 1}
        found = launch(work, WORLD, job, index, victim, at, how, on_message=go_on, **options)
    except RankError as error:
        named = f"rank {victim}" in str(error)
        campaign.expect(how != "SIGSTOP" and named, "wrong result", f"{where}: {error}")
    except TimeoutError:
        campaign.fail("hang", where)
    except Exception as error:
        campaign.fail("traceback", f"{where}: {error!r}")
    else:
        same = all(fixtures.same(one, other) for one, other in zip(found, right, strict=True))
        campaign.expect(how == "SIGSTOP" and same, "wrong result", f"{where}: it ended as if nothing had happened")
    slow = time.monotonic() - began
    campaign.expect(slow < LIMIT_SECONDS, "hang", f"{where}: it took {slow:.0f} s")
    campaign.expect(gone(lambda: children() - before), "orphan", where)


def go_on(rank: int, message: Any) -> None:
    """A rank has stopped itself: wait a little, and let it go on."""
    how, process = message
    if how == "SIGSTOP":
        time.sleep(0.3)
        os.kill(process, signal.SIGCONT)


def children() -> set[int]:
    """The fork server's processes."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "stat").read_text().rpartition(")")[2].split()
            found |= {int(folder.name)} if int(words[1]) in _servers() and words[0] != "Z" else set()
        except (OSError, IndexError, ValueError):
            continue
    return found


def _servers() -> set[int]:
    from multiprocessing import forkserver

    return {forkserver._forkserver._forkserver_pid}


# -- commands ----------------------------------------------------------------------------------------------------------

RECIPES = {
    "train, top-k": ("sync.spec=topk(0.05)",),
    "train, DGC": ("sync.spec=dgc(0.05)",),
    "train, gossip": ("gossip.method=choco", "gossip.options={gamma=0.5}", "gossip.codec=sign"),
}
SMALL = (*DIGITS, "train.epochs=6", "train.save_every=2")
COMMAND_FAULTS = {
    "SIGKILL of the command": (signal.SIGKILL, "command"),
    "SIGTERM of the command": (signal.SIGTERM, "command"),
    "SIGINT of the command": (signal.SIGINT, "command"),
    "SIGHUP of the command": (signal.SIGHUP, "command"),
    "SIGKILL of a rank": (signal.SIGKILL, "rank"),
    "SIGSTOP of a rank": (signal.SIGSTOP, "rank"),
}


def words(recipe: str, folder: Path, *more: str) -> list[str]:
    settings = [word for one in (*SMALL, *RECIPES[recipe]) for word in ("--set", one)]
    return [*COMMAND, "train", "digits", "--workers", "2", "--folder", str(folder), *settings, *more]


def marked(mark: str) -> dict[int, str]:
    """The processes with a mark in their environment, and their command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


def gone(left: Callable[[], Any], seconds: float = ORPHAN_SECONDS) -> bool:
    deadline = time.monotonic() + seconds
    while left() and time.monotonic() < deadline:
        time.sleep(0.1)
    return not left()


class Commands:
    """`train` commands in a folder."""

    def __init__(self, root: Path) -> None:
        self.root, self._ends = root, dict[str, dict[str, Tensor]]()

    def end(self, recipe: str) -> dict[str, Tensor]:
        """The model of a run without a fault."""
        if recipe not in self._ends:
            folder = self.root / recipe.replace(", ", "-")
            subprocess.run(words(recipe, folder), check=True, capture_output=True, timeout=1800)
            self._ends[recipe] = saved(folder)
        return self._ends[recipe]

    def fault(self, campaign: Campaign) -> None:
        draw = campaign.random
        recipe, kind = draw.choice(list(RECIPES)), draw.choice(list(COMMAND_FAULTS))
        number, whom = COMMAND_FAULTS[kind]
        seconds = draw.uniform(0.5, 12.0)
        campaign.made(f"{recipe}: {kind}")
        where = f"{recipe}, {kind} after {seconds:.1f} s"
        right, folder, mark = self.end(recipe), self.root / f"run-{campaign.total}", uuid.uuid4().hex
        with subprocess.Popen(
            words(recipe, folder), env={**os.environ, MARK: mark}, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
        ) as process:
            strike(process, mark, number, whom, seconds, draw)
            try:
                _, said = process.communicate(timeout=LIMIT_SECONDS)
            except subprocess.TimeoutExpired:
                campaign.fail("hang", where)
                process.kill()
                _, said = process.communicate()
            campaign.expect(b"Traceback" not in said, "traceback", f"{where}: {said[-2000:].decode()}")
        if not gone(lambda: marked(mark)):
            campaign.fail("orphan", f"{where}: {marked(mark)}")
            for orphan in marked(mark):
                os.kill(orphan, signal.SIGKILL)
        again = subprocess.run(words(recipe, folder, "--resume"), capture_output=True, timeout=1800)
        if again.returncode or b"Traceback" in again.stderr:
            campaign.fail("traceback", f"{where}, then --resume: {again.stderr[-2000:].decode()}")
        elif not fixtures.same(saved(folder), right):
            campaign.fail("wrong result", f"{where}: the resumed run ends elsewhere")


def strike(
    process: "subprocess.Popen[bytes]", mark: str, number: int, whom: str, seconds: float, draw: random.Random
) -> None:
    """Send a signal after a while, unless all is over; a rank that was stopped goes on later."""
    try:
        process.wait(seconds)
        return
    except subprocess.TimeoutExpired:
        pass
    target = process.pid
    if whom == "rank":
        ranks = [pid for pid, line in marked(mark).items() if "forkserver" in line]
        if not ranks:
            return
        target = draw.choice(sorted(ranks))
    try:
        os.kill(target, number)
        if number == signal.SIGSTOP:
            time.sleep(1.0)
            os.kill(target, signal.SIGCONT)
    except ProcessLookupError:
        pass


def run(campaign: Campaign, commands: bool = True) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        several = Commands(Path(folder))
        while campaign.going():
            if commands and campaign.random.random() < 0.05:  # which takes many times as long
                several.fault(campaign)
            else:
                fault_of_rank(campaign)
