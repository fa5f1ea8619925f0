"""Between hosts and inside them: bytes counted outside the package agree with both figures of `wire.report()`.

Two ranks share each of two network namespaces. What they send each other goes through its loopback device, what they
send to the other host through its interface, and the kernel counts the two apart. So does a process group with gloo
beneath it, one for each group that a rank is in.
"""

import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from tests.wire.test_captured_bytes import MESSAGE, MESSAGES, Capture, Case, take_steps

from gradwire.integrations.report import Report
from namespaces import Counters, Unavailable, enter, meet, namespaces, read
from spawn import COLLECTIVE_TIMEOUT, run_ranks

HOSTS = [[0, 1], [2, 3]]
STEPS = 2
CASES = {
    "allgather": Case("topk(0.06)", None, 1024),
    "two_way": Case("int4", "two_way", 1024),
}
DOORS = ("loop", "ddp")


class Numbered(Capture):
    """One notebook for each group, in the order in which they were made."""

    made: list["Numbered"] = []  # noqa: RUF012 - all groups of a process share it

    def __init__(self, store: dist.Store, rank: int, world: int, timeout: Any) -> None:
        super().__init__(store, rank, world, timeout)
        self.notes = []
        self.made.append(self)


class Account(NamedTuple):
    """One rank's steps: as reported, as handed to torch by group, and as the kernel counted them for its host."""

    report: Report
    whole: list[tuple[str, int, float]]
    inside: list[tuple[str, int, float]]
    between: list[tuple[str, int, float]]
    counted: Counters | None
    looped: int


def looped() -> int:
    """Bytes that ranks of this namespace have sent each other."""
    return int(Path("/proc/thread-self/net/dev").read_text().split("lo:")[1].split()[8])


def watch(rank: int, world: int, folder: str, names: list[str] | None) -> dict[tuple[str, str], Account]:
    store = dist.FileStore(f"{folder}/meeting", world)
    meet(store, world, "begun")
    dist.destroy_process_group()
    if names is not None:
        enter(names[rank // 2])
    dist.Backend.register_backend("capture", Numbered, devices=["cpu"])
    dist.init_process_group("capture", store=store, rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT)
    return {(name, door): account(name, door, rank, store, names is not None) for name in CASES for door in DOORS}


def account(name: str, door: str, rank: int, store: dist.Store, counting: bool) -> Account:
    Numbered.made.clear()
    steps = take_steps(STEPS, CASES[name], door, rank, across=HOSTS)
    next(steps)
    whole, inside, between = Numbered.made[-3:]
    for group in Numbered.made:
        group.notes.clear()
    meet(store, 4, f"{name}, {door}, begun")
    before, turned = (read(), looped()) if counting else (None, 0)
    meet(store, 4, f"{name}, {door}, read")
    report = next(steps)
    meet(store, 4, f"{name}, {door}, ended")
    counted, around = (read().since(before), looped() - turned) if before is not None else (None, 0)
    meet(store, 4, f"{name}, {door}, over")
    return Account(report, whole.notes, inside.notes, between.notes, counted, around)


@pytest.fixture(scope="module")
def watched() -> tuple[list[dict[tuple[str, str], Account]], str]:
    """What every rank saw, and why the kernel did not count, if so."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with namespaces(2) as names:
                for name in names:
                    subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True, timeout=10)
                return run_ranks(watch, 4, folder, names), ""
        except Unavailable as why:
            return run_ranks(watch, 4, folder, None), str(why)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", CASES)
def test_the_report_equals_the_bytes_given_to_torch(watched: Any, name: str, door: str) -> None:
    for accounts in watched[0]:
        seen = accounts[name, door]
        assert sum(sent for _, _, sent in seen.between) == pytest.approx(seen.report.sent, rel=1e-6)
        assert sum(sent for _, _, sent in seen.inside) == pytest.approx(seen.report.sent_inside, rel=1e-6)
        assert not seen.whole, "no step involves all ranks at once"
        # Between hosts nothing is dense; inside, each gradient goes to its server, and each outcome back.
        assert max(n for _, n, _ in seen.between) < seen.report.dense / STEPS / 5
        assert seen.report.wire_ratio > 5
        assert (seen.report.hosts, seen.report.world) == (2, 4)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", CASES)
def test_the_report_equals_the_bytes_that_the_kernel_sent(watched: Any, name: str, door: str) -> None:
    ranks, why = watched
    if why:
        pytest.skip(why)
    for host in HOSTS:
        seen = [ranks[rank][name, door] for rank in host]
        gloo = MESSAGE * sum(MESSAGES[operation] for account in seen for operation, _, _ in account.between)
        sent = sum(account.report.sent for account in seen)
        assert seen[0].counted is not None
        assert seen[0].counted.carried(sent + gloo, rel=0.03, leeway=5000), (seen[0].counted, sent + gloo)
        inside = sum(account.report.sent_inside for account in seen)
        assert 0.99 * inside < seen[0].looped < 1.05 * inside + 50_000
