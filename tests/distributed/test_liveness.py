"""The error of a failed collective names the ranks that ended and the hosts that cannot be reached."""

import contextlib
import errno
import multiprocessing
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fixtures
import gradwire
import spawn
from gradwire.comm.liveness import PeerLostError, ProbeAddress, diagnose, probe, probe_address


def lose_last_rank(rank: int, folder: str, across: Any) -> None:
    """The last rank exits; the others write down the error that they get."""
    dist.init_process_group(
        "gloo", init_method=Path(folder, "meeting").as_uri(), rank=rank, world_size=4, timeout=spawn.COLLECTIVE_TIMEOUT
    )
    torch.set_num_threads(1)
    net = fixtures.model()
    wire = gradwire.compress(net, "topk(0.1)", across=across)
    optimizer = fixtures.sgd(net)
    fixtures.plain_loop(net, wire, optimizer, range(2), rank)
    if rank == 3:
        os._exit(3)
    text = fixtures.error_text(lambda: fixtures.plain_loop(net, wire, optimizer, range(2, 50), rank))
    Path(folder, f"error-{rank}").write_text(text)
    os._exit(0)


@pytest.mark.parametrize("across", [None, [[0, 1], [2, 3]]], ids=["flat", "hosts"])
def test_a_rank_that_ended_is_named(across: Any, tmp_path: Path):
    context = multiprocessing.get_context("forkserver")
    ranks = [
        context.Process(target=lose_last_rank, args=(rank, str(tmp_path), across), daemon=True) for rank in range(4)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(200)
    errors = [(tmp_path / f"error-{rank}").read_text() for rank in range(3)]
    assert all(text.startswith("PeerLostError") and f"rank {rank}" in text for rank, text in enumerate(errors)), errors
    named = re.compile(r"rank (\d+ and )*3( and \d+)* on \S+ ended")  # others may have ended because of it
    assert sum(named.search(text) is not None for text in errors) >= 2, errors  # one may blame another rank


def test_a_probe_tells_who_is_there():
    mine = probe_address()
    assert probe_address() == mine, "one for each process"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        closed = ProbeAddress("here", "127.0.0.1", taken.getsockname()[1])
    silent = socket.create_server(("127.0.0.1", 0), backlog=0)
    nowhere = ProbeAddress("away", *silent.getsockname())
    full = socket.create_connection(silent.getsockname())  # the next connection gets no answer
    answers = probe({0: mine, 1: closed, 2: nowhere}, seconds=0.3)
    assert answers[0] == 0
    assert answers[1] == errno.ECONNREFUSED
    assert answers[2] not in (0, errno.ECONNREFUSED)
    timeout = RuntimeError("[/source/buffer.cc:81] Timed out waiting 3000ms for recv operation to complete")
    error = diagnose(timeout, 0, {0: mine, 1: closed, 2: nowhere, 3: nowhere}, seconds=0.3)
    assert isinstance(error, PeerLostError)
    for words in ("rank 0", "rank 1 on here", "rank 2 and 3 on away", "Timed out waiting 3000ms for recv operation"):
        assert words in str(error)
    everywhere = str(diagnose(timeout, 0, {0: mine, 1: mine}))
    assert "rank 1" not in everywhere and "Timed out" in everywhere, "no rank is blamed where all answer"
    other = RuntimeError("invalid tensor size")
    assert diagnose(other, 0, {0: mine}) is other, "an error that is not of the network is left alone"
    for each in (silent, full):
        each.close()


def test_idle_strangers_do_not_hide_a_living_rank():
    """They stayed in the listener's queue, so that the 66th connection was not answered and the rank was accused."""
    mine = probe_address()
    with contextlib.ExitStack() as strangers:
        for _ in range(300):
            strangers.enter_context(socket.create_connection((mine.address, mine.port), timeout=3.0))
        assert probe({0: mine}, seconds=3.0) == {0: 0}
        accused = str(diagnose(RuntimeError("Connection closed by peer"), 1, {0: mine, 1: mine}))
        assert "rank 0" not in accused


_ENDS = """
import atexit, contextlib, pathlib, sys, time
import torch.distributed as dist
from torch import nn

def count() -> int:
    names = []
    for path in pathlib.Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # a thread that ends meanwhile
            names.append(path.read_text())
    return sum("gloo" in name for name in names)

@atexit.register  # what is registered later runs before
def count_at_exit() -> None:
    end = time.monotonic() + 5
    while count() and time.monotonic() < end:  # Linux lists a thread until a little after its end
        time.sleep(0.01)
    print(count())

import gradwire

dist.init_process_group("gloo", init_method=sys.argv[1], rank=0, world_size=1)
wire = gradwire.compress(nn.Linear(4, 4), "int4")
print(count())
dist.destroy_process_group()
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="names of threads are read from /proc")
def test_threads_of_gloo_end_before_the_interpreter(tmp_path: Path):
    """One that still held a tensor then would abort the process."""
    command = [sys.executable, "-c", _ENDS, Path(tmp_path, "meeting").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    before, at_exit = map(int, done.stdout.split())
    assert done.returncode == 0 and before > 0 and at_exit == 0, done.stderr
