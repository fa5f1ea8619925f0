"""Local steps before rounds of gossip, and NoLoCo's outer momentum."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

import fixtures
import gradwire
from gossip_fixtures import optimizers, replicas, simulated, train, vectors
from gradwire.gossip import Diverged
from spawn import run_ranks

WORLD = 4


@pytest.mark.parametrize("method", ["choco(ring, gamma=0.4)", "dpsgd(one_peer_exponential)", "sgp(exponential)"])
def test_rounds_come_every_so_many_steps_and_are_those_of_the_method(method: str) -> None:
    codec = "sign" if method.startswith("choco") else None
    often, rarely = simulated(WORLD, method, codec), simulated(WORLD, f"local_gossip({method}, H=3)", codec)
    x = y = vectors(WORLD)
    for step in range(1, 10):
        noise = 0.1 * vectors(WORLD, seed=step)
        before, y = y, rarely.mix(y + noise)
        x = x + noise
        if step % 3:
            assert torch.equal(y, before + noise) and rarely.traffic[0].sent == often.traffic[0].sent
        else:
            x = often.mix(x)
            assert torch.equal(x, y)
    assert rarely.report().steps == 9 and rarely.report().ratio > 2.9 * often.report().ratio


def test_noloco_is_heavy_ball_on_the_mean_over_neighbors() -> None:
    """A restatement with velocities: m = 0.5 m + 0.7 (mean - w);  w = w + m."""
    net, x = simulated(WORLD, "noloco(complete)"), vectors(WORLD)
    w, m = torch.zeros_like(x), torch.zeros_like(x)
    for step in range(6):
        mean = x.mean(0).expand_as(x)
        m = 0.5 * m + 0.7 * (mean - w)
        w = w + m
        assert torch.allclose(net.mix(x), w, atol=1e-5), step
        x = w + 0.1 * vectors(WORLD, seed=step + 1)


def test_parameters_that_are_not_finite_stop_all_ranks_at_the_round() -> None:
    net, x = simulated(WORLD, "local_gossip(dpsgd(ring), H=2)"), vectors(WORLD)
    x[1, 0] = torch.nan
    x = net.mix(x)
    with pytest.raises(Diverged):
        net.mix(x)


@pytest.mark.parametrize("spec", ["local_gossip(choco(ring), H=0)", "local_gossip(ring)", "noloco(ring, momentum=1.0)"])
def test_odd_arguments_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=r"H=0|ring|momentum=1\.0"):
        gradwire.parse(spec)


def resumed(rank: int, world: int, folder: str, spec: str) -> tuple[Any, Any]:
    """A run without a break, and one that stops between two rounds."""
    model = replicas(world)[rank]
    (optimizer,) = optimizers([model])
    net = gradwire.gossip(model, spec)
    train(net, [model], [optimizer], range(rank, rank + 1), range(5))
    gradwire.save(net, folder)
    again = fixtures.model(seed=9)
    (second,) = optimizers([again])
    other = gradwire.gossip(again, spec)
    again.load_state_dict(model.state_dict())
    second.load_state_dict(deepcopy(optimizer.state_dict()))
    gradwire.load(other, folder)
    for one, net_, opt in ((model, net, optimizer), (again, other, second)):
        train(net_, [one], [opt], range(rank, rank + 1), range(5, 9))
    return fixtures.tensors(model), fixtures.tensors(again)


def test_processes_equal_lockstep_and_go_on_between_rounds_bit_for_bit(tmp_path: Path) -> None:
    spec = "local_gossip(noloco(one_peer_exponential), H=3)"
    models = replicas(2)
    net = gradwire.gossip_lockstep(models, spec)
    train(net, models, optimizers(models), range(2), range(9))
    for model, (through, again) in zip(models, run_ranks(resumed, 2, str(tmp_path), spec), strict=True):
        assert fixtures.same(through, again) and fixtures.same(through, fixtures.tensors(model))
