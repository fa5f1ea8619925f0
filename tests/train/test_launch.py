import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

import fixtures
from gradwire_lab.launch import RankError, launch, send_message, threads_per_rank


def add_up(rank: int, world: int, x: float) -> tuple[int, float, int]:
    mine = torch.tensor([x * rank])
    dist.all_reduce(mine)
    return rank, mine.item(), torch.get_num_threads()


def chat(rank: int, world: int) -> None:
    for i in range(3):
        send_message((rank, i))


def fail_in_one(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("the straw that broke it")
    dist.barrier()


def die_in_one(rank: int, world: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sleep(rank: int, world: int) -> None:
    send_message(os.getpid())
    time.sleep(1000)


def test_results_come_in_rank_order():
    assert launch(add_up, 3, 2.0) == [(rank, 6.0, threads_per_rank(3)) for rank in range(3)]


def test_news_arrives_in_the_order_of_each_rank():
    heard = []
    launch(chat, 2, on_message=lambda rank, news: heard.append((rank, news)))
    for rank in range(2):
        assert [news for r, news in heard if r == rank] == [(rank, i) for i in range(3)]


def test_messages_sent_outside_of_a_rank_are_dropped():
    assert fixtures.error_text(lambda: send_message("no launcher")) == fixtures.NO_ERROR


def test_an_exception_names_its_rank():
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2 failed:.*fail_in_one.*ValueError: the straw that broke it"):
        launch(fail_in_one, 2)


def test_a_death_names_its_rank():
    with pytest.raises(RankError, match=r"rank 1 of 2 .*SIGKILL"):
        launch(die_in_one, 2)


def test_no_rank_outlives_an_interrupt():
    pids = []

    def hear(rank: int, pid: int) -> None:
        pids.append(pid)
        if len(pids) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(sleep, 2, on_message=hear)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_no_ranks_are_refused():
    with pytest.raises(ValueError, match="at least one"):
        launch(chat, 0)


def test_cores_are_shared_out_unless_somebody_says(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    assert threads_per_rank(1) == cores and threads_per_rank(2 * cores) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_per_rank(1) == threads_per_rank(64) == 3
