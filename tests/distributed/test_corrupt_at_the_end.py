"""A corrupt message in the last step of a training, where no later step can tell the other ranks of it.

`gather_states` raised on the rank that received it alone, and the others waited for that rank.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fixtures
import gradwire
from gradwire.integrations import dcp
from gradwire.integrations.checkpoint import gather_states
from spawn import run_ranks

WORLD, OPTIONS = 3, {"spec": "topk(0.1) | int32"}
VICTIM = WORLD - 1


def shared_folder() -> Path:
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    return Path(folders[0])


def damage(wire: gradwire.Wire) -> None:
    """Damage the first bytes of all that this rank receives from now on."""
    right = wire.link.move

    def move(collective: Any, out: Tensor | None = None) -> Tensor:
        result = right(collective, out)
        if result.dtype == torch.uint8:
            result.view(-1)[:8] = 255
        return result

    wire.link.move = move


def last_step(rank: int, world: int) -> dict[str, str]:
    """Save after a good step and after one with a damaged message; what each call says."""
    net = fixtures.model()
    wire, optimizer, folder = gradwire.compress(net, **OPTIONS), fixtures.sgd(net), shared_folder()
    fixtures.plain_loop(net, wire, optimizer, range(1), rank)
    gradwire.save(wire, folder)
    right = wire.link.move
    if rank == VICTIM:
        damage(wire)
    fixtures.plain_loop(net, wire, optimizer, range(1, 2), rank)
    wire.link.move = right
    said = {"save": fixtures.error_text(lambda: gradwire.save(wire, folder))}
    said |= {"gather_states": fixtures.error_text(lambda: gather_states(wire))}
    said |= {"dcp": fixtures.error_text(lambda: dcp.state_dict(wire))}
    other = gradwire.compress(fixtures.model(), **OPTIONS)
    said |= {"load": fixtures.error_text(lambda: gradwire.load(other, folder))}
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    return said


@pytest.fixture(scope="module")
def said() -> list[dict[str, str]]:
    return run_ranks(last_step, WORLD)


@pytest.mark.parametrize("call", ["gather_states", "dcp"])
def test_states_of_all_ranks_are_refused_on_all_ranks(call: str, said: list[dict[str, str]]) -> None:
    fixtures.check_message([(one[call], ("Error", "damaged on the way")) for one in said])


def test_a_folder_that_one_rank_could_not_write_is_not_loaded(said: list[dict[str, str]]) -> None:
    assert [one["save"] == fixtures.NO_ERROR for one in said] == [True, True, False]
    fixtures.check_message([(one["load"], ("ValueError", "another step")) for one in said])
