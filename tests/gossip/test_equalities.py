"""Methods that equal one another in special cases."""

from contextlib import nullcontext

import pytest
import torch

import fixtures
import gradwire
from gossip_fixtures import optimizers, replicas, simulated, train, vectors
from gradwire.engine import lockstep
from gradwire.engine.drive import interleave
from gradwire.engine.lockstep import Lockstep
from gradwire.gossip import Node

STEPS = range(6)


def trained(spec: str, codec: str | None = None, ranks: int = 4, **options: object) -> list[dict[str, torch.Tensor]]:
    models = replicas(ranks)
    net = gradwire.gossip_lockstep(models, spec, codec, **options)
    train(net, models, optimizers(models), range(ranks), STEPS)
    return [fixtures.tensors(model) for model in models]


def close(left: list[dict[str, torch.Tensor]], right: list[dict[str, torch.Tensor]]) -> bool:
    return all(torch.allclose(a[name], b[name], atol=2e-6) for a, b in zip(left, right, strict=True) for name in a)


@pytest.mark.parametrize("spec", ["dpsgd(complete)", "centralized"])
def test_dpsgd_on_the_complete_graph_is_all_reduce_sgd(spec: str) -> None:
    """With momentum too: the optimizer is linear in the gradients, so means of models are models of mean gradients."""
    models = replicas(1)
    (model,), (optimizer,) = models, optimizers(models)
    for step in STEPS:
        optimizer.zero_grad()
        torch.stack([fixtures.loss(model, rank, step) for rank in range(4)]).mean().backward()
        optimizer.step()
    assert close(trained(spec), [fixtures.tensors(model)] * 4)


def test_choco_with_fp32_and_gamma_1_is_dpsgd() -> None:
    assert close(trained("choco(ring, gamma=1)"), trained("dpsgd(ring)"))
    assert close(trained("choco(ring)", "fp32"), trained("dpsgd(ring)"))  # auto finds 1 there


def test_dcd_with_fp32_is_dpsgd() -> None:
    """They differ in when the step is taken: before the averaging, or after it."""
    x = vectors(8)
    dcd, dpsgd = simulated(8, "dcd(ring)"), simulated(8, "dpsgd(ring)")
    a = dcd.mix(x)  # from the common zero: the step alone
    assert torch.allclose(a, x, atol=1e-6)
    assert torch.allclose(dcd.mix(a), dpsgd.mix(x), atol=1e-5)


def test_push_sum_with_even_weights_is_dpsgd() -> None:
    assert close(trained("sgp(one_peer_exponential)"), trained("dpsgd(one_peer_exponential)"))


@pytest.mark.parametrize("codec", ["sign", "topk(0.1)", "randomk(0.2)"])
def test_copies_by_edge_are_copies_by_node(monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    """With all neighbors there, elastic CHOCO is CHOCO."""
    monkeypatch.setattr(lockstep, "cached", nullcontext)  # each rank decodes what it is sent
    x = vectors(6)
    plain = simulated(6, "choco(ring, gamma=0.3)", codec)
    nodes = [Node(n.method, n.codec, n.topology, n.rank, n.seed, n.tensors, n.units, elastic=True) for n in plain.nodes]
    for node in nodes:
        node.begin(torch.zeros(x.shape[1]))
    y = x
    for _ in range(5):
        protocols = [
            interleave([node.run(row, live=dict.fromkeys(node.topology.peers(node.rank), False))])
            for node, row in zip(nodes, y, strict=True)
        ]
        y = torch.stack([mixed for (mixed,) in Lockstep(6).drive(protocols)])
        x = plain.mix(x)
        assert torch.allclose(x, y, atol=1e-5)


def test_overlap_adds_the_correction_one_step_later() -> None:
    x = vectors(4)
    late, plain = simulated(4, "dpsgd(ring)", overlap=True), simulated(4, "dpsgd(ring)")
    assert torch.equal(late.mix(x), x)
    assert torch.allclose(late.mix(x), plain.mix(x), atol=1e-6)
    models = replicas(4)
    net = gradwire.gossip_lockstep(models, "choco(ring)", "sign", overlap=True)
    train(net, models, optimizers(models), range(4), range(60))
    assert net.distance() < 0.5


def test_granularity_sets_the_vectors_of_the_codec() -> None:
    layered, whole = (
        simulated(4, "choco(ring, gamma=0.3)", "sign"),
        simulated(4, "choco(ring, gamma=0.3)", "sign", granularity="model"),
    )
    x = vectors(4)
    layered.mix(x), whole.mix(x)
    assert len(layered.nodes[0].units) == 3 and len(whole.nodes[0].units) == 1
    assert layered.report().sent - whole.report().sent == 2 * 2 * 4  # two more scales, to two neighbors


def test_the_mean_model_holds_the_mean_of_running_statistics() -> None:
    models = [torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)) for _ in range(3)]
    net = gradwire.gossip_lockstep(models, "dpsgd(ring)")
    for rank, model in enumerate(models):
        model[1].running_mean.fill_(float(rank))
        torch.nn.init.constant_(model[0].weight, float(rank))
    mean = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    net.mean_into_(mean)
    assert bool((mean[1].running_mean == 1.0).all()) and bool((mean[0].weight == 1.0).all())
