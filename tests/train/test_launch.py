import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

import fixtures
from gradwire_lab import launch as launching
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


def die_in_a_message(rank: int, world: int) -> None:
    if rank == 1:
        os.write(launching._launcher.fileno(), (100).to_bytes(4) + b"half")  # the length of a message, and its begin
        os.kill(os.getpid(), signal.SIGKILL)


def sleep(rank: int, world: int) -> None:
    send_message(os.getpid())
    time.sleep(1000)


def fail_beside_a_sleeper(rank: int, world: int) -> None:
    send_message(os.getpid())
    if rank == 1:
        raise ValueError("the straw that broke it")
    time.sleep(1000)


LATE = """
import signal, time
from gradwire_lab.launch import RankError, launch

def late(rank, world):
    if rank == 1:
        raise ValueError("the straw that broke it")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1.0)

if __name__ == "__main__":
    try:
        launch(late, 2, backend="", grace_seconds=0.0)
    except RankError as error:
        print(error)
"""


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


def test_a_death_amid_a_message_names_its_rank():
    """It was an OSError, got end of file during message, which named no rank and restarted none."""
    with pytest.raises(RankError, match=r"rank 1 of 2 .*SIGKILL"):
        launch(die_in_a_message, 2, backend="")


def test_a_rank_that_is_not_gone_at_once_hides_no_error(monkeypatch):
    """Where other work held the cores, the error was that a running process cannot be closed."""
    pids = {}
    monkeypatch.setattr(launching, "KILL_SECONDS", 0.1)
    for stop in ("terminate", "kill"):
        monkeypatch.setattr(launching.ForkServerProcess, stop, lambda process: None)
    try:
        with pytest.raises(RankError, match="the straw that broke it"):
            launch(fail_beside_a_sleeper, 2, on_message=lambda rank, pid: pids.update({rank: pid}))
    finally:
        with suppress(ProcessLookupError):  # it ends by itself, some seconds after its launcher has given up
            os.kill(pids[0], signal.SIGKILL)


def test_a_result_that_comes_too_late_is_no_traceback(tmp_path):
    """A rank that was done after its launcher had given up printed that a pipe is broken."""
    (tmp_path / "late.py").write_text(LATE)
    done = subprocess.run([sys.executable, tmp_path / "late.py"], capture_output=True, text=True, timeout=200)
    assert "the straw that broke it" in done.stdout
    assert done.stderr == ""


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
