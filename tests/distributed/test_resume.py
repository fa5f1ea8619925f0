"""A resumed run equals the uninterrupted one, bit for bit, whatever the state of a method."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fixtures
import gradwire
from spawn import Answers, run_cases

FEEDBACKS = ["none", "residual", "residual(decay=0.9)", "momentum_correction(0.8)", "ef21"]
EXCHANGES: dict[str, dict[str, Any]] = {
    "allgather": {"spec": "topk(0.2)"},
    "allreduce": {"spec": "bf16"},
    "two_way": {"spec": "int4"},
    "majority": {"spec": "sign"},
    "delayed": {"spec": "qsgd"},
    "delayed(inner=two_way)": {"spec": "sign"},
    "noop": {"spec": "terngrad"},
}
OTHERS: dict[str, dict[str, Any]] = {
    "low rank": {"spec": "powersgd(2)"},
    "random bits": {"spec": "randomk(0.3) | natural", "exchange": "allgather", "feedback": "residual"},
    "second moments": {"spec": "variance"},
    "a change of basis": {"spec": "hadamard | topk(0.2) | int8"},
    "a table by step": {"spec": {0: "fp32", 3: "topk(0.5)", 6: "topk(0.2) | sign"}},
    "a ramp": {"spec": "dgc(0.05, ramp=7)"},
    "two rules": {
        "spec": "topk(0.2)",
        "rules": (gradwire.Rule("int8", name="0.*", exchange="two_way"), gradwire.Rule("variance", name="2.weight")),
    },
    "the whole model": {"spec": "sign", "granularity": "model", "exchange": "two_way", "bundle": None},
}


def check_resumed(options: dict[str, Any], folder: Path, world: int = 2) -> None:
    nets, workers = fixtures.replicas(world, **options)
    fixtures.train_steps(nets, workers, range(10))

    first, early = fixtures.replicas(world, **options)
    fixtures.train_steps(first, early, range(5))
    for wire in early.wires:
        gradwire.save(wire, folder)
    second, late = fixtures.replicas(world, **options)
    for one, other, wire in zip(first, second, late.wires, strict=True):
        other.load_state_dict(one.state_dict())
        gradwire.load(wire, folder)
    fixtures.train_steps(second, late, range(5, 10))

    for one, other, whole, wire in zip(nets, second, workers.wires, late.wires, strict=True):
        assert fixtures.same(fixtures.tensors(one), fixtures.tensors(other))
        assert fixtures.same(whole.state_dict(), wire.state_dict())


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("feedback", FEEDBACKS)
def test_ten_steps_are_five_and_five(feedback: str, exchange: str, tmp_path: Path):
    check_resumed({**EXCHANGES[exchange], "exchange": exchange, "feedback": feedback}, tmp_path)


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS.keys())
def test_ten_steps_are_five_and_five_of(options: dict[str, Any], tmp_path: Path):
    check_resumed(options, tmp_path)


@pytest.mark.parametrize("options", [{"spec": "topk(0.1)"}, {"spec": "dense"}, {"spec": "dgc(0.1)"}])
def test_errors_left_by_set_are_saved(options: dict[str, Any], tmp_path: Path):
    """Ranks may differ in having any."""
    nets, workers = fixtures.replicas(2, "int4", exchange="two_way")
    fixtures.train_steps(nets, workers, range(3))
    for wire in workers.wires:
        wire.set(**options)
        gradwire.save(wire, tmp_path)
    copies, others = fixtures.replicas(2, "topk(0.2)")
    for net, copy, wire in zip(nets, copies, others.wires, strict=True):
        copy.load_state_dict(net.state_dict())
        wire.set(**options)
        gradwire.load(wire, tmp_path)
    for both in ((nets, workers), (copies, others)):
        fixtures.train_steps(*both, range(3, 6))
    for wire, other in zip(workers.wires, others.wires, strict=True):
        assert fixtures.same(wire.state_dict(), other.state_dict())
    assert fixtures.same(fixtures.tensors(nets[0]), fixtures.tensors(copies[0]))


def train_under_ddp(rank: int, options: dict[str, Any], folder: Path | None) -> dict[str, Tensor]:
    """Ten steps; with a folder, saved and loaded after five, while messages are on their way."""
    net = fixtures.model()
    outer = fixtures.ddp(net)
    wire = gradwire.compress(outer, **options)
    for step in range(10):
        if folder is not None and step == 5:
            gradwire.save(wire, folder)
            torch.distributed.barrier()
            saved = fixtures.tensors(net)
            net = fixtures.model()
            net.load_state_dict(saved)
            outer = fixtures.ddp(net)
            wire = gradwire.compress(outer, **options)
            gradwire.load(wire, folder)
        outer.zero_grad()
        fixtures.loss(outer, rank, step).backward()
        fixtures.sgd_step(net)
    return {**fixtures.tensors(net), **wire.state_dict()}


def real_ranks(rank: int, world: int, options: dict[str, Any], folder: Path) -> list[dict[str, Tensor]]:
    return [train_under_ddp(rank, options, place) for place in (None, folder / options["spec"])]


REAL = fixtures.by_name({"spec": "topk(0.2)"}, {"spec": "qsgd", "exchange": "delayed"})


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Answers, Path]:
    folder = tmp_path_factory.mktemp("resumed")
    return run_cases(real_ranks, 2, REAL, folder), folder


@pytest.mark.parametrize("case", REAL)
def test_processes_resume_under_ddp(case: str, resumed: tuple[Answers, Path]):
    answers, folder = resumed
    for uninterrupted, resumed_run in answers[case]:
        assert fixtures.same(uninterrupted, resumed_run)
    names = {path.name for path in (folder / REAL[case]["spec"]).iterdir()}
    assert names == {"wire-0.safetensors", "wire-1.safetensors"}


def test_a_state_is_plain_tensors_by_parameter_name():
    nets, workers = fixtures.replicas(2, "topk(0.2)", feedback="momentum_correction")
    fixtures.train_steps(nets, workers, range(2))
    state = workers.wires[0].state_dict()
    assert all(type(tensor) is Tensor for tensor in state.values())
    names = {name for name, _ in nets[0].named_parameters()}
    assert {key for key in state if not key.startswith("gradwire/")} == {
        f"{memory}/{name}" for memory in ("momentum", "residual") for name in names
    }
    for name, p in nets[0].named_parameters():
        assert state[f"residual/{name}"].numel() == p.numel()
    assert int(state["gradwire/step"]) == 2
