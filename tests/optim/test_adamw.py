"""gradwire.AdamW is torch's AdamW, and applies momentum where a wire has frozen the variance."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwire.optim import AdamW

FLAGS: list[dict[str, Any]] = [
    {},
    {"foreach": True},
    {"fused": True},
    {"foreach": False},
    {"amsgrad": True},
    {"maximize": True},
    {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3},
]


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))


def step(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    net(x).square().sum().backward()
    optimizer.step()


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_without_a_wire_it_is_torchs(flags: dict[str, Any]) -> None:
    ours, theirs = model(), model()
    a, b = AdamW(ours.parameters(), 0.01, **flags), torch.optim.AdamW(theirs.parameters(), 0.01, **flags)
    for seed in range(5):
        step(ours, a, seed)
        step(theirs, b, seed)
        assert same(ours, theirs)


@pytest.mark.parametrize("ours_first", [True, False])
def test_state_dicts_go_both_ways(ours_first: bool) -> None:
    kinds = [AdamW, torch.optim.AdamW] if ours_first else [torch.optim.AdamW, AdamW]
    net = model()
    before = kinds[0](net.parameters(), 0.01)
    for seed in range(3):
        step(net, before, seed)
    other = copy.deepcopy(net)
    after = kinds[1](other.parameters(), 0.5)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    for seed in range(3, 6):
        step(net, before, seed)
        step(other, after, seed)
    assert same(net, other)


def test_hooks_run_once() -> None:
    net, calls = model(), []
    torch.optim.AdamW(net.parameters())  # torch wraps the step of a class when it is first used
    optimizer = AdamW(net.parameters())
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    step(net, optimizer, 0)
    assert calls == ["before", "after"]


class Frozen:
    def __init__(self, found: Mapping[nn.Parameter, Tensor]) -> None:
        self.found = found

    def denominators(self) -> Mapping[nn.Parameter, Tensor]:
        return self.found

    def after_step(self) -> None: ...


def unbiased(optimizer: AdamW, p: nn.Parameter) -> Tensor:
    state = optimizer.state[p]
    return state["exp_avg_sq"] / (1 - 0.999 ** float(state["step"]))


@pytest.mark.parametrize("fused", [False, True])  # a fused optimizer counts steps where the parameters are
def test_momentum_is_applied_with_frozen_denominators(fused: bool) -> None:
    net = model()
    optimizer = AdamW(net.parameters(), 0.01, weight_decay=0.1, fused=fused)
    for seed in range(3):
        step(net, optimizer, seed)
    weight, bias = net[0].weight, net[0].bias
    variance = unbiased(optimizer, weight)
    denominator = optimizer.denominator(weight)
    optimizer.frozen = Frozen({weight: denominator})
    twin, others = weight.detach().clone(), optimizer.state[bias]["exp_avg_sq"].clone()
    weight.grad = torch.randn_like(weight)
    bias.grad = torch.ones_like(bias)
    optimizer.step()
    expected = twin * (1 - 0.01 * 0.1) - 0.01 * weight.grad / denominator
    torch.testing.assert_close(weight.detach(), expected)
    assert torch.equal(unbiased(optimizer, weight), variance)
    assert not torch.equal(optimizer.state[bias]["exp_avg_sq"], others)  # torch's step goes on for the rest
    assert float(optimizer.state[weight]["step"]) == 3  # that have measured the variance


def test_a_denominator_is_never_far_below_the_mean() -> None:
    net = nn.Linear(4, 1, bias=False)
    optimizer = AdamW(net.parameters())
    net.weight.grad = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    optimizer.step()
    for floor in (0.1, 0.3):
        found = optimizer.denominator(net.weight, floor)
        torch.testing.assert_close(found, torch.tensor([[1.0, 1.0, 1.0, floor * 0.75]]), rtol=1e-3, atol=0)


def test_a_variance_that_was_never_measured_is_named() -> None:
    net = nn.Linear(4, 2, bias=False)
    with pytest.raises(RuntimeError, match=r"\(2, 4\)"):
        AdamW(net.parameters()).denominator(net.weight)
