"""Loading into another world conserves the pending update, the mean of errors over ranks, or raises an error."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fixtures
import gradwire

METHODS: dict[str, dict[str, Any]] = {
    "residual": {"spec": "topk(0.2)"},
    "momentum correction": {"spec": "dgc(0.2)"},
    "two way": {"spec": "int4", "exchange": "two_way"},
    "two way, or not, as the world is large": {"spec": "int4", "bundle": None},
    "two way over the whole model": {"spec": "sign", "exchange": "two_way", "granularity": "model", "bundle": None},
    "delayed": {"spec": "qsgd", "exchange": "delayed"},
    "low rank": {"spec": "powersgd(1)"},
}


def trained(
    world: int, options: dict[str, Any], steps: int = 4
) -> tuple[list[nn.Sequential], gradwire.SimulatedWorkers]:
    nets, workers = fixtures.replicas(world, **options)
    fixtures.train_steps(nets, workers, range(steps))
    return nets, workers


def assert_equal_pending_errors(before: list[gradwire.Wire], after: list[gradwire.Wire]) -> None:
    old, new = fixtures.mean_pending_error(before), fixtures.mean_pending_error(after)
    assert max(float(debt.abs().max()) for debt in old.values()) > 0, "the test needs pending errors"
    for name in old:
        torch.testing.assert_close(new[name], old[name], rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 4), (4, 1), (3, 2), (1, 3)])
@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS.keys())
def test_the_pending_update_is_conserved(options: dict[str, Any], old: int, new: int, tmp_path: Path):
    nets, before = trained(old, options)
    for wire in before.wires:
        gradwire.save(wire, tmp_path)
    copies, after = fixtures.replicas(new, **options)
    for copy, wire in zip(copies, after.wires, strict=True):
        copy.load_state_dict(nets[0].state_dict())
        gradwire.load(wire, tmp_path)
    assert_equal_pending_errors(before.wires, after.wires)
    assert {wire.engine.unwrapped.step for wire in after.wires} == {4}
    fixtures.train_steps(copies, after, range(4, 6))
    assert all(fixtures.same(fixtures.tensors(copy), fixtures.tensors(copies[0])) for copy in copies)


def test_an_error_left_by_set_is_moved():
    """Some ranks hold one, others do not."""
    _, before = trained(3, {"spec": "topk(0.2)"})
    for wire in before.wires:
        wire.set("dense")
    before.wires[1].engine.unwrapped.states[0].carried_error = None
    _, after = fixtures.replicas(2, "dense")
    for wire in after.wires:
        wire.load_state_dict([wire.state_dict() for wire in before.wires])
    assert_equal_pending_errors(before.wires, after.wires)


def test_ef21_keeps_the_mean_estimate():
    options = {"spec": "topk(0.2)", "feedback": "ef21", "bundle": None}
    nets, before = trained(4, options)
    states = [wire.state_dict() for wire in before.wires]
    _, after = fixtures.replicas(2, **options)
    for wire in after.wires:
        wire.load_state_dict(states)
    for name, _ in nets[0].named_parameters():
        known = torch.stack([wire.state_dict()[f"estimate/{name}"] for wire in after.wires]).mean(0)
        torch.testing.assert_close(known, states[0][f"estimate_mean/{name}"], rtol=1e-4, atol=1e-6)


Load = Callable[[Any], Any]
STATE_ERRORS: dict[str, tuple[Load, dict[str, Any], tuple[str, ...]]] = {
    "another spec": (lambda states: states[1], {"spec": "topk(0.3)"}, ("topk(0.2)", "topk(0.3)")),
    "another feedback": (lambda states: states[1], {"feedback": "ef21"}, ("residual", "ef21")),
    "another rank": (lambda states: states[0], {}, ("[0]", "rank 1 of 2")),
    "too few ranks": (lambda states: states[:1], {"world": 3}, ("[0]", "all 2 ranks")),
    "one rank twice": (lambda states: [states[0]] * 2, {"world": 3}, ("[0, 0]", "all 2 ranks")),
    "two steps": (
        lambda states: [{**states[0], "gradwire/step": torch.tensor(3)}, states[1]],
        {"world": 3},
        ("[3, 4]",),
    ),
    "no state": (lambda states: {"weight": torch.zeros(2)}, {}, ("state_dict()",)),
    "nothing": (lambda states: [], {}, ("state",)),
    "another format": (lambda states: {**states[1], "gradwire/format": torch.tensor(99)}, {}, ("99", "install")),
}
MODELS: dict[str, tuple[Callable[[], nn.Module], str, tuple[str, ...]]] = {
    "wider": (lambda: nn.Sequential(nn.Linear(10, 17)), "topk(0.2)", ("'0.bias'", "16", "another model")),
    "unknown": (lambda: nn.Sequential(nn.Identity(), nn.Linear(4, 4)), "topk(0.2)", ("'1.bias'", "another model")),
    "smaller": (lambda: nn.Sequential(nn.Linear(10, 16)), "topk(0.2)", ("another model",)),
    "without state": (lambda: nn.Sequential(nn.Linear(3, 3)), "fp16", ("another model",)),
}


@pytest.mark.parametrize("case", STATE_ERRORS)
def test_a_state_that_does_not_fit_is_refused(case: str):
    choose, options, words = STATE_ERRORS[case]
    _, workers = trained(2, {"spec": "topk(0.2)"})
    state = choose([wire.state_dict() for wire in workers.wires])
    _, others = fixtures.replicas(**{"world": 2, "spec": "topk(0.2)", **options})
    text = fixtures.error_text(lambda: others.wires[-1].load_state_dict(state))
    fixtures.check_message([(text, ("ValueError", *words))])


@pytest.mark.parametrize("case", MODELS)
def test_the_state_of_another_model_is_refused(case: str):
    make, spec, words = MODELS[case]
    _, workers = trained(2, {"spec": spec})
    net = make()
    wire = gradwire.lockstep([net, net], spec).wires[0]
    text = fixtures.error_text(lambda: wire.load_state_dict(workers.wires[0].state_dict()))
    fixtures.check_message([(text, ("ValueError", *words))])


def test_a_missing_file_or_folder_is_named(tmp_path: Path):
    _, workers = trained(2, {"spec": "topk(0.2)"})
    gradwire.save(workers.wires[0], tmp_path)
    with pytest.raises(ValueError, match=r"wire-1\.safetensors"):
        gradwire.load(workers.wires[1], tmp_path)
    with pytest.raises(ValueError, match=r"absent.*gradwire\.save"):
        gradwire.load(workers.wires[1], tmp_path / "absent")


def test_a_refused_state_changes_nothing():
    _, workers = trained(2, {"spec": "topk(0.2)"})
    wire = workers.wires[0]
    before = wire.state_dict()
    with pytest.raises(ValueError, match="rank 0 of 2"):
        wire.load_state_dict(workers.wires[1].state_dict())
    assert fixtures.same(before, wire.state_dict())
