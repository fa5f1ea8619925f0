"""No process that a command has started outlives it by more than ten seconds, however the command ended."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gradwire_lab.launcher_env import launcher_rank

LIMIT_SECONDS = 10.0
RANKS = """
import sys, time
import torch.distributed as dist
from gradwire_lab.launch import launch, send_message

def hang(rank, world):
    send_message(rank)
    if rank:
        time.sleep(1000)
    dist.barrier()

if __name__ == "__main__":
    launch(hang, 2, on_message=lambda rank, _: print("up", rank, flush=True))
"""
CHILD = """
import time
from gradwire_lab.parent_watch import end_with_parent
end_with_parent({parent})
print("up", flush=True)
time.sleep(1000)
"""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def marked(mark: str) -> list[int]:
    """The processes that have a mark in their environment."""
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            content = (folder / "environ").read_bytes()
        except OSError:
            continue
        processes += [int(folder.name)] * (mark.encode() in content)
    return processes


@contextmanager
def started(*command: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    mark = uuid.uuid4().hex
    environment = {**os.environ, "GRADWIRE_TEST_MARK": mark}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        yield process, mark


def assert_all_end(mark: str) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert not left, "processes outlived the command"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_that_wait_for_others_end_with_the_command(tmp_path, number):
    (tmp_path / "ranks.py").write_text(RANKS)
    with started(sys.executable, str(tmp_path / "ranks.py")) as (command, mark):
        assert command.stdout is not None
        assert {command.stdout.readline(), command.stdout.readline()} == {"up 0\n", "up 1\n"}
        assert len(marked(mark)) >= 3
        command.send_signal(number)
        command.wait()
        assert_all_end(mark)


@pytest.mark.parametrize("processes", [3, 5], ids=["fork server", "second rank"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_command_that_is_ended_while_it_starts_leaves_no_rank(tmp_path, number, processes):
    """The command and its resource tracker, then the fork server, then ranks."""
    words = ("train", "digits", "--workers", "3", "--folder", str(tmp_path / "run"), "--set", "train.epochs=1000")
    with started(sys.executable, "-c", "from gradwire_lab.command import run; run()", *words) as (command, mark):
        while len(marked(mark)) < processes:
            assert command.poll() is None, "the command ended by itself"
            time.sleep(0.05)  # reading all environments takes some of it
        command.send_signal(number)
        command.wait(30)
        assert_all_end(mark)


def test_a_process_ends_with_the_parent_that_it_watches():
    nested = f"import os, subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}.format(parent=os.getpid())])"
    with started(sys.executable, "-c", nested) as (command, mark):
        assert command.stdout is not None and command.stdout.readline() == "up\n"
        command.kill()
        command.wait()
        assert_all_end(mark)


def test_only_ranks_of_a_launcher_watch_their_parent():
    plain = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    by_hand, torchrun = launcher_rank(plain), launcher_rank({**plain, "TORCHELASTIC_RUN_ID": "none"})
    assert by_hand is not None and not by_hand.supervised
    assert torchrun is not None and torchrun.supervised
