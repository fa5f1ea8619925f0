"""An emulated link: as slow as its formula, shared by concurrent messages, and with the same results."""

import threading
import time
from collections.abc import Callable

import pytest
import torch

from gradwire.comm import emulated as emulated_module
from gradwire.comm.alphabeta import Cost
from gradwire.comm.backend import SingleBackend
from gradwire.comm.collectives import AllGatherOp, AllReduceOp, AllToAllOp, BroadcastOp, Collective
from gradwire.comm.emulated import VARIABLE, EmulatedBackend, SharedLink, maybe_emulated
from spawn import run_ranks


class FourRanks(SingleBackend):
    """A world of four that answers at once."""

    world = 4


def emulated(spec: str = "10mbit,2ms") -> EmulatedBackend:
    return EmulatedBackend(FourRanks(), spec, SharedLink())


class Clock:
    """Time that stands still: how long each message would wait."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return 100.0

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(emulated_module, "time", made)
    return made


X = torch.zeros(20_000)
SHARES = (20_000,) * 4


@pytest.mark.parametrize(
    "collective",
    [AllReduceOp(X, "sum"), AllGatherOp(X), AllToAllOp(X.view(torch.uint8), SHARES, SHARES), BroadcastOp(X)],
    ids=lambda one: type(one).__name__,
)
def test_a_collective_takes_the_time_of_the_formula(collective: Collective, clock: Clock) -> None:
    link = emulated()
    link.run(collective)
    expected = sum(link.cost(collective))
    assert expected > 0.05
    assert clock.slept == [pytest.approx(expected)]


def test_concurrent_messages_share_the_link(clock: Clock) -> None:
    shared = SharedLink()
    links = [EmulatedBackend(FourRanks(), "10mbit", shared) for _ in range(3)]
    threads = [threading.Thread(target=link.run, args=(BroadcastOp(X),)) for link in links]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one = links[0].cost(BroadcastOp(X)).busy
    assert sorted(clock.slept) == pytest.approx([one, 2 * one, 3 * one])


def test_delays_overlap_where_bytes_do_not() -> None:
    shared = SharedLink()
    assert shared.reserve(10.0, Cost(1.0, 5.0)) == 16.0
    assert shared.reserve(10.0, Cost(1.0, 5.0)) == 17.0
    assert shared.reserve(30.0, Cost(1.0, 0.0)) == 31.0


def test_jitter_and_loss_cannot_be_emulated() -> None:
    with pytest.raises(ValueError, match="jitter"):
        emulated("10mbit,20ms,1ms")


def test_the_environment_asks_for_an_emulated_link(monkeypatch: pytest.MonkeyPatch) -> None:
    link = FourRanks()
    monkeypatch.delenv(VARIABLE, raising=False)
    assert maybe_emulated(link) is link
    monkeypatch.setenv(VARIABLE, "1gbit")
    assert isinstance(maybe_emulated(link), EmulatedBackend)


TRIES = 5  # of which the fastest is not much longer than the formula, on a machine that others use too


def timed(run: Callable[[], object], late: float = 0.0) -> list[tuple[float, float]]:
    """When this rank began, and when it was done, by the clock that all ranks of this machine share."""
    moments = []
    for _ in range(TRIES):
        time.sleep(late)
        began = time.monotonic()
        run()
        moments.append((began, time.monotonic()))
    return moments


def late_swap(rank: int, world: int) -> tuple[list[tuple[float, float]], float]:
    """Two neighbors exchange data, and one comes late."""
    from gradwire.comm.torch_backend import connect

    link = EmulatedBackend(connect(), "50mbit", SharedLink())
    each = (0, 500_000) if rank == 0 else (500_000, 0)
    swap = AllToAllOp(torch.zeros(500_000, dtype=torch.uint8), each, each)
    return timed(lambda: link.run(swap), late=0.1 * rank), sum(link.cost(swap))


def test_an_exchange_begins_when_the_later_rank_has_come() -> None:
    (first, expected), (second, _) = run_ranks(late_swap, 2)
    later = [max(one, other) for (one, _), (other, _) in zip(first, second, strict=True)]
    assert any(other - one > 0.05 for (one, _), (other, _) in zip(first, second, strict=True))
    for mine in (first, second):
        took = [ended - began for (_, ended), began in zip(mine, later, strict=True)]
        assert expected - 1e-6 <= min(took) < expected + 0.05


def sums(rank: int, world: int) -> tuple[list[float], list[tuple[float, float]], float]:
    from gradwire.comm.torch_backend import connect

    link = EmulatedBackend(connect(), "20mbit", SharedLink())
    x = torch.full((50_000,), float(rank + 1))
    moments = timed(lambda: link.run(AllReduceOp(x, "sum")))
    return link.run(AllReduceOp(x, "sum"))[:2].tolist(), moments, sum(link.cost(AllReduceOp(x, "sum")))


def test_ranks_agree_on_the_sum_and_on_the_time() -> None:
    for total, moments, expected in run_ranks(sums, 2):
        assert total == [3.0, 3.0]
        assert expected - 1e-6 <= min(ended - began for began, ended in moments) < expected + 0.05
