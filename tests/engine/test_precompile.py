"""Precompiling makes the first step like any other, and changes nothing else."""

import pytest
import torch

import gradwire
from gradwire.engine import Engine, Lockstep, build, default_rules, precompile
from gradwire.kernels import dispatch
from gradwire.kernels.dispatch import reference_only

SHAPES = {"a.weight": (64, 300), "a.bias": (64,), "b.weight": (10, 64)}
CPU = torch.device("cpu")
SPECS = ["topk(0.01)", "dgc(0.01)", "ef_signsgd", "int4", "qsgd", "terngrad", "powersgd(2)", "randomk(0.1)", "natural"]


@pytest.fixture(autouse=True)
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "_compiled", set())


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the CPU kernels that were called."""
    names: list[str] = []
    faster = dispatch.faster("cpu")
    for name, kernel in faster.items():
        monkeypatch.setitem(faster, name, lambda *args, k=kernel, n=name, **named: names.append(n) or k(*args, **named))
    return names


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("granularity", ["layer", "model"])
def test_a_step_calls_only_kernels_that_were_precompiled(
    granularity: str, spec: str, world: int, called: list[str]
) -> None:
    plan = build(SHAPES, default_rules(spec, granularity=granularity), world)
    precompile.precompile(plan, CPU)
    warm = set(called)
    called.clear()
    engines = [Engine(plan, rank, world, 0, CPU) for rank in range(world)]
    for _ in range(2):
        Lockstep(world).drive([engine.run({n: torch.randn(s) for n, s in SHAPES.items()}) for engine in engines])
    assert called and set(called) <= warm


def test_kernels_of_steps_after_a_start_are_precompiled(called: list[str]) -> None:
    precompile.precompile(build(SHAPES, default_rules("dgc_adam(0.01)"), 2), CPU)
    assert "next_momentum_" in called


def test_all_codecs_of_a_ramp_are_precompiled() -> None:
    plan = build(SHAPES, default_rules("ramp(topk(0.01) | sign, steps=4)"), 2)
    precompile.precompile(plan, CPU)
    assert len({codec for _, codec, _ in precompile._compiled}) >= 3


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    precompile.precompile(build(SHAPES, default_rules("qsgd"), 2), CPU)
    assert torch.equal(torch.rand(3), expected)


def test_attaching_calls_the_kernels(called: list[str]) -> None:
    model = torch.nn.Linear(30, 20)
    gradwire.compress(model, "topk(0.1)")
    assert any("topk" in name for name in called)
    assert "encode_blocks" in called
    assert "scatter_mean_" in called  # though only long gradients need it
    called.clear()
    gradwire.compress(model, "topk(0.1)")
    assert not called  # once in a process
    gradwire.compress(model, "topk(0.1) | rows")
    assert "decode_in_rows" in called  # though so few positions are encoded as gaps


def test_reference_kernels_need_no_warm_up() -> None:
    with reference_only():
        precompile.precompile(build(SHAPES, default_rules("topk(0.01)"), 2), CPU)
    assert not precompile._compiled
