"""Into another world: the pending update, the mean of debts over ranks, is conserved; or a sentence says no."""

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
    fixtures.march(nets, workers, range(steps))
    return nets, workers


def assert_equal_debts(before: list[gradwire.Wire], after: list[gradwire.Wire]) -> None:
    old, new = fixtures.mean_debt(before), fixtures.mean_debt(after)
    assert max(float(debt.abs().max()) for debt in old.values()) > 0, "the test wants debts"
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
    assert_equal_debts(before.wires, after.wires)
    assert {wire.session.step for wire in after.wires} == {4}
    fixtures.march(copies, after, range(4, 6))
    assert all(fixtures.same(fixtures.tensors(copy), fixtures.tensors(copies[0])) for copy in copies)


def test_a_debt_without_a_home_moves_too():
    """Some ranks hold one, others do not."""
    _, before = trained(3, {"spec": "topk(0.2)"})
    for wire in before.wires:
        wire.set("dense")
    before.wires[1].session.memories[0].pop("owed")
    _, after = fixtures.replicas(2, "dense")
    for wire in after.wires:
        wire.load_state_dict([wire.state_dict() for wire in before.wires])
    assert_equal_debts(before.wires, after.wires)


def test_ef21_keeps_what_the_group_knows():
    options = {"spec": "topk(0.2)", "feedback": "ef21", "bundle": None}
    nets, before = trained(4, options)
    states = [wire.state_dict() for wire in before.wires]
    _, after = fixtures.replicas(2, **options)
    for wire in after.wires:
        wire.load_state_dict(states)
    for name, _ in nets[0].named_parameters():
        known = torch.stack([wire.state_dict()[f"estimate/{name}"] for wire in after.wires]).mean(0)
        torch.testing.assert_close(known, states[0][f"estimate_mean/{name}"], rtol=1e-4, atol=1e-6)


def attempts(folder: Path) -> dict[str, tuple[str, tuple[str, ...]]]:
    """What is refused, and words of the sentence."""
    _, workers = trained(2, {"spec": "topk(0.2)"})
    wire = workers.wires[1]
    states = [one.state_dict() for one in workers.wires]
    gradwire.save(workers.wires[0], folder)

    def load(state: Any, **options: Any) -> str:
        _, others = fixtures.replicas(options.pop("world", 2), **{"spec": "topk(0.2)", **options})
        return fixtures.sentence(lambda: others.wires[-1].load_state_dict(state))

    def other_model(net: nn.Module, spec: str = "topk(0.2)", state: Any = states[0]) -> str:
        return fixtures.sentence(lambda: gradwire.lockstep([net, net], spec).wires[0].load_state_dict(state))

    _, stateless = trained(2, {"spec": "fp16"})
    early = {**states[0], "gradwire/step": torch.tensor(3)}
    return {
        "another spec": (load(states[1], spec="topk(0.3)"), ("topk(0.2)", "topk(0.3)", "attach with the saved spec")),
        "another feedback": (load(states[1], feedback="ef21"), ("residual", "ef21")),
        "another rank": (load(states[0]), ("ranks [0] of a world of 2", "rank 1 of 2", "each rank's own state")),
        "too few ranks": (load(states[:1], world=3), ("ranks [0]", "all 2 ranks")),
        "one rank twice": (load([states[0]] * 2, world=3), ("ranks [0, 0]", "all 2 ranks")),
        "two steps": (load([early, states[1]], world=3), ("different steps", "[3, 4]", "one step")),
        "no state": (load({"weight": torch.zeros(2)}), ("no gradwire state", "state_dict()")),
        "nothing": (load([]), ("no gradwire state",)),
        "another format": (load({**states[1], "gradwire/format": torch.tensor(99)}), ("format 99", "install")),
        "wider": (other_model(nn.Sequential(nn.Linear(10, 17))), ("'0.bias'", "16 elements", "another model")),
        "unknown": (
            other_model(nn.Sequential(nn.Identity(), nn.Linear(4, 4))),
            ("'1.bias'", "nothing", "another model"),
        ),
        "smaller": (other_model(nn.Sequential(nn.Linear(10, 16))), ("another model", "build that model")),
        "without memories": (
            other_model(nn.Sequential(nn.Linear(3, 3)), "fp16", stateless.wires[0].state_dict()),
            ("another model", "number or shape"),
        ),
        "a file is missing": (
            fixtures.sentence(lambda: gradwire.load(wire, folder)),
            ("wire-1.safetensors", "all its"),
        ),
        "no folder": (fixtures.sentence(lambda: gradwire.load(wire, folder / "none")), ("none", "gradwire.save")),
    }


def test_refusals_are_sentences(tmp_path: Path):
    for case, (said, words) in attempts(tmp_path).items():
        assert said.startswith("ValueError"), f"{case}: {said}"
        for word in words:
            assert word in said, f"{case}: {said}"


def test_a_refused_state_changes_nothing():
    _, workers = trained(2, {"spec": "topk(0.2)"})
    wire = workers.wires[0]
    before = wire.state_dict()
    with pytest.raises(ValueError, match="each rank's own state"):
        wire.load_state_dict(workers.wires[1].state_dict())
    assert fixtures.same(before, wire.state_dict())
