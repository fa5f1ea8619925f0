"""Stacked replicas are replicas, and a study of them learns."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradwire.gossip.rate import rate_scale
from gradwire.topology import graph
from gradwire.train.data.digits import digits
from gradwire.train.decentralized import Plan, study
from gradwire.train.replicas import Replicas


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(54, 10))


def test_stacked_replicas_are_replicas() -> None:
    """Losses, gradients and running statistics, after two steps that drive them apart."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(3, 8, 1, 8, 8, generator=generator), torch.randint(0, 10, (3, 8), generator=generator)
    stacked, singles = Replicas(make(), 3), [make() for _ in range(3)]
    optimizer = torch.optim.SGD(stacked.parameters.values(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        losses = stacked.losses(inputs, targets, F.cross_entropy)
        losses.sum().backward()
        optimizer.step()
        for rank, model in enumerate(singles):
            model.zero_grad()
            loss = F.cross_entropy(model(inputs[rank]), targets[rank])
            loss.backward()
            assert losses[rank].item() == pytest.approx(loss.item(), abs=1e-5)
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
    for rank, model in enumerate(singles):
        shown = stacked.show_(rank).state_dict()
        for name, value in model.state_dict().items():
            assert torch.allclose(shown[name], value, atol=1e-5), name
    rows = stacked.read()
    stacked.write_(rows.flip(0))
    assert torch.equal(stacked.read(), rows.flip(0))


@pytest.mark.parametrize(("spec", "codec"), [("choco(ring)", "sign"), ("dcd(ring)", "qsgd(levels=1)")])
def test_a_study(spec: str, codec: str) -> None:
    heard = []
    plan = Plan(spec, codec, workers=4, epochs=4, batch=20, lr=0.05, drops=(0.8,))
    outcome = study(digits(), make, plan, heard.append)
    if codec == "sign":
        assert outcome.diverged is None and min(outcome.workers) > 0.8 and outcome.mean > 0.8
        assert len(heard) == 4 and heard[-1].loss < heard[0].loss and 0 < heard[-1].distance < 10
        assert outcome.report.steps == 4 * 15 and outcome.report.sent > 0
    else:  # three levels of noise, and nothing to make up for them
        assert outcome.diverged is not None or outcome.accuracy < 0.5


def test_the_rate_grows_with_how_many_are_averaged() -> None:
    scales = [
        rate_scale(graph(spec).on(size))
        for spec, size in (("ring", 8), ("torus", 16), ("complete", 8), ("one_peer_exponential", 8))
    ]
    assert scales == [3.0, 5.0, 8.0, 2.0]
    assert rate_scale(graph("social").on(32)) == pytest.approx(1 + 2 * 89 / 32)
    assert rate_scale(graph("ring").on(1)) == 1.0
