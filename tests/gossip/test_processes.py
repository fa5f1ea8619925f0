"""Real gloo processes: the same bits as in lockstep, and as many bytes as reported."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fixtures
import gradwire
from gossip_fixtures import optimizers, replicas, train
from spawn import RankError, run_ranks

WORLD = 4
STEPS = range(13)  # beyond a window of gamma=auto
SPECS: list[tuple[str, str | None, dict[str, Any]]] = [
    ("dpsgd(ring)", "fp16", {}),
    ("dpsgd(one_peer_exponential)", None, {}),
    ("sgp(exponential)", "bf16", {}),
    ("choco(ring)", "sign", {}),
    ("choco(ring)", "topk(0.1)", {}),
    ("choco(ring)", "qsgd(levels=7, biased=True)", {"overlap": True, "seed": 3}),
    ("choco(one_peer_exponential)", "randomk(0.2)", {"granularity": "model"}),
    ("choco(path, gamma=0.2)", "topk(0.1) | sign | bitmap", {}),
    ("deepsqueeze(ring)", "sign", {}),
    ("dcd(ring)", "qsgd", {}),
    ("ecd(ring)", "natural", {}),
    ("powergossip(ring, iterations=2)", None, {}),
]


def in_process(rank: int, world: int, specs: list[tuple[str, str | None, dict[str, Any]]]) -> list[Any]:
    """Train by each spec; parameters, state, and bytes as reported and as counted in calls of torch."""
    all_to_all_single, send_one, counted, results = dist.all_to_all_single, dist.isend, [0], []

    def counting(out: Tensor, x: Tensor, into: Any, splits: list[int], **rest: Any) -> Any:
        counted[0] += (sum(splits) - splits[rank]) * x.element_size()
        return all_to_all_single(out, x, into, splits, **rest)

    def counting_one(x: Tensor, peer: int, **rest: Any) -> Any:
        counted[0] += x.numel() * x.element_size()
        return send_one(x, peer, **rest)

    for spec, codec, options in specs:
        counted[0] = 0
        model = replicas(world)[rank]
        net = gradwire.gossip(model, spec, codec, **options)
        dist.all_to_all_single, dist.isend = counting, counting_one  # whichever way a swap goes
        train(net, [model], optimizers([model]), range(rank, rank + 1), STEPS)
        state = net.state_dict()
        dist.all_to_all_single, dist.isend = all_to_all_single, send_one
        report = net.report()
        mean = net.evaluate_mean(lambda model=model: fixtures.tensors(model))
        results.append((fixtures.tensors(model), state, report.sent, counted[0], mean, net.distance()))
    return results


@pytest.fixture(scope="module")
def ranks() -> list[list[Any]]:
    """The results of all specs on each rank: processes are started once."""
    return run_ranks(in_process, WORLD, SPECS)


@pytest.mark.parametrize("i", range(len(SPECS)), ids=lambda i: f"{SPECS[i][0]} {SPECS[i][1]}")
def test_processes_equal_lockstep_bit_for_bit(ranks: list[list[Any]], i: int) -> None:
    spec, codec, options = SPECS[i]
    models = replicas(WORLD)
    net = gradwire.gossip_lockstep(models, spec, codec, **options)
    train(net, models, optimizers(models), range(WORLD), STEPS)
    states = net.state_dict()
    for rank in range(WORLD):
        parameters, state, sent, counted, mean, distance = ranks[rank][i]
        assert fixtures.same(parameters, fixtures.tensors(models[rank])), rank
        assert fixtures.same(state, states[rank]), rank
        assert sent == counted == net.report(rank).sent > 0
        for name, value in mean.items():
            expected = torch.stack([fixtures.tensors(model)[name] for model in models]).mean(0)
            assert torch.allclose(value, expected, atol=1e-6)
        assert distance == pytest.approx(net.distance(), rel=1e-4, abs=1e-6)


def disagreeing(rank: int, world: int) -> str:
    try:
        gradwire.gossip(fixtures.model(), "choco(ring)", "sign" if rank else "topk(0.1)")
    except ValueError as wrong:
        return str(wrong)
    return "attached"


def loading_other_seeds(rank: int, world: int) -> str:
    """Each rank loads a state of another seed than the other one."""
    states = [gradwire.gossip(fixtures.model(), "choco(ring)", "sign", seed=seed).state_dict() for seed in (0, 1)]
    net = gradwire.gossip(fixtures.model(), "choco(ring)", "sign")
    return fixtures.error_text(lambda: net.load_state_dict(states[rank]))


def test_states_of_different_seeds_are_refused() -> None:
    for message in run_ranks(loading_other_seeds, 2):
        assert "rank 1 has another seed than rank 0: '1', not '0'; load states of the same seed" in message


def averaged_already(rank: int, world: int) -> tuple[str, str]:
    model = fixtures.model()
    twice, once = (
        fixtures.error_text(lambda m=m: gradwire.gossip(m, "choco(ring)")) for m in (fixtures.ddp(model), model)
    )
    return twice, once


def test_ddp_with_gossip_is_refused() -> None:
    for twice, once in run_ranks(averaged_already, 2):
        assert "averages gradients over 2 ranks" in twice and "pass the module inside" in twice
        assert once == "no error"


def resumed(rank: int, world: int, folder: str) -> bool:
    """Save after some steps, go on; load into new objects, go on alike."""
    model = fixtures.model()
    net, sgd = gradwire.gossip(model, "choco(ring)", "sign", overlap=True), optimizers([model])
    train(net, [model], sgd, range(rank, rank + 1), range(5))
    gradwire.save(net, folder)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    moments = sgd[0].state_dict()
    copy = fixtures.model()
    other, sgd_other = gradwire.gossip(copy, "choco(ring)", "sign", overlap=True), optimizers([copy])
    copy.load_state_dict(weights)
    sgd_other[0].load_state_dict(
        {**moments, "state": {k: {n: v.clone() for n, v in s.items()} for k, s in moments["state"].items()}}
    )
    gradwire.load(other, folder)
    train(net, [model], sgd, range(rank, rank + 1), range(5, 10))
    train(other, [copy], sgd_other, range(rank, rank + 1), range(5, 10))
    return fixtures.same(fixtures.tensors(model), fixtures.tensors(copy))


def test_different_specs_are_refused_and_states_resume(tmp_path: Any) -> None:
    for message in run_ranks(disagreeing, 2):
        assert "rank 1 has another spec than rank 0" in message
    assert run_ranks(resumed, 3, str(tmp_path)) == [True] * 3


def nonfinite(rank: int, world: int) -> None:
    model = fixtures.model()
    net = gradwire.gossip(model, "choco(ring)", "sign")
    if rank == 1:
        torch.nn.init.constant_(next(model.parameters()), float("inf"))
    net()


def test_a_nonfinite_replica_raises_on_all_ranks() -> None:
    with pytest.raises(RankError, match="no longer finite"):
        run_ranks(nonfinite, 3)
