"""Who is lost is named: ranks that ended, and hosts that are out of reach."""

import errno
import multiprocessing
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fixtures
import gradwire
import spawn
from gradwire.comm.liveness import PeerLostError, ProbeAddress, door, lost, probe


def deserted(rank: int, folder: str, across: Any) -> None:
    """The last rank leaves without a word; the others write down what they hear."""
    dist.init_process_group(
        "gloo", init_method=Path(folder, "meeting").as_uri(), rank=rank, world_size=4, timeout=spawn.PATIENCE
    )
    torch.set_num_threads(1)
    net = fixtures.model()
    wire = gradwire.compress(net, "topk(0.1)", across=across)
    optimizer = fixtures.sgd(net)
    fixtures.plain(net, wire, optimizer, range(2), rank)
    if rank == 3:
        os._exit(3)
    said = fixtures.sentence(lambda: fixtures.plain(net, wire, optimizer, range(2, 50), rank))
    Path(folder, f"heard-{rank}").write_text(said)
    os._exit(0)


@pytest.mark.parametrize("across", [None, [[0, 1], [2, 3]]], ids=["flat", "hosts"])
def test_a_rank_that_ended_is_named(across: Any, tmp_path: Path):
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=deserted, args=(rank, str(tmp_path), across), daemon=True) for rank in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    heard = [(tmp_path / f"heard-{rank}").read_text() for rank in range(3)]
    assert all(said.startswith("PeerLostError: a collective failed on rank") for said in heard), heard
    assert sum("rank 3 on" in said and "ended" in said for said in heard) >= 2, heard  # a third may hear of them first


def test_a_door_tells_who_is_there():
    mine = door()
    assert door() == mine, "one for each process"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        closed = ProbeAddress("here", "127.0.0.1", taken.getsockname()[1])
    silent = socket.create_server(("127.0.0.1", 0), backlog=0)
    nowhere = ProbeAddress("away", *silent.getsockname())
    crowd = [socket.create_connection(silent.getsockname()) for _ in range(1)]  # whoever comes next is not heard
    answers = probe({0: mine, 1: closed, 2: nowhere}, seconds=0.3)
    assert answers[0] == 0
    assert answers[1] == errno.ECONNREFUSED
    assert answers[2] not in (0, errno.ECONNREFUSED)
    timeout = RuntimeError("[/source/buffer.cc:81] Timed out waiting 3000ms for recv operation to complete")
    error = lost(timeout, 0, {0: mine, 1: closed, 2: nowhere, 3: nowhere}, seconds=0.3)
    assert isinstance(error, PeerLostError)
    assert "on rank 0: rank 1 on here ended; rank 2 and 3 on away cannot be reached" in str(error)
    assert str(error).endswith("(Timed out waiting 3000ms for recv operation to complete)")
    assert "all ranks are there" in str(lost(timeout, 0, {0: mine, 1: mine}))
    other = RuntimeError("invalid tensor size")
    assert lost(other, 0, {0: mine}) is other, "what is not the network's keeps its error"
    for each in (silent, *crowd):
        each.close()
