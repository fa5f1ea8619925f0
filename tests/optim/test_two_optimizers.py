"""Two optimizers may step a model, and one AdamW two models: an optimizer is checked against what it steps."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gradwire

STEPS, RATE = 6, 0.01
ONEBIT = "onebit_adam(start=2, per=16)"
SECOND = "2.weight"


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 10, bias=False), nn.Tanh(), nn.Linear(10, 6, bias=False))


def train(net: nn.Module, wire: Callable[[], None], *optimizers: torch.optim.Optimizer) -> None:
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(step)
        x, y = torch.randn(16, 12, generator=draw), torch.randn(16, 6, generator=draw)
        net.zero_grad()
        (net(x) - y).square().mean().backward()
        wire()
        for optimizer in optimizers:
            optimizer.step()


def momentum_sgd(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr, momentum=0.9)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Muon, torch.optim.AdamW, gradwire.AdamW, momentum_sgd])
def test_any_optimizer_steps_beside_the_adamw_whose_momentum_is_compressed(make: Any) -> None:
    net = model()
    first, second = gradwire.AdamW([net[0].weight], RATE), make([net[2].weight], RATE)
    wire = gradwire.compress(net, ONEBIT, optimizer=first, rules=[gradwire.Rule("int4", name=SECOND)])
    before = [p.detach().clone() for p in net.parameters()]
    train(net, wire, first, second)
    assert first.frozen.denominators().keys() == {net[0].weight}
    assert not any(torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True))


def test_another_optimizer_must_not_step_what_the_adamw_steps() -> None:
    net = model()
    first = gradwire.AdamW([net[0].weight], RATE)
    wire = gradwire.compress(net, ONEBIT, optimizer=first, rules=[gradwire.Rule("int4", name=SECOND)])
    with pytest.raises(ValueError, match=r"torch\.optim\.AdamW was given"):
        train(net, wire, torch.optim.AdamW(net.parameters(), RATE))


@pytest.mark.parametrize("second", ["topk(0.05)", "dgc(0.05)"])
def test_adamw_goes_with_its_own_lanes_whatever_sgd_is_sent(second: str) -> None:
    net = model()
    wire = gradwire.compress(net, "int4", rules=[gradwire.Rule(second, name=SECOND)])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        train(net, wire, torch.optim.AdamW([net[0].weight], RATE), torch.optim.SGD([net[2].weight], RATE))
    assert not [one for one in seen if one.category is gradwire.OptimizerWarning]


def test_adamw_is_warned_of_and_refused_for_its_own_lanes() -> None:
    net = model()
    wire = gradwire.compress(net, "int4", rules=[gradwire.Rule("topk(0.05)", name=SECOND)])
    optimizers = torch.optim.SGD([net[0].weight], RATE), torch.optim.AdamW([net[2].weight], RATE)
    with pytest.warns(gradwire.OptimizerWarning, match="AdamW"):
        train(net, wire, *optimizers)
    del wire
    wire = gradwire.compress(net, "int4", rules=[gradwire.Rule("dgc(0.05)", name=SECOND)])
    with pytest.raises(ValueError, match=r"AdamW has momentum of its own, and 'dgc\(0\.05\)'"):
        train(net, wire, *optimizers)


def test_an_optimizer_that_takes_over_more_parameters_is_checked_again() -> None:
    net = model()
    wire = gradwire.compress(net, "int4", rules=[gradwire.Rule("dgc(0.05)", name=SECOND)])
    optimizer = torch.optim.AdamW([net[0].weight], RATE)
    train(net, wire, optimizer)
    optimizer.add_param_group({"params": [net[2].weight]})
    with pytest.raises(ValueError, match="AdamW has momentum of its own"):
        train(net, wire, optimizer)


@pytest.mark.parametrize("second", ["int4", "fp32", ONEBIT])
def test_an_adamw_stays_with_the_wire_that_compresses_its_momentum(second: str) -> None:
    nets = model(), model()
    optimizer = gradwire.AdamW([p for net in nets for p in net.parameters()], RATE)
    train(nets[0], gradwire.compress(nets[0], ONEBIT, optimizer=optimizer), optimizer)
    with pytest.raises(
        ValueError, match=r"momentum of '\d\.weight', and one AdamW serves one wire; leave optimizer= out"
    ):
        gradwire.compress(nets[1], second, optimizer=optimizer)


def test_a_wire_of_gradients_needs_no_part_of_the_adamw_of_another_wire() -> None:
    nets = model(), model()
    optimizer = gradwire.AdamW([p for net in nets for p in net.parameters()], RATE)
    wires = [gradwire.compress(nets[0], ONEBIT, optimizer=optimizer), gradwire.compress(nets[1], "int4")]
    for net, wire in zip(nets, wires, strict=True):
        train(net, wire, optimizer)
    assert optimizer.frozen.denominators().keys() == {nets[0][0].weight, nets[0][2].weight}


def test_workers_that_are_made_again_take_over_their_adamw() -> None:
    net = model()
    optimizer = gradwire.AdamW(net.parameters(), RATE)
    for _ in range(2):
        workers = gradwire.lockstep([net], ONEBIT, optimizers=[optimizer])
        train(net, workers, optimizer)
    assert optimizer.frozen.wire is workers.wires[0]
