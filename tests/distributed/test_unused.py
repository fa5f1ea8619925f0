"""Parameters without a gradient: what nobody used today is neither updated nor settled."""

from typing import Any

import torch
from torch import Tensor, nn

import fixtures
import gradwire
from spawn import run_ranks

SPECS: list[dict[str, Any]] = [
    {"spec": "topk(0.2)"},
    {"spec": "topk(0.2)", "granularity": "bucket"},
    {"spec": "sign", "granularity": "model", "bundle": None},
    {"spec": "int4", "exchange": "two_way"},
    {"spec": "dgc(0.2)"},
    {"spec": "sign", "feedback": "ef21"},
    {"spec": "powersgd(1)"},
]


class Branches(nn.Module):
    """A trunk, a branch that some steps skip, and one that a single rank takes."""

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


def unused(rank: int, world: int) -> None:
    for options in SPECS:
        whole = {**options, "launch_mb": fixtures.LAUNCH_MB}
        net, inner = Branches(), Branches()
        outer = fixtures.ddp(inner, find_unused_parameters=True)
        plain, hook = gradwire.compress(net, **whole), gradwire.compress(outer, **whole)
        for step in range(fixtures.STEPS):
            before = fixtures.memories(plain)
            step_of(net, rank, step)
            plain()
            step_of(outer, rank, step)
            check_step(rank, step, net, before, fixtures.memories(plain), options)
            for model in (net, inner):
                fixtures.descend(model)
            assert fixtures.same(fixtures.tensors(inner), fixtures.tensors(net)), (options, step)
            assert fixtures.same(fixtures.memories(hook), fixtures.memories(plain)), (options, step)
        assert fixtures.agreed(torch.cat([p.flatten() for p in net.parameters()])), options


def check_step(rank: int, step: int, net: Branches, before: Any, after: Any, options: Any) -> None:
    assert net.never.weight.grad is None
    assert fixtures.same(of_branch(before, "never"), of_branch(after, "never")), options
    assert net.lonely.weight.grad is not None, "rank 1 used it, so all ranks get its update"
    skipped = step in (2, 3)
    assert (net.sometimes.weight.grad is None) == skipped
    if of_branch(after, "sometimes"):
        assert fixtures.same(of_branch(before, "sometimes"), of_branch(after, "sometimes")) == skipped, (options, step)


def test_a_unit_that_nobody_used_is_not_settled():
    run_ranks(unused, 2)


def late_accumulation(rank: int, world: int) -> None:
    """The branch is used in the part of the step that does not synchronize, and not in the part that does."""
    net, inner = Branches(), Branches()
    outer = fixtures.ddp(inner, find_unused_parameters=True)
    wire = gradwire.compress(net, "topk(0.2)")
    gradwire.compress(outer, "topk(0.2)")
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
            fixtures.descend(model)
        assert fixtures.same(fixtures.tensors(inner), fixtures.tensors(net)), step


def test_a_branch_of_an_accumulated_step():
    run_ranks(late_accumulation, 2)


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
            fixtures.descend(net)
        sums[door] = meant - given - wire.debts()["sometimes.weight"]
    return sums


def test_a_stale_mean_is_applied_exactly_once():
    for sums in run_ranks(delayed, 2):
        for door, rest in sums.items():
            assert rest.abs().max() < 1e-6, door


def test_a_debt_without_a_home_waits_for_its_parameter():
    """`set` leaves a debt behind; a step that does not use the parameter keeps it."""
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


def silent(rank: int, world: int) -> float:
    """Without any exchange nobody can be asked, and nobody waits to be."""
    net = Branches()
    wire = gradwire.compress(net, "topk(0.2)", exchange="noop")
    for step in range(3):
        step_of(net, rank, step)
        wire()
    assert net.never.weight.grad is None and (net.lonely.weight.grad is None) == (rank == 0)
    return wire.report().sent


def test_noop_asks_nobody():
    assert run_ranks(silent, 2) == [0, 0]
