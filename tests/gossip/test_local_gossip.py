"""Local steps before rounds of gossip, and NoLoCo's outer momentum."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

import fixtures
import gradwire
from gossip_fixtures import Vector, optimizers, replicas, simulated, train, vectors
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


def test_reports_between_rounds_are_those_of_the_last_round() -> None:
    net, x = simulated(WORLD, "local_gossip(choco(ring, gamma=0.3), H=5)", "sign"), vectors(WORLD)
    assert (net.report().rounds, net.report().messages) == (0, 0)
    for _ in range(5):
        x = net.mix(x)
    after = net.report()
    assert after.gamma == 0.3 and after.consensus > 0
    for _ in range(3):
        x = net.mix(x)
    between = net.report()
    assert (between.gamma, between.consensus, between.sent) == (0.3, after.consensus, after.sent)
    assert (between.steps, between.rounds, between.messages) == (8, 1, 2)


def test_a_replica_that_is_not_finite_stays_so_at_local_steps_and_is_not_evaluated_or_saved() -> None:
    net = simulated(WORLD, "local_gossip(dpsgd(ring), H=5)")
    with torch.no_grad():
        net.models[2].parts[0][0, 0] = torch.nan
    net()
    assert net.models[2].parts[0].isnan().sum() == 1
    for use in (net.check, net.distance, net.state_dict, lambda: net.mean_into_(Vector())):
        with pytest.raises(Diverged, match="rank 2"):
            use()


def diverging(rank: int, world: int) -> list[str]:
    """What each rank is told after a local step, where rank 1 is no longer finite."""
    model = Vector()
    net = gradwire.gossip(model, "local_gossip(dpsgd(ring), H=5)")
    net()
    assert net.evaluate_mean(lambda: rank) == rank and net.distance() == 0.0
    if rank == 1:
        torch.nn.init.constant_(model.parts[0], torch.inf)
    net()
    told = []
    for use in (net.check, net.distance, lambda: net.evaluate_mean(lambda: rank)):
        with pytest.raises(Diverged) as caught:
            use()
        told.append(str(caught.value))
    return told


def test_a_process_that_is_not_finite_stops_the_evaluation_of_all() -> None:
    for rank, told in enumerate(run_ranks(diverging, 2)):
        assert all(f"parameters of {('another', 'this')[rank]} rank are no longer finite" in text for text in told)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("local_gossip(choco(ring), H=0)", "H=0 must be"),
        ("local_gossip(ring)", "is no gossip method"),
        ("noloco(ring, momentum=1.0)", r"momentum=1\.0 must be"),
        ("noloco(ring, momentum='a')", "momentum='a' must be"),
        ("noloco(ring, rate='a')", "rate='a' must be a positive number"),
    ],
)
def test_odd_arguments_are_refused(spec: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
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
