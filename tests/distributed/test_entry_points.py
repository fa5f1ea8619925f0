"""The hook, the plain loop and the optimizer train the same model, bit for bit."""

import copy
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fixtures
import gradwire
from spawn import Answers, cases_fixture, run_ranks

SPECS = fixtures.by_name(
    {"spec": "topk(0.1) | int32"},
    {"spec": "topk(0.1) | sign", "granularity": "bucket"},
    {"spec": "topk(0.05)", "granularity": "model"},
    {"spec": "int8", "exchange": "two_way"},
    {"spec": "int4", "exchange": "allgather", "granularity": "bucket", "bundle": None},
    {"spec": "sign", "feedback": "ef21", "granularity": "model", "bundle": None},
    {"spec": "fp16"},
    {"spec": "dgc(0.1, clip=1.0)"},
    {"spec": "powersgd(2)"},
    {"spec": "qsgd", "exchange": "delayed"},
    {"spec": "majority_vote"},
    {"spec": {0: "fp32", 2: "topk(0.25)", 4: "topk(0.1) | int8"}},
)


def by_hook(rank: int, options: dict[str, Any]) -> tuple[dict[str, Tensor], gradwire.Wire]:
    net = fixtures.ddp(fixtures.model())
    wire = gradwire.compress(net, **options)
    optimizer = fixtures.sgd(net)
    for step in range(fixtures.STEPS):
        optimizer.zero_grad()
        fixtures.loss(net, rank, step).backward()
        optimizer.step()
    return fixtures.tensors(net.module), wire


def by_loop(rank: int, options: dict[str, Any]) -> tuple[dict[str, Tensor], gradwire.Wire]:
    net = fixtures.model(seed=rank)  # rank 0's parameters win
    wire = gradwire.compress(net, **options)
    fixtures.plain_loop(net, wire, fixtures.sgd(net), range(fixtures.STEPS), rank)
    return fixtures.tensors(net), wire


def by_optimizer(rank: int, options: dict[str, Any]) -> tuple[dict[str, Tensor], gradwire.Wire]:
    net = fixtures.model(seed=rank)
    optimizer = gradwire.DistributedOptimizer(fixtures.sgd(net), net.named_parameters(), **options)
    for step in range(fixtures.STEPS):
        optimizer.zero_grad()
        fixtures.loss(net, rank, step).backward()
        optimizer.step()
    return fixtures.tensors(net), optimizer.wire


class Trained(NamedTuple):
    parameters: dict[str, Tensor]
    memories: dict[str, Tensor]
    sent: float
    buckets: int


ENTRY_POINTS = {"loop": by_loop, "hook": by_hook, "optimizer": by_optimizer}


def train(rank: int, world: int, options: dict[str, Any]) -> dict[str, Trained]:
    trained = {}
    for name, entry_point in ENTRY_POINTS.items():
        parameters, wire = entry_point(rank, {**options, "bucket_mb": fixtures.BUCKET_MB})
        buckets = len(wire.engine.plan.buckets)
        trained[name] = Trained(parameters, fixtures.memories(wire), wire.report().sent, buckets)
    return trained


def check_trained(ranks: list[dict[str, Trained]], options: dict[str, Any]) -> None:
    for trained in ranks:
        hook = trained["hook"]
        assert hook.buckets > (0 if options.get("granularity") == "model" else 2), "the test needs several buckets"
        assert not fixtures.same(hook.parameters, fixtures.tensors(fixtures.model())), "it does not train"
        assert fixtures.same(hook.parameters, ranks[0]["hook"].parameters), "ranks drift apart"
        for name in ("loop", "optimizer"):
            assert fixtures.same(trained[name].parameters, hook.parameters), name
            assert fixtures.same(trained[name].memories, hook.memories), name
            assert trained[name].sent == hook.sent, name


answers = cases_fixture(train, (2, 3), SPECS)


@pytest.mark.parametrize("case", SPECS)
def test_the_hook_the_loop_and_the_optimizer_agree(case: str, answers: Answers):
    check_trained(answers[case], SPECS[case])


ONE_RANK = fixtures.by_name({"spec": "topk(0.1)"}, {"spec": "int8", "exchange": "two_way"}, {"spec": "powersgd(1)"})
one_rank = cases_fixture(train, 1, ONE_RANK)


@pytest.mark.parametrize("case", ONE_RANK)
def test_a_process_group_of_one(case: str, one_rank: Answers):
    check_trained(one_rank[case], ONE_RANK[case])


