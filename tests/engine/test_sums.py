"""What the sum of 1-D tensors in 16 bits loses of a constant gradient, and which bundles lose nothing."""

from typing import Any

import pytest
import torch
from torch import nn

import gradwire

STEPS = 100
BY_TWO_WAY = [gradwire.Rule("fp16", max_dim=1, feedback="residual", exchange="two_way")]
BUNDLES: dict[str, tuple[dict[str, Any], float, float]] = {
    "fp16": ({}, 1e-5, 5e-4),
    "bf16": ({"bundle": "bf16"}, 1e-4, 4e-3),
    "fp16 by two_way": ({"rules": BY_TWO_WAY}, 0.0, 1e-9),
    "fp32": ({"bundle": "fp32"}, 0.0, 1e-7),
}


def lost(world: int, **options: Any) -> float:
    """The share of 100 equal gradients that is neither in the updates nor in the errors still to be sent."""
    torch.manual_seed(0)
    nets = [nn.ParameterDict({"bias": torch.zeros(1000), "weight": torch.zeros(4, 4)}) for _ in range(world)]
    grads = [1e-2 * torch.randn(1000) for _ in nets]
    workers, total = gradwire.lockstep(nets, "topk(0.5)", **options), torch.zeros(1000, dtype=torch.float64)
    for _ in range(STEPS):
        for net, grad in zip(nets, grads, strict=True):
            net["bias"].grad, net["weight"].grad = grad.clone(), torch.ones(4, 4)
        workers()
        total += nets[0]["bias"].grad.double()
    total += torch.stack([wire.debts()["bias"].double() for wire in workers.wires]).mean(0)
    expected = STEPS * torch.stack(grads).double().mean(0)
    return float((total - expected).norm() / expected.norm())


@pytest.mark.parametrize("world", [2, 8])
@pytest.mark.parametrize("name", BUNDLES)
def test_sums_in_16_bits_lose_what_the_card_says(name: str, world: int) -> None:
    options, least, most = BUNDLES[name]
    assert least <= lost(world, **options) <= most
