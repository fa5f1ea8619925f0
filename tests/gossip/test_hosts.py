"""A node of several ranks: dense means of gradients inside, gossip between; as if each node were one rank."""

from collections import Counter
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fixtures
import gradwire
from gossip_fixtures import optimizers, replicas
from gradwire.integrations.gossip.hosts import require_one_thread
from spawn import run_ranks

NODES = [[0, 1], [2, 3]]
STEPS = range(13)  # beyond a window of gamma=auto
SPECS: list[tuple[str, str | None, dict[str, Any]]] = [
    ("choco(ring, gamma=0.4)", "sign", {}),
    ("choco(ring, gamma=0.4)", "topk(0.1)", {"overlap": True}),
    ("choco(ring, gamma=auto)", "sign", {"granularity": "model"}),  # one vector, hence one rank's, hence one gamma
    ("dpsgd(complete)", "fp16", {}),
    ("powergossip(ring)", None, {}),
]


def composed(spec: str, codec: str | None, options: dict[str, Any]) -> tuple[list[nn.Module], gradwire.SimulatedGossip]:
    """By hand: the mean of each node's gradients, and one replica for each node."""
    models = replicas(len(NODES))
    net = gradwire.gossip_lockstep(models, spec, codec, **options)
    steppers = optimizers(models)
    for step in STEPS:
        for model, optimizer, node in zip(models, steppers, NODES, strict=True):
            grads = []
            for rank in node:
                model.zero_grad()
                fixtures.loss(model, rank, step).backward()
                grads.append([p.grad.clone() for p in model.parameters()])
            for p, first, second in zip(model.parameters(), *grads, strict=True):
                p.grad = (first + second) / 2
            optimizer.step()
        net()
    return models, net


def train(
    net: gradwire.GossipSync, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range
) -> None:
    for step in steps:
        optimizer.zero_grad()
        fixtures.loss(model, rank, step).backward()
        net.average_gradients()
        optimizer.step()
        net()


def in_processes(rank: int, world: int, specs: list[Any]) -> list[Any]:
    all_to_all_single, send_one, results = dist.all_to_all_single, dist.isend, []
    counted: Counter[str] = Counter()  # by group, whichever way a swap goes

    def all_to_all(out: Tensor, x: Tensor, into: Any, splits: list[int], group: Any) -> Any:
        counted[group.group_name] += (sum(splits) - splits[dist.get_rank(group)]) * x.element_size()
        return all_to_all_single(out, x, into, splits, group=group)

    def isend(x: Tensor, peer: int, group: Any) -> Any:
        counted[group.group_name] += x.numel() * x.element_size()
        return send_one(x, peer, group=group)

    for spec, codec, options in specs:
        model = replicas(world)[rank]
        net = gradwire.gossip(model, spec, codec, across=NODES, **options)
        counted.clear()
        dist.all_to_all_single, dist.isend = all_to_all, isend
        train(net, model, optimizers([model])[0], rank, STEPS)
        state = net.state_dict()
        dist.all_to_all_single, dist.isend = all_to_all_single, send_one
        groups = [counted[link.group.group_name] for link in (net.link.between, net.link.inside_host)]
        results.append((fixtures.tensors(model), state, net.report(), groups, net.distance()))
    return results


def memories(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: x for key, x in state.items() if not key.startswith("gradwire/")}


@pytest.fixture(scope="module")
def ranks() -> list[list[Any]]:
    """The results of all specs on each rank: processes are started once."""
    return run_ranks(in_processes, 4, SPECS)


@pytest.mark.parametrize("i", range(len(SPECS)), ids=lambda i: f"{SPECS[i][0]} {SPECS[i][1]}")
def test_nodes_equal_ranks_with_mean_gradients(ranks: list[list[Any]], i: int) -> None:
    models, net = composed(*SPECS[i])
    for number, node in enumerate(NODES):
        single, states = net.state_dict()[number], []
        for rank in node:
            tensors, state, report, (between, inside), distance = ranks[rank][i]
            assert fixtures.same(tensors, fixtures.tensors(models[number])), rank
            assert report.sent == between
            # Gradients are summed around a ring; mixed parameters are sent to each other rank.
            gradients = len(STEPS) * 4 * (445 + 6)
            assert report.sent_inside == pytest.approx(inside + gradients)
            assert distance == pytest.approx(net.distance(), rel=1e-4, abs=1e-6)
            states.append(memories(state))
        assert not states[0].keys() & states[1].keys()
        assert fixtures.same(states[0] | states[1], memories(single))
        sent = sum(ranks[rank][i][2].sent for rank in node)
        assert net.report(number).sent <= sent <= net.report(number).sent + 200 * len(STEPS)


