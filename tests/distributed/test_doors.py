"""Three doors, one handle: the hook, the plain loop and the optimizer train the same model, bit for bit."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fixtures
import gradwire
from spawn import run_ranks

SPECS: list[dict[str, Any]] = [
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
]


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
    fixtures.plain(net, wire, fixtures.sgd(net), range(fixtures.STEPS), rank)
    return fixtures.tensors(net), wire


def by_optimizer(rank: int, options: dict[str, Any]) -> tuple[dict[str, Tensor], gradwire.Wire]:
    net = fixtures.model(seed=rank)
    optimizer = gradwire.DistributedOptimizer(fixtures.sgd(net), net.named_parameters(), **options)
    for step in range(fixtures.STEPS):
        optimizer.zero_grad()
        fixtures.loss(net, rank, step).backward()
        optimizer.step()
    return fixtures.tensors(net), optimizer.wire


def compare_doors(rank: int, world: int, several: list[dict[str, Any]]) -> None:
    start = fixtures.tensors(fixtures.model())
    for options in several:
        whole = {**options, "launch_mb": fixtures.LAUNCH_MB}
        hook, wire = by_hook(rank, whole)
        whole_model = options.get("granularity") == "model"
        assert len(wire.session.plan.launches) > (0 if whole_model else 2), "the test wants several launches"
        assert not fixtures.same(hook, start), f"{options} does not train"
        for door in (by_loop, by_optimizer):
            found, other = door(rank, whole)
            assert fixtures.same(found, hook), f"{door.__name__} differs from the hook under {options}"
            assert fixtures.same(fixtures.memories(other), fixtures.memories(wire)), f"memories differ under {options}"
            assert other.report().sent == wire.report().sent, f"bytes differ under {options}"
        flat = torch.cat([p.flatten() for p in hook.values()])
        assert fixtures.agreed(flat), f"ranks drift apart under {options}"


@pytest.mark.parametrize("world", [2, 3])
def test_the_hook_the_loop_and_the_optimizer_agree(world: int):
    run_ranks(compare_doors, world, SPECS, timeout=100)


def one_launch(rank: int, world: int) -> None:
    """With one launch for all, messages are cut differently, but each layer is compressed as before."""
    for options in ({"spec": "topk(0.1)"}, {"spec": "int8"}):
        few, _ = by_loop(rank, options)
        many, _ = by_loop(rank, {**options, "launch_mb": fixtures.LAUNCH_MB})
        assert fixtures.same(few, many)


def test_launches_do_not_change_what_layers_say():
    run_ranks(one_launch, 2)


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
        said = fixtures.sentence(lambda: gradwire.compress(fixtures.model(), "topk(0.1)", process_group=pair))
        assert "rank 1 is not in the process_group" in said and "attach only on" in said
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


def test_a_group_of_ones_own():
    first, none, last = run_ranks(subgroup, 3)
    assert none is None and fixtures.same(first, last)
    nets, workers = fixtures.replicas(2, "topk(0.1)")
    fixtures.march(nets, workers, range(fixtures.STEPS))
    assert all(torch.allclose(first[name], p) for name, p in nets[0].named_parameters())


def test_no_process_group_is_a_world_of_one():
    for options in ({"spec": "topk(0.1)"}, {"spec": "int8", "exchange": "two_way"}, {"spec": "powersgd(1)"}):
        loop, wire = by_loop(0, options)
        optimizer, _ = by_optimizer(0, options)
        assert wire.link.world == 1 and wire.report().sent == 0
        assert fixtures.same(loop, optimizer)


def world_of_one(rank: int, world: int) -> None:
    for options in ({"spec": "topk(0.1)"}, {"spec": "int8", "exchange": "two_way"}, {"spec": "powersgd(1)"}):
        compare_doors(rank, world, [options])


def test_a_process_group_of_one():
    run_ranks(world_of_one, 1)
