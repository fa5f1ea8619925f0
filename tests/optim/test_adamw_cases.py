"""Momentum is applied rightly to parameters of other groups, formats and numbers of steps, or it is refused."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire

START, STEPS, RATE, DECAY, BETA = 4, 10, 0.01, 0.1, 0.9


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 8, bias=False), nn.Tanh(), nn.Linear(8, 6, bias=False)).to(dtype)


def backward(net: nn.Module, step: int) -> None:
    draw = torch.Generator().manual_seed(step)
    x, y = torch.randn(16, 12, generator=draw), torch.randn(16, 6, generator=draw)
    net.zero_grad()
    (net(x.to(net[0].weight.dtype)) - y.to(net[0].weight.dtype)).square().mean().backward()


def train(net: nn.Module, wire: gradwire.Wire, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        backward(net, step)
        wire()
        optimizer.step()


def expected(before: Tensor, p: nn.Parameter, optimizer: gradwire.AdamW, direction: float) -> Tensor:
    momentum = p.grad / optimizer.frozen.denominators()[p]
    return before * (1 - RATE * DECAY) + direction * RATE * momentum


def test_momentum_of_a_loss_that_is_maximized_changes_its_sign_on_both_ways() -> None:
    net = model()
    optimizer = gradwire.AdamW(net.parameters(), RATE, weight_decay=DECAY, maximize=True)
    spec = f"dgc_adam(1.0, start={START}, values=fp32, first=fp32, floor=0.0)"
    wire = gradwire.compress(net, spec, optimizer=optimizer)
    p = net[0].weight
    train(net, wire, optimizer, range(START))
    first = optimizer.state[p]["exp_avg"].clone()
    before = p.detach().clone()
    train(net, wire, optimizer, range(START, START + 1))
    torch.testing.assert_close(p.detach(), expected(before, p, optimizer, 1.0))
    assert torch.cosine_similarity(p.grad.flatten(), -first.flatten(), dim=0) > 0.5


def test_momentum_of_a_loss_that_is_maximized_goes_back_to_torchs_adamw() -> None:
    net = model()
    optimizer = gradwire.AdamW(net.parameters(), RATE, maximize=True)
    wire = gradwire.compress(net, f"onebit_adam(start={START}, per=16)", optimizer=optimizer)
    train(net, wire, optimizer, range(STEPS))
    saved, p = optimizer.state_dict()["state"][0]["exp_avg"], net[0].weight
    assert torch.equal(saved.sign(), -wire.state_dict()["momentum/0.weight"].view_as(p).sign())


def test_every_parameter_counts_its_own_steps() -> None:
    net = model()
    before = torch.optim.AdamW(net.parameters(), RATE, weight_decay=DECAY)
    for step in range(START):
        backward(net, step)
        if step:
            net[0].weight.grad = None
        before.step()
    optimizer = gradwire.AdamW(net.parameters(), RATE, weight_decay=DECAY)
    optimizer.load_state_dict(copy.deepcopy(before.state_dict()))
    wire = gradwire.compress(net, "onebit_adam(start=0, per=16)", optimizer=optimizer)
    roots = [optimizer.denominator(p) for p in net.parameters()]
    for step, skipped in ((START, None), (START + 1, net[2].weight), (START + 2, None)):
        weights = [p.detach().clone() for p in net.parameters()]
        backward(net, step)
        if skipped is not None:
            skipped.grad = None
        wire()
        optimizer.step()
        for p, weight in zip(net.parameters(), weights, strict=True):
            if p.grad is not None:
                torch.testing.assert_close(p.detach(), expected(weight, p, optimizer, -1.0))
    assert [int(optimizer.state[p]["step"]) for p in net.parameters()] == [1, START]
    for p, root in zip(net.parameters(), roots, strict=True):
        torch.testing.assert_close(optimizer.denominator(p), root)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_frozen_variance_stays_what_it_is_in_every_format(dtype: torch.dtype) -> None:
    net = model(dtype)
    optimizer = gradwire.AdamW(net.parameters(), RATE)
    wire = gradwire.compress(net, f"onebit_adam(start={START}, per=16)", optimizer=optimizer)
    train(net, wire, optimizer, range(START))
    root = optimizer.denominator(net[0].weight)
    train(net, wire, optimizer, range(START, 60))
    torch.testing.assert_close(optimizer.denominator(net[0].weight), root)
    assert optimizer.state[net[0].weight]["exp_avg_sq"].dtype == dtype
    saved = copy.deepcopy(optimizer.state_dict())
    wire.set("dense")
    train(net, wire, optimizer, range(60, 62))
    other = torch.optim.AdamW((alone := copy.deepcopy(net)).parameters(), RATE)
    other.load_state_dict(saved)
    backward(alone, 60)
    other.step()


def test_parameters_of_64_bits_are_not_rounded() -> None:
    net = model(torch.float64)
    optimizer = gradwire.AdamW(net.parameters(), 1e-12, weight_decay=0.0)
    wire = gradwire.compress(net, "onebit_adam(start=2, per=16)", optimizer=optimizer)
    train(net, wire, optimizer, range(2))
    before = net[0].weight.detach().clone()
    train(net, wire, optimizer, range(2, 3))
    assert bool((net[0].weight != before).all()) and (net[0].weight - before).abs().max() < 1e-10


@pytest.mark.parametrize("spec", [f"onebit_adam(start={START}, per=16)", f"dgc_adam(0.1, start={START})"])
def test_a_variance_that_no_gradient_has_reached_is_not_frozen(spec: str) -> None:
    net = model()
    optimizer = gradwire.AdamW(net.parameters(), RATE)
    wire = gradwire.compress(net, spec, optimizer=optimizer)
    with pytest.raises(RuntimeError, match=r"gradients of '2\.weight' were zero so far.*longer start"):
        for step in range(START + 1):
            backward(net, step)
            net[2].weight.grad.zero_()
            wire()
            optimizer.step()


def test_a_first_beta_that_a_scheduler_changes_is_refused() -> None:
    net = model()
    optimizer = gradwire.AdamW(net.parameters(), RATE)
    wire = gradwire.compress(net, f"onebit_adam(start={START}, per=16)", optimizer=optimizer)
    train(net, wire, optimizer, range(STEPS))
    optimizer.param_groups[0]["betas"] = (0.85, 0.999)
    for _ in range(2):  # also when the error was caught
        with pytest.raises(ValueError, match=r"betas=\(0\.85.*cycle_momentum=False"):
            train(net, wire, optimizer, range(STEPS, STEPS + 1))


GROUPS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"lr": 0.02}, {"weight_decay": 0.3, "eps": 1e-4}),
    ({"amsgrad": True}, {"betas": (BETA, 0.95)}),
    ({"maximize": True, "lr": 0.002}, {"fused": True}),
]


@pytest.mark.parametrize("options", GROUPS, ids=str)
def test_groups_have_options_of_their_own(options: tuple[dict[str, Any], dict[str, Any]]) -> None:
    net = model()
    groups = [{"params": [net[2 * i].weight], **each} for i, each in enumerate(options)]
    optimizer = gradwire.AdamW(groups, RATE, weight_decay=DECAY)
    wire = gradwire.compress(net, f"onebit_adam(start={START}, per=16)", optimizer=optimizer)
    train(net, wire, optimizer, range(STEPS))
    before = [p.detach().clone() for p in net.parameters()]
    train(net, wire, optimizer, range(STEPS, STEPS + 1))
    for p, weight, group in zip(net.parameters(), before, optimizer.param_groups, strict=True):
        move = p.grad / optimizer.frozen.denominators()[p]
        sign = 1.0 if group["maximize"] else -1.0
        found = weight * (1 - group["lr"] * group["weight_decay"]) + sign * group["lr"] * move
        torch.testing.assert_close(p.detach(), found)


def scaled(spec: str, overflow: int, wraps: bool) -> nn.Module:
    """After a training in which one step overflows."""
    net, scaler = model(), torch.amp.GradScaler("cpu", init_scale=2.0**8)
    optimizer: Any = gradwire.AdamW(net.parameters(), RATE, weight_decay=DECAY)
    if wraps:
        optimizer = gradwire.DistributedOptimizer(optimizer, net.named_parameters(), spec, scaler=scaler)
    else:
        wire = gradwire.compress(net, spec, optimizer=optimizer, scaler=scaler)
    for step in range(STEPS):
        backward(net, step)
        factor = torch.inf if step == overflow else scaler.scale(torch.ones(())).item()
        for p in net.parameters():
            p.grad.mul_(factor)
        if not wraps:
            wire()
        scaler.step(optimizer)
        scaler.update()
    return net


@pytest.mark.parametrize("overflow", [START, 6, 7])  # where the variance is frozen; of the second spec, again
@pytest.mark.parametrize(
    "spec", [f"onebit_adam(start={START}, per=16)", f"zero_one_adam(start={START}, per=16, refresh=2)"]
)
def test_a_step_that_overflows_is_skipped_alike_by_a_wrapped_optimizer(spec: str, overflow: int) -> None:
    nets = [scaled(spec, overflow, wraps) for wraps in (False, True)]
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert bool(p.isfinite().all()) and torch.equal(p, q)


def step_scaled(net: nn.Module, wire: Any, optimizer: gradwire.AdamW, scaler: Any, step: int, first: bool) -> None:
    """A step whose gradients are unscaled before the wire is called, or after."""
    backward(net, step)
    for p in net.parameters():
        p.grad.mul_(scaler.scale(torch.ones(())))
    if first:
        scaler.unscale_(optimizer)
    wire()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("attach", ["compress", "lockstep"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscales", [False, True])  # the loop itself, after the wire
def test_a_scaler_that_the_wire_does_not_know_is_refused_in_the_first_step(
    unscales: bool, fused: bool, attach: str
) -> None:
    net, scaler = model(), torch.amp.GradScaler("cpu", init_scale=2.0**8)
    optimizer, spec = gradwire.AdamW(net.parameters(), RATE, fused=fused), f"onebit_adam(start={START}, per=16)"
    if attach == "compress":
        wire: Any = gradwire.compress(net, spec, optimizer=optimizer)
    else:
        wire = gradwire.lockstep([net], spec, optimizers=[optimizer])
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(ValueError, match=r"GradScaler .*scaler=scaler"):
        step_scaled(net, lambda: (wire(), unscales and scaler.unscale_(optimizer)), optimizer, scaler, 0, first=False)
    assert all(map(torch.equal, net.parameters(), before))


def test_gradients_of_replicas_may_be_unscaled_before_they_are_compressed() -> None:
    spec, nets = f"onebit_adam(start={START}, per=16)", [model(), model()]
    for net, scaler in zip(nets, (None, torch.amp.GradScaler("cpu", init_scale=2.0**8)), strict=True):
        optimizer = gradwire.AdamW(net.parameters(), RATE)
        wire = gradwire.lockstep([net], spec, optimizers=[optimizer])
        for step in range(STEPS):
            if scaler is None:
                train(net, wire, optimizer, range(step, step + 1))
            else:
                step_scaled(net, wire, optimizer, scaler, step, first=True)
    assert all(map(torch.equal, nets[0].parameters(), nets[1].parameters()))


def test_momentum_that_ranks_do_not_share_begins_anew_with_torchs_adamw() -> None:
    """What AdamW had when the variance was frozen would be another direction than any of today."""
    net = model()
    optimizer = gradwire.AdamW(net.parameters(), RATE)
    wire = gradwire.compress(net, f"dgc_adam(0.1, start={START})", optimizer=optimizer)
    train(net, wire, optimizer, range(START))
    assert optimizer.state_dict()["state"][0]["exp_avg"].any()
    train(net, wire, optimizer, range(START, STEPS))
    assert not optimizer.state_dict()["state"][0]["exp_avg"].any()
    wire.set("dense")
    train(net, wire, optimizer, range(STEPS, STEPS + 1))
    p = net[0].weight
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], (1 - BETA) * p.grad)
