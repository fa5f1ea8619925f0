"""A rank of a sharded model that is killed is named on all others, also where a collective of FSDP fails first."""

import multiprocessing
import os
import re
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.sharded_fixtures import IS_TORCH_2_9, OddNet, mesh_of, shard_, train
from torch import Tensor

import fixtures
import gradwire
import spawn
from gradwire.integrations.sharded import compress_reduce_scatter

LOST = 3
STEPS_BEFORE = 2
NAMED = re.compile(rf"rank (\d+ and )*{LOST}( and \d+)* on \S+ ended")


def lose_a_rank(rank: int, folder: str, case: str) -> None:
    """One rank is killed; the others write down the errors that they get."""
    dist.init_process_group(
        "gloo", init_method=Path(folder, "meeting").as_uri(), rank=rank, world_size=4, timeout=spawn.COLLECTIVE_TIMEOUT
    )
    torch.set_num_threads(1)
    if case == "reduce_scatter":
        net = shard_(OddNet(), mesh_of(1, 4)["shard"])
        compress_reduce_scatter(net, "int8")
    else:
        mesh = mesh_of(2, 2)
        net = shard_(OddNet(), mesh["shard"])
        gradwire.compress(net, "topk(0.1)", across=mesh["replicate"])
    train(net, rank, range(STEPS_BEFORE))
    if rank == LOST and case == "backward":
        net.blocks[1].register_forward_hook(die_in_backward)
    elif rank == LOST:
        os.kill(os.getpid(), signal.SIGKILL)
    text = fixtures.error_text(lambda: train(net, rank, range(STEPS_BEFORE, 50)))
    Path(folder, f"error-{rank}").write_text(text)
    os._exit(0)


def die_in_backward(module: object, given: object, made: Tensor) -> None:
    made.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.parametrize("case", ["between_steps", "backward", *(["reduce_scatter"] if IS_TORCH_2_9 else [])])
def test_a_killed_rank_is_named_on_all_others(case: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=lose_a_rank, args=(rank, str(tmp_path), case), daemon=True) for rank in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(200)
    errors = [(tmp_path / f"error-{rank}").read_text() for rank in range(4) if rank != LOST]
    assert all(text.startswith("PeerLostError") and NAMED.search(text) for text in errors), errors
