import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gradwire_lab import launch
from spawn import RankError, run_cases, run_ranks


def add_up(rank: int, world: int, x: torch.Tensor) -> dict[str, object]:
    mine = x * rank
    dist.all_reduce(mine)
    return {"rank": rank, "world": world, "sum": mine, "threads": torch.get_num_threads()}


def fail_in_one(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("the straw that broke it")
    dist.barrier()


def die_in_one(rank: int, world: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_in_one(rank: int, world: int, stubborn: bool, folder: str) -> int:
    if rank == 1:
        if stubborn:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(folder, "hangs").touch()
        time.sleep(1000)
    return rank


def overwrite(rank: int, world: int, x: torch.Tensor) -> torch.Tensor:
    return x.fill_(rank)


def pid(rank: int, world: int, folder: str) -> None:
    Path(folder, f"{rank} {os.getpid()}").touch()
    time.sleep(1000)


def test_results_come_in_rank_order():
    results = run_ranks(add_up, 3, torch.ones(4))
    assert [result["rank"] for result in results] == [0, 1, 2]
    for result in results:
        assert result["world"] == 3
        assert result["threads"] == 1
        assert torch.equal(result["sum"], torch.full((4,), 3.0))


def test_large_results_do_not_block():
    for rank, result in enumerate(run_ranks(overwrite, 2, torch.zeros(1_000_000))):
        assert (result == rank).all()


def test_no_memory_is_shared():
    x = torch.full((8,), 7.0)
    first, second = run_ranks(overwrite, 2, x)
    assert (x == 7).all()
    assert (first == 0).all()
    assert (second == 1).all()


def test_an_exception_names_its_rank():
    with pytest.raises(RankError, match="rank 1 of 2 failed") as caught:
        run_ranks(fail_in_one, 2)
    assert "ValueError: the straw that broke it" in str(caught.value)
    assert "fail_in_one" in str(caught.value)  # the traceback came along


def test_a_death_names_its_rank():
    with pytest.raises(RankError, match=r"rank 1 of 2 .*SIGKILL"):
        run_ranks(die_in_one, 2)


@pytest.fixture
def time_is_up(monkeypatch):
    """Lets the time limit pass when something holds, however long ranks take to start."""

    def when(holds: Callable[[int], bool]) -> None:
        def limited(pipes, seconds):
            while not holds(len(pipes)):
                if ready := wait(pipes, 0.05):
                    return ready
            return wait(pipes, seconds)

        monkeypatch.setattr(launch, "wait", limited)

    return when


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_hang_is_killed_at_the_timeout(stubborn, time_is_up, tmp_path):
    moments = []

    def hangs(running: int) -> bool:
        moments.append(time.monotonic())
        return running == 1 and (tmp_path / "hangs").exists()

    time_is_up(hangs)
    with pytest.raises(TimeoutError, match="from rank 1 of 2"):
        run_ranks(hang_in_one, 2, stubborn, str(tmp_path), timeout=0.1)
    assert time.monotonic() - moments[-1] < 20


def fail_in_case(rank: int, world: int, case: str, log: str) -> str:
    if rank == 0:
        with open(log, "a") as file:
            file.write(case)
    dist.barrier()
    if case in "bd" and rank == 1:
        raise ValueError(f"case {case}")
    dist.barrier()
    return f"{case}{rank}"


def test_a_case_that_fails_hides_no_other(tmp_path):
    answers = run_cases(fail_in_case, 2, {name: name for name in "abcde"}, str(tmp_path / "log"))
    assert {name: answers[name] for name in "ace"} == {name: [f"{name}0", f"{name}1"] for name in "ace"}
    for name in "bd":
        with pytest.raises(RankError, match=f"rank 1 of 2(?s:.*)ValueError: case {name}"):
            answers[name]
    assert (tmp_path / "log").read_text() == "abcde", "every case runs once"


def test_no_child_outlives_the_call(time_is_up, tmp_path):
    time_is_up(lambda _: len(list(tmp_path.iterdir())) == 2)
    with pytest.raises(TimeoutError, match="rank 0, 1"):
        run_ranks(pid, 2, str(tmp_path), timeout=0.1)
    for file in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.name.split()[1]), 0)


def test_ranks_start_fast_once_the_fork_server_is_warm():
    run_ranks(add_up, 1, torch.ones(1))
    best = float("inf")
    for _ in range(20):  # the machine may be busy
        began = time.monotonic()
        run_ranks(add_up, 4, torch.ones(1))
        best = min(best, time.monotonic() - began)
        if best < 1.5:
            break
    assert best < 1.5
