"""An emulated link: as slow as its formula, shared by concurrent messages, and with the same results."""

import threading
import time

import pytest
import torch

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


X = torch.zeros(20_000)
SHARES = (20_000,) * 4


@pytest.mark.parametrize(
    "collective",
    [AllReduceOp(X, "sum"), AllGatherOp(X), AllToAllOp(X.view(torch.uint8), SHARES, SHARES), BroadcastOp(X)],
    ids=lambda one: type(one).__name__,
)
def test_a_collective_takes_the_time_of_the_formula(collective: Collective) -> None:
    link = emulated()
    began = time.perf_counter()
    link.run(collective)
    took = time.perf_counter() - began
    expected = sum(link.cost(collective))
    assert expected > 0.05
    assert expected <= took < expected + 0.1


def test_concurrent_messages_share_the_link() -> None:
    shared, ends = SharedLink(), []
    links = [EmulatedBackend(FourRanks(), "10mbit", shared) for _ in range(3)]
    began = time.perf_counter()

    def send(link: EmulatedBackend) -> None:
        link.run(BroadcastOp(X))
        ends.append(time.perf_counter() - began)

    threads = [threading.Thread(target=send, args=(link,)) for link in links]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one = links[0].cost(BroadcastOp(X)).busy
    assert sorted(ends) == pytest.approx([one, 2 * one, 3 * one], abs=0.08)


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


def late_swap(rank: int, world: int) -> tuple[float, float]:
    """Two neighbors exchange data, and one comes late."""
    from gradwire.comm.torch_backend import connect

    link = EmulatedBackend(connect(), "50mbit", SharedLink())
    each = (0, 500_000) if rank == 0 else (500_000, 0)
    swap = AllToAllOp(torch.zeros(500_000, dtype=torch.uint8), each, each)
    link.run(swap)  # connections are made
    link.run(AllReduceOp(torch.zeros(1), "sum"))
    began = time.perf_counter()
    time.sleep(0.3 * rank)
    link.run(swap)
    return time.perf_counter() - began, sum(link.cost(swap))


def test_an_exchange_begins_when_the_later_rank_has_come() -> None:
    for took, expected in run_ranks(late_swap, 2):
        assert 0.3 + expected - 0.02 <= took < 0.3 + expected + 0.2


def ranks(rank: int, world: int) -> tuple[list[float], float, float]:
    from gradwire.comm.torch_backend import connect

    plain = connect()
    link = EmulatedBackend(plain, "20mbit", SharedLink())
    x = torch.full((50_000,), float(rank + 1))
    began = time.perf_counter()
    total = link.run(AllReduceOp(x, "sum"))
    return total[:2].tolist(), time.perf_counter() - began, sum(link.cost(AllReduceOp(x, "sum")))


def test_ranks_agree_on_the_sum_and_on_the_time() -> None:
    for total, took, expected in run_ranks(ranks, 2):
        assert total == [3.0, 3.0]
        assert expected <= took < expected + 0.25
