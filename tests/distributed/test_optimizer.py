"""DistributedOptimizer serves wherever torch takes an optimizer."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import fixtures
import gradwire
from spawn import run_ranks


def build(spec: str = "topk(0.2)") -> tuple[torch.nn.Sequential, gradwire.DistributedOptimizer]:
    net = fixtures.model()
    inner = fixtures.sgd(net, momentum=0.9, weight_decay=0.01)
    return net, gradwire.DistributedOptimizer(inner, net.named_parameters(), spec)


def step(net: torch.nn.Module, optimizer: torch.optim.Optimizer, at: int, rank: int = 0) -> None:
    optimizer.zero_grad()
    fixtures.loss(net, rank, at).backward()
    optimizer.step()


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
    ],
    ids=["StepLR", "LambdaLR", "CosineAnnealingLR"],
)
def test_schedulers_change_the_inner_learning_rate(schedule: Any):
    net, optimizer = build()
    assert isinstance(optimizer, torch.optim.Optimizer)
    scheduler = schedule(optimizer)
    step(net, optimizer, 0)
    scheduler.step()
    assert optimizer.inner.param_groups[0]["lr"] < 0.2
    assert optimizer.param_groups is optimizer.inner.param_groups


def test_a_closure_is_called_once_and_its_loss_returned():
    net, optimizer = build()
    calls: list[Tensor] = []

    def closure() -> float:
        optimizer.zero_grad()
        calls.append(fixtures.loss(net, 0, 0))
        calls[-1].backward()
        return calls[-1].item()

    before = fixtures.tensors(net)
    assert optimizer.step(closure) == calls[0].item() and len(calls) == 1
    assert not fixtures.same(before, fixtures.tensors(net))


def test_its_state_is_that_of_the_inner_optimizer():
    net, optimizer = build()
    for at in range(6):
        step(net, optimizer, at)
    first, early = build()
    for at in range(3):
        step(first, early, at)
    second, late = build()
    second.load_state_dict(first.state_dict())
    late.load_state_dict(early.state_dict())
    late.wire.load_state_dict(early.wire.state_dict())
    assert late.state is late.inner.state and late.param_groups is late.inner.param_groups
    for at in range(3, 6):
        step(second, late, at)
    assert fixtures.same(fixtures.tensors(second), fixtures.tensors(net))


def test_parameters_cannot_be_added_later():
    _, optimizer = build()
    with pytest.raises(ValueError, match="parameters"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})


def hooks_and_groups(rank: int, world: int) -> dict[str, Tensor]:
    """Two groups with rates of their own, a hook of the user's, and gradients set to zero instead of None."""
    net = fixtures.model()
    inner = torch.optim.AdamW(
        [{"params": net[0].parameters(), "lr": 0.1}, {"params": [*net[2].parameters(), *net[4].parameters()]}], lr=0.01
    )
    optimizer = gradwire.DistributedOptimizer(inner, net.named_parameters(), "int8")
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    for at in range(4):
        optimizer.zero_grad(set_to_none=False)
        fixtures.loss(net, rank, at).backward()
        optimizer.step()
    assert len(called) == 4 and [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01]
    return fixtures.tensors(net)


def test_groups_hooks_and_adam():
    first, second = run_ranks(hooks_and_groups, 2)
    assert fixtures.same(first, second)
    assert not fixtures.same(first, fixtures.tensors(fixtures.model()))


@pytest.mark.parametrize("rates", [{"lr": -0.1}, {"lr": 0.1, "momentum": -1.0}, {"lr": 0.1, "weight_decay": math.nan}])
def test_rates_below_zero_are_refused(rates):
    with pytest.raises(ValueError, match="|".join(rates)):
        gradwire.SGD([torch.nn.Parameter(torch.zeros(2))], **rates)


def test_what_is_no_scaler_is_refused():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="scaler=3"):
        gradwire.DistributedOptimizer(fixtures.sgd(model), model.named_parameters(), "sign", scaler=3)


def test_lbfgs_is_refused_when_it_is_wrapped():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(ValueError, match="LBFGS"):
        gradwire.DistributedOptimizer(optimizer, model.named_parameters(), "sign")
