"""Replicas of one process: the optimizers that step them are checked as any others are."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import gradwire

WORLD, RATE, START = 2, 0.01, 2
ONEBIT = f"onebit_adam(start={START}, per=16)"


def replicas() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(24, 16, bias=False) for _ in range(WORLD)]


def optimizers(models: list[nn.Module], make: Any, **options: Any) -> list[torch.optim.Optimizer]:
    return [make(model.parameters(), RATE, **options) for model in models]


def train(models: list[nn.Module], workers: gradwire.SimulatedWorkers, steppers: list[Any], steps: int) -> None:
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        for model in models:
            model.zero_grad()
            model(torch.randn(4, 24, generator=draw)).square().mean().backward()
        workers()
        for stepper in steppers:
            stepper.step()


def test_another_optimizer_must_not_take_over_after_the_freeze() -> None:
    models = replicas()
    given = optimizers(models, gradwire.AdamW)
    workers = gradwire.lockstep(models, ONEBIT, optimizers=given)
    train(models, workers, given, START + 2)
    others = optimizers(models, torch.optim.AdamW)
    for one, other in zip(given, others, strict=True):
        other.load_state_dict(copy.deepcopy(one.state_dict()))
    before = [model.weight.detach().clone() for model in models]
    with pytest.raises(ValueError, match=r"gradwire\.AdamW, but torch\.optim\.AdamW was given.*optimizers=\["):
        train(models, workers, others, 1)
    assert all(torch.equal(model.weight, old) for model, old in zip(models, before, strict=True))


@pytest.mark.parametrize(
    ("spec", "make", "options"),
    [("dgc(0.01)", torch.optim.SGD, {"momentum": 0.9}), ("demo", torch.optim.AdamW, {})],
)
@pytest.mark.parametrize("given", [False, True])
def test_momentum_is_not_applied_twice(spec: str, make: Any, options: dict[str, Any], given: bool) -> None:
    models = replicas()
    steppers = optimizers(models, make, **options)
    workers = gradwire.lockstep(models, spec, optimizers=steppers if given else [])
    with pytest.raises(ValueError, match=f"{make.__name__} has momentum of its own"):
        train(models, workers, steppers, 1)


def test_a_spec_that_starves_adamw_is_warned_of_once_for_all_replicas() -> None:
    models = replicas()
    with pytest.warns(gradwire.OptimizerWarning, match="AdamW") as seen:
        train(models, gradwire.lockstep(models, "topk(0.01) | sign"), optimizers(models, torch.optim.AdamW), 3)
    assert len([one for one in seen if one.category is gradwire.OptimizerWarning]) == 1


def test_optimizers_that_fit_go_on_when_other_workers_are_gone() -> None:
    models = replicas()
    steppers = optimizers(models, torch.optim.AdamW)
    before = models[0].weight.detach().clone()
    for spec in ("dgc(0.01)", "int4"):
        workers = gradwire.lockstep(models, spec)
    train(models, workers, steppers, 2)
    assert not torch.equal(models[0].weight, before)


def test_workers_may_share_a_model_and_its_adamw() -> None:
    models = replicas()[:1]
    steppers = optimizers(models, gradwire.AdamW)
    workers = gradwire.lockstep(models * WORLD, ONEBIT, optimizers=steppers * WORLD)
    train(models, workers, steppers, START + 2)
    assert steppers[0].frozen.denominators().keys() == {models[0].weight}


def test_unknown_options_are_refused_by_the_name_of_what_was_called() -> None:
    models = replicas()
    given = optimizers(models, torch.optim.AdamW)
    with pytest.raises(TypeError, match=r"gradwire\.lockstep has no option optimizer; did you mean optimizers=\?"):
        gradwire.lockstep(models, "int4", optimizer=given[0])
    with pytest.raises(TypeError, match=r"gradwire\.local_lockstep has no option outr; did you mean outer=\?"):
        gradwire.local_lockstep(models, given, "diloco(H=2)", outr=None)
    with pytest.warns(DeprecationWarning, match="bucket_mb"):
        gradwire.lockstep(models, "int4", launch_mb=1.0)