@pytest.mark.parametrize("options", ONE_RANK.values(), ids=ONE_RANK.keys())
def test_no_process_group_is_a_world_of_one(options: dict[str, Any]):
    loop, wire = by_loop(0, options)
    optimizer, _ = by_optimizer(0, options)
    assert wire.link.world == 1 and wire.report().sent == 0
    assert fixtures.same(loop, optimizer)


BUCKETS = fixtures.by_name({"spec": "topk(0.1)"}, {"spec": "int8"})


def one_bucket(rank: int, world: int, options: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Parameters with one bucket for all layers, and with several."""
    return [by_loop(rank, more)[0] for more in (options, {**options, "bucket_mb": fixtures.BUCKET_MB})]


buckets = cases_fixture(one_bucket, 2, BUCKETS)


@pytest.mark.parametrize("case", BUCKETS)
def test_the_number_of_buckets_does_not_change_how_layers_are_compressed(case: str, buckets: Answers):
    for few, many in buckets[case]:
        assert fixtures.same(few, many)


def start_as_rank_0(rank: int, world: int) -> dict[str, Tensor]:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers()):
            tensor.fill_(rank + 1)
    net[0].bias.requires_grad_(False)
    other = copy.deepcopy(net)
    gradwire.compress(net, "topk(0.5)")
    gradwire.DistributedOptimizer(
        fixtures.sgd(other), other.named_parameters(), "topk(0.5)", named_buffers=other.named_buffers()
    )
    return {**net.state_dict(), **{f"other.{name}": tensor for name, tensor in other.state_dict().items()}}


def test_everything_starts_as_rank_0_has_it():
    """Frozen parameters and buffers included."""
    for state in run_ranks(start_as_rank_0, 2):
        assert all(bool((tensor == 1).all()) for tensor in state.values()), state


def subgroup(rank: int, world: int) -> dict[str, Tensor] | None:
    pair = dist.new_group([0, 2])
    if rank == 1:
        alone = None
        text = fixtures.error_text(lambda: gradwire.compress(fixtures.model(), "topk(0.1)", process_group=pair))
        assert text.startswith("ValueError") and "rank 1" in text and "process_group" in text, text
    else:
        place = [0, 2].index(rank)
        plain, wire = by_loop(place, {"spec": "topk(0.1)", "process_group": pair})
        assert wire.link.world == 2 and wire.link.rank == place
        net = fixtures.ddp(fixtures.model(), process_group=pair)
        gradwire.compress(net, "topk(0.1)")
        optimizer = fixtures.sgd(net)
        for step in range(fixtures.STEPS):
            optimizer.zero_grad()
            fixtures.loss(net, place, step).backward()
            optimizer.step()
        assert fixtures.same(fixtures.tensors(net.module), plain)
        alone, _ = by_optimizer(place, {"spec": "topk(0.1)", "process_group": pair})
        assert fixtures.same(alone, plain)
    by_loop(rank, {"spec": "topk(0.1)"})  # the whole world still works beside it
    return alone


def overlapping_groups(rank: int, world: int) -> list[list[Tensor]]:
    """Rank 0 is in one group more than rank 1 when both attach; later rank 2 attaches with rank 1."""
    dist.new_group([0, 2])
    groups = [(pair, dist.new_group(pair)) for pair in ([0, 1], [1, 2])]
    nets = [fixtures.model(seed=rank) for pair, _ in groups if rank in pair]
    for net, group in zip(nets, [group for pair, group in groups if rank in pair], strict=True):
        gradwire.compress(net, "int4", process_group=group)
    return [[p.detach() for p in net.parameters()] for net in nets]


def test_process_groups_that_share_some_ranks():
    """Torch names a group by how many a rank has joined, and these ranks have joined more or fewer."""
    (first,), (second, third), (fourth,) = run_ranks(overlapping_groups, 3)
    for mine, theirs in ((first, second), (third, fourth)):
        assert all(torch.equal(p, q) for p, q in zip(mine, theirs, strict=True))


def test_a_process_group_of_some_ranks():
    first, none, last = run_ranks(subgroup, 3)
    assert none is None and fixtures.same(first, last)
    nets, workers = fixtures.replicas(2, "topk(0.1)")
    fixtures.train_steps(nets, workers, range(fixtures.STEPS))
    assert all(torch.allclose(first[name], p) for name, p in nets[0].named_parameters())
