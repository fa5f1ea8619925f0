"""DGC that sends everything is momentum SGD on the mean gradient; its clipping is each rank's own, to thr / sqrt(N)."""

import math
from typing import Any

import pytest
import torch
from torch import nn

import fixtures
import gradwire
from spawn import Answers, cases_fixture

STEPS = 8
LR = 0.1


def references(world: int, clip: float | None, **options: Any) -> list[list[torch.Tensor]]:
    """Parameters after each step of torch's momentum SGD on the mean of all ranks' gradients."""
    net = fixtures.model().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9, **options)
    path = []
    for step in range(STEPS):
        total = [torch.zeros_like(p) for p in net.parameters()]
        for rank in range(world):
            net.zero_grad()
            net(fixtures.batch(rank, step).double()).square().mean().backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip / math.sqrt(world))
            for sum_, p in zip(total, net.parameters(), strict=True):
                sum_ += p.grad / world
        for sum_, p in zip(total, net.parameters(), strict=True):
            p.grad = sum_
        optimizer.step()
        path.append([p.detach().float() for p in net.parameters()])
    return path


def with_dgc(rank: int, world: int, variant: tuple[float | None, float, bool]) -> list[list[torch.Tensor]]:
    clip, decay, nesterov = variant
    net = fixtures.model()
    spec = f"dgc(1.0, masking=False, nesterov={nesterov}, clip={clip})"
    wire = gradwire.compress(net, spec, bundle="fp32")
    optimizer = gradwire.SGD(net.parameters(), lr=LR, momentum=0.9, weight_decay=decay, nesterov=nesterov)
    path = []
    for step in range(STEPS):
        optimizer.zero_grad()
        fixtures.loss(net, rank, step).backward()
        wire()
        optimizer.step()
        path.append([p.detach().clone() for p in net.parameters()])
    return path


VARIANTS = {
    f"clip={clip} decay={decay} nesterov={nesterov}": (clip, decay, nesterov)
    for clip, decay in ((None, 0.0), (None, 0.05), (0.05, 0.02))
    for nesterov in (False, True)
}
answers = cases_fixture(with_dgc, (1, 2), VARIANTS)


@pytest.mark.parametrize("case", VARIANTS)
def test_dgc_of_everything_is_momentum_sgd(case: str, answers: Answers):
    clip, decay, nesterov = VARIANTS[case]
    ranks = answers[case]
    expected = references(len(ranks), clip, weight_decay=decay, nesterov=nesterov)
    for path in ranks:
        for step, (ours, theirs) in enumerate(zip(path, expected, strict=True)):
            for one, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6, msg=f"{step=}")


def test_clipping_has_an_effect():
    """Otherwise the test above would not test it."""
    unclipped = references(2, None)[-1]
    clipped = references(2, 0.05)[-1]
    assert not any(torch.allclose(one, other, rtol=1e-3) for one, other in zip(unclipped, clipped, strict=True))


def test_masking_stops_momentum_only_where_something_was_selected():
    net = fixtures.model()
    wire = gradwire.compress(net, "dgc(0.25)")
    fixtures.loss(net, 0, 0).backward()
    wire()
    state = fixtures.memories(wire)
    update = net[0].weight.grad.flatten()
    assert torch.equal(state["momentum/0.weight"] == 0, update != 0)
    assert bool((state["momentum/0.bias"] != 0).all()), "biases travel dense, and keep their momentum"


def test_the_optimizer_for_updates_with_momentum_is_saved_and_loaded():
    def train(net: nn.Module, optimizer: gradwire.SGD, wire: gradwire.Wire, steps: range) -> None:
        fixtures.plain_loop(net, wire, optimizer, steps, 0)

    def build() -> tuple[nn.Module, gradwire.SGD, gradwire.Wire]:
        net = fixtures.model()
        return net, gradwire.SGD(net.parameters(), lr=LR, weight_decay=0.1), gradwire.compress(net, "dgc(0.2)")

    whole, optimizer, wire = build()
    train(whole, optimizer, wire, range(6))
    first, optimizer, wire = build()
    train(first, optimizer, wire, range(3))
    second, optimizer2, wire2 = build()
    second.load_state_dict(first.state_dict())
    optimizer2.load_state_dict(optimizer.state_dict())
    wire2.load_state_dict(wire.state_dict())
    train(second, optimizer2, wire2, range(3, 6))
    assert fixtures.same(fixtures.tensors(second), fixtures.tensors(whole))