def save_load_refuse(rank: int, world: int, folder: str) -> dict[str, str]:
    """Saved and loaded; with gamma found by each share for itself; through DDP; and what is refused."""
    model = fixtures.model()
    net, sgd = gradwire.gossip(model, "choco(ring, gamma=auto)", "sign", across=NODES), optimizers([model])[0]
    train(net, model, sgd, rank, range(12))
    gradwire.save(net, folder)
    dist.barrier()
    copy = fixtures.model()
    other, sgd_other = gradwire.gossip(copy, "choco(ring, gamma=auto)", "sign", across=NODES), optimizers([copy])[0]
    copy.load_state_dict(model.state_dict())
    sgd_other.load_state_dict(deepcopy(sgd.state_dict()))
    gradwire.load(other, folder)
    flat = gradwire.gossip(fixtures.model(), "choco(ring, gamma=auto)", "sign")
    refused = {"other nodes": fixtures.error_text(lambda: gradwire.load(flat, folder))}
    for each, trained, optimizer in ((net, model, sgd), (other, copy, sgd_other)):
        train(each, trained, optimizer, rank, range(12, 20))
    assert fixtures.same(fixtures.tensors(model), fixtures.tensors(copy))
    assert fixtures.same(net.state_dict(), other.state_dict())
    total, count = net.sum_over_processes(torch.tensor([float(rank)]))
    assert (float(total), count, net.max_over_processes(float(rank))) == (6.0, 4, 3.0)
    other.load_counters(net.counters())
    assert other.counters() == net.counters() and len(net.counters()[0]) == 6 and other.report().sent > 0
    mean = net.evaluate_mean(lambda: fixtures.tensors(model))
    assert fixtures.same_on_all_ranks(torch.cat([x.flatten() for x in mean.values()]))

    groups = [dist.new_group(node) for node in NODES]
    wrapped = DistributedDataParallel(fixtures.model(), process_group=groups[rank // 2])
    through, stepper = gradwire.gossip(wrapped, "dpsgd(ring)", across=NODES), fixtures.sgd(wrapped)
    for step in range(2):
        stepper.zero_grad()
        fixtures.loss(wrapped, rank, step).backward()
        stepper.step()
        through()
    refused["forgotten"] = fixtures.error_text(net)
    refused["elastic"] = fixtures.error_text(
        lambda: gradwire.gossip(model, "choco(ring)", "sign", across=NODES, elastic=True, meeting=folder)
    )
    return refused


def missing(rank: int, world: int) -> None:
    """A gradient that one rank lacks counts as zero; one that both lack stays None; infinity spreads to both.

    Entries of a gradient may share memory, as `torch.autograd.grad` returns them.
    """
    model = fixtures.model()
    net = gradwire.gossip(model, "dpsgd(ring)", across=NODES)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    model[0].bias.grad, model[0].weight.grad = None, torch.ones(()).expand(16, 10)
    if rank % 2:
        model[2].bias.grad = None
        model[4].weight.grad[0, 0] = torch.inf
    net.average_gradients()
    assert model[0].bias.grad is None
    assert torch.equal(model[2].bias.grad, torch.full((12,), 0.5))
    assert torch.equal(model[0].weight.grad, torch.ones(16, 10))
    assert torch.isinf(model[4].weight.grad[0, 0])


def test_nodes_save_load_and_refuse(tmp_path: Any) -> None:
    for refused in run_ranks(save_load_refuse, 4, str(tmp_path)):
        assert "call net.average_gradients()" in refused["forgotten"]
        assert "leave across out" in refused["elastic"]
        assert "of 2, and this is rank" in refused["other nodes"]
    run_ranks(missing, 4)


def test_nccl_with_overlap_is_refused() -> None:
    require_one_thread(SimpleNamespace(device=torch.device("cpu")))
    with pytest.raises(ValueError, match=r"from two threads.*leave overlap=True out"):
        require_one_thread(SimpleNamespace(device=torch.device("cuda")))
