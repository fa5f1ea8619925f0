"""Checkpoints through torch.distributed.checkpoint: the same mesh resumes bit for bit, and others owe as much."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from tests.sharded_fixtures import OddNet, long, mesh_of, shard_, train, whole
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fixtures
import gradwire
from gradwire.comm.collectives import AllReduceOp
from gradwire.integrations import dcp
from gradwire.integrations.model import distributed_as
from spawn import Answers, cases_fixture, run_ranks

SPECS: dict[str, dict[str, Any]] = {
    "topk": {"spec": "topk(0.1)"},
    "served": {"spec": "int2", "exchange": "two_way", "feedback": "residual"},
    "powersgd": {"spec": "powersgd(1)"},
}
MESHES = ((1, 4), (4, 1))


def attach(mesh: DeviceMesh, options: dict[str, Any]) -> tuple[OddNet, gradwire.Wire]:
    net = shard_(OddNet(), mesh["shard"])
    return net, gradwire.compress(net, across=mesh["replicate"], bucket_mb=fixtures.BUCKET_MB, **options)


def owed(wire: gradwire.Wire) -> dict[str, Tensor]:
    """By name: the mean over replicas of what is still to be applied, of whole parameters."""
    mine = wire.debts()
    debts = {}
    for name, p in wire.parameters.items():
        total = wire.link.run(AllReduceOp(mine[name], "sum", "across")) if mine[name].numel() else mine[name]
        debts[name] = distributed_as(p, total / wire.setup.plan_world).full_tensor()
    return debts


def resume(rank: int, world: int, options: dict[str, Any]) -> Any:
    """Train, save, train on; load into the same mesh and into others."""
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    mesh = mesh_of(2, 2)
    net, wire = attach(mesh, options)
    train(net, rank, range(2))
    checkpoint.save({"wire": dcp.state_dict(wire), "model": net.state_dict()}, checkpoint_id=folders[0])
    before, debts = whole(net), owed(wire)
    train(net, rank, range(2, 4))
    again, other = attach(mesh, options)
    model = {"model": again.state_dict()}
    checkpoint.load(model, checkpoint_id=folders[0])
    dcp.load(other, folders[0])
    train(again, rank, range(2, 4))
    loaded = {}
    for shape in MESHES:
        _, resharded = attach(mesh_of(*shape), options)
        dcp.load(resharded, folders[0])
        loaded[shape] = owed(resharded), resharded.engine.unwrapped.step
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folders[0])
    return before, whole(net), whole(again), fixtures.memories(wire), fixtures.memories(other), debts, loaded


answers = cases_fixture(resume, 4, SPECS)


def handles(rank: int, world: int, folder: str) -> Any:
    """Of a wrapped optimizer, which is saved and loaded as its wire, and of local steps, which are refused."""
    net, other = fixtures.model(), fixtures.model()
    first, second = (fixtures.wrap_optimizer(each, spec="topk(0.1)") for each in (net, other))
    for step in range(2):
        fixtures.loss(net, rank, step).backward()
        first.step()
        first.zero_grad()
    checkpoint.save({"wire": dcp.state_dict(first)}, checkpoint_id=folder)
    dcp.load(second, folder)
    rounds = fixtures.model()
    outer = gradwire.local(rounds, fixtures.sgd(rounds), "diloco(H=2)")
    refused = [fixtures.error_text(lambda: dcp.state_dict(outer)), fixtures.error_text(lambda: dcp.load(outer, folder))]
    return fixtures.memories(first.wire), fixtures.memories(second.wire), refused


def test_a_wrapped_optimizer_is_saved_as_its_wire_and_local_steps_are_refused(tmp_path) -> None:
    for saved, loaded, refused in run_ranks(handles, 2, str(tmp_path / "checkpoint")):
        assert fixtures.same(saved, loaded) and any(bool(x.any()) for x in saved.values())
        assert all(text.startswith("TypeError: the state of LocalSync") and "gradwire.save" in text for text in refused)


def save(rank: int, world: int, folder: str) -> Any:
    net, wire = attach(mesh_of(2, 2), SPECS["topk"])
    train(net, rank, range(2))
    checkpoint.save({"wire": dcp.state_dict(wire)}, checkpoint_id=folder)
    return owed(wire)


def load(rank: int, world: int, folder: str) -> Any:
    _, wire = attach(mesh_of(2, 1), SPECS["topk"])
    dcp.load(wire, folder)
    return owed(wire)


def save_while_training(rank: int, world: int, folder: str) -> Any:
    """Train on while a checkpoint is written, then load it: what was saved is of the moment of the call."""
    mesh = mesh_of(2, 2)
    net, wire = attach(mesh, SPECS["topk"])
    train(net, rank, range(2))
    saved = {"wire": dcp.state_dict(wire), "model": net.state_dict()}
    saving = checkpoint.async_save(saved, checkpoint_id=folder)
    train(net, rank, range(2, 4))
    saving.result()
    dist.barrier()
    again, other = attach(mesh, SPECS["topk"])
    checkpoint.load({"model": again.state_dict()}, checkpoint_id=folder)
    dcp.load(other, folder)
    train(again, rank, range(2, 4))
    return whole(net), whole(again), fixtures.memories(wire), fixtures.memories(other)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    for one, other, mine, others in run_ranks(save_while_training, 4, str(tmp_path)):
        assert fixtures.same(one, other)
        assert fixtures.same(mine, others)


@pytest.mark.parametrize("case", long(SPECS, "topk", "powersgd"))
def test_a_resumed_run_goes_on_bit_for_bit(answers: Answers, case: str) -> None:
    for before, one, other, mine, others, _, _ in answers[case]:
        assert not fixtures.same(before, one), case
        assert fixtures.same(one, other), case
        assert fixtures.same(mine, others), case


@pytest.mark.study
def test_fewer_ranks_owe_as_much(tmp_path: Path) -> None:
    before, after = run_ranks(save, 4, str(tmp_path)), run_ranks(load, 2, str(tmp_path))
    for name, debt in before[0].items():
        assert torch.allclose(debt, after[0][name], rtol=1e-5, atol=1e-7), name


@pytest.mark.parametrize("case", long(SPECS, "topk", "powersgd"))
def test_another_mesh_owes_as_much(answers: Answers, case: str) -> None:
    for *_, debts, loaded in answers[case]:
        assert any(bool(x.any()) for x in debts.values()), case
        for shape in MESHES:
            found, step = loaded[shape]
            assert step == 2, (case, shape)
            for name, debt in debts.items():
                assert torch.allclose(debt, found[name], rtol=1e-5, atol=1e-7), (case, shape, name)
