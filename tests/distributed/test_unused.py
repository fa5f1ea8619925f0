"""Parameters without a gradient: one that no rank used in a step is not updated, and its state is kept."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fixtures
import gradwire
from spawn import Answers, cases_fixture, run_ranks

SPECS = fixtures.by_name(
    {"spec": "topk(0.2)"},
    {"spec": "topk(0.2)", "granularity": "bucket"},
    {"spec": "sign", "granularity": "model", "bundle": None},
    {"spec": "int4", "exchange": "two_way"},
    {"spec": "dgc(0.2)"},
    {"spec": "sign", "feedback": "ef21"},
    {"spec": "powersgd(1)"},
)


class Branches(nn.Module):
    """A trunk, a branch that some steps skip, and one that only rank 1 takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.trunk = nn.Linear(10, 8)
        self.sometimes = nn.Linear(8, 8)
        self.lonely = nn.Linear(8, 8)
        self.never = nn.Linear(8, 8)

    def forward(self, x: Tensor, detour: bool, lonely: bool) -> Tensor:
        x = torch.tanh(self.trunk(x))
        x = torch.tanh(self.sometimes(x)) if detour else x
        return self.lonely(x) if lonely else x


def step_of(net: nn.Module, rank: int, step: int) -> None:
    """Steps 2 and 3 skip the branch; only rank 1 takes the lonely one."""
    net.zero_grad(set_to_none=True)
    net(fixtures.batch(rank, step), step not in (2, 3), rank == 1).square().mean().backward()


def of_branch(memory: dict[str, Tensor], branch: str) -> dict[str, Tensor]:
    return {key: value for key, value in memory.items() if f"/{branch}." in key}


class Trained(NamedTuple):
    """After every step: parameters and state, of the plain loop and of the hook."""

    loop: list[dict[str, Tensor]]
    hook: list[dict[str, Tensor]]


def unused(rank: int, world: int, options: dict[str, Any]) -> Trained:
    whole = {**options, "bucket_mb": fixtures.BUCKET_MB}
    net, inner = Branches(), Branches()
    outer = fixtures.ddp(inner, find_unused_parameters=True)
    plain, hook = gradwire.compress(net, **whole), gradwire.compress(outer, **whole)
    trained = Trained([], [])
    for step in range(fixtures.STEPS):
        before = fixtures.memories(plain)
        step_of(net, rank, step)
        plain()
        step_of(outer, rank, step)
        check_step(step, net, before, fixtures.memories(plain))
        for model in (net, inner):
            fixtures.sgd_step(model)
        trained.loop.append({**fixtures.tensors(net), **fixtures.memories(plain)})
        trained.hook.append({**fixtures.tensors(inner), **fixtures.memories(hook)})
    return trained


def check_step(step: int, net: Branches, before: Any, after: Any) -> None:
    assert net.never.weight.grad is None
    assert fixtures.same(of_branch(before, "never"), of_branch(after, "never"))
    assert net.lonely.weight.grad is not None, "rank 1 used it, so all ranks get its update"
    skipped = step in (2, 3)
    assert (net.sometimes.weight.grad is None) == skipped, step
    if of_branch(after, "sometimes"):
        assert fixtures.same(of_branch(before, "sometimes"), of_branch(after, "sometimes")) == skipped, step


def check_trained(ranks: list[Trained]) -> None:
    """Loop and hook are equal after every step, and so are parameters on all ranks at the end."""
    for trained in ranks:
        for step, (loop, hook) in enumerate(zip(trained.loop, trained.hook, strict=True)):
            assert fixtures.same(loop, hook), step
    for name, _ in Branches().named_parameters():
        assert all(torch.equal(trained.loop[-1][name], ranks[0].loop[-1][name]) for trained in ranks), name


answers = cases_fixture(unused, 2, SPECS)


@pytest.mark.parametrize("case", SPECS)
def test_a_parameter_that_no_rank_used_keeps_its_state(case: str, answers: Answers):
    check_trained(answers[case])


def late_accumulation(rank: int, world: int) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """The branch is used in the part of the step that does not synchronize, and not in the part that does."""
    net, inner = Branches(), Branches()
    outer = fixtures.ddp(inner, find_unused_parameters=True)
    wire = gradwire.compress(net, "topk(0.2)")
    gradwire.compress(outer, "topk(0.2)")
    trained = []
    for step in range(fixtures.STEPS):
        outer.zero_grad()
        with outer.no_sync():
            outer(fixtures.batch(rank, step), True, rank == 1).square().mean().backward()
        outer(fixtures.batch(rank, step), False, rank == 1).square().mean().backward()
        net.zero_grad()
        net(fixtures.batch(rank, step), True, rank == 1).square().mean().backward()
        net(fixtures.batch(rank, step), False, rank == 1).square().mean().backward()
        wire()
        for model in (net, inner):
            fixtures.sgd_step(model)
        trained.append((fixtures.tensors(inner), fixtures.tensors(net)))
    return trained


def test_a_branch_used_in_the_accumulated_part_alone():
    for trained in run_ranks(late_accumulation, 2):
        for step, (hook, loop) in enumerate(trained):
            assert fixtures.same(hook, loop), step


def delayed(rank: int, world: int) -> dict[str, Tensor]:
    """A stale mean is applied once: not lost, and not twice, when its parameter is not used in the step after."""
    sums = {}
    for door in ("plain", "hook"):
        net = Branches()
        outer = fixtures.ddp(net, find_unused_parameters=True) if door == "hook" else net
        wire = gradwire.compress(outer, "fp32", exchange="delayed")
        meant = torch.zeros(8, 8)
        given = torch.zeros(8, 8)
        for step in range(fixtures.STEPS):
            single = Branches()
            single.load_state_dict(net.state_dict())
            for peer in range(world):
                step_of(single, peer, step)
                if single.sometimes.weight.grad is not None:
                    meant += single.sometimes.weight.grad / world
            step_of(outer, rank, step)
            if door == "plain":
                wire()
            if net.sometimes.weight.grad is not None:
                given += net.sometimes.weight.grad
            fixtures.sgd_step(net)
        sums[door] = meant - given - wire.debts()["sometimes.weight"]
    return sums


def test_a_stale_mean_is_applied_exactly_once():
    for sums in run_ranks(delayed, 2):
        for door, rest in sums.items():
            assert rest.abs().max() < 1e-6, door


def test_an_error_left_by_set_waits_for_its_parameter():
    """`set` leaves a compression error behind; a step that does not use the parameter keeps it."""
    net = Branches()
    wire = gradwire.compress(net, "topk(0.1)")
    step_of(net, 1, 0)
    wire()
    wire.set("dense")
    owed = wire.debts()["sometimes.weight"].clone()
    assert owed.abs().max() > 0
    step_of(net, 1, 2)
    wire()
    assert torch.equal(wire.debts()["sometimes.weight"], owed)
    assert wire.debts()["trunk.weight"].abs().max() == 0
    step_of(net, 1, 4)
    wire()
    assert wire.debts()["sometimes.weight"].abs().max() == 0


def without_exchange(rank: int, world: int) -> float:
    net = Branches()
    wire = gradwire.compress(net, "topk(0.2)", exchange="noop")
    for step in range(3):
        step_of(net, rank, step)
        wire()
    assert net.never.weight.grad is None and (net.lonely.weight.grad is None) == (rank == 0)
    return wire.report().sent


def test_noop_sends_nothing_where_gradients_are_missing():
    assert run_ranks(without_exchange, 2) == [0, 0]
