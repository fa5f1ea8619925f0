"""Errors that come after attaching, or that concern the optimizer: on every rank, and without any change.

All cases of a table run in one group, one after the other: a refused call leaves the group fit for the next.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fixtures
import gradwire
from spawn import Answers, cases_fixture, run_cases

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
Attempt = Callable[[gradwire.Wire, int, dict[str, torch.Tensor]], object]
CHANGES: dict[str, tuple[Attempt, tuple[str, ...]]] = {
    "a malformed spec": (
        lambda wire, rank, old: wire.set("topk(0.1" if rank == 1 else "sign"),
        ("ValueError", "'topk(0.1'"),
    ),
    "two specs": (
        lambda wire, rank, old: wire.set(f"topk(0.{rank + 2})"),
        ("ValueError", "topk(0.2)", "topk(0.3)"),
    ),
    "an exchange that does not fit": (
        lambda wire, rank, old: wire.set("sign", exchange="allreduce"),
        ("ValueError", "allreduce", "sign"),
    ),
    "the state of another spec": (
        lambda wire, rank, old: wire.load_state_dict(other_state() if rank == 1 else wire.state_dict()),
        ("ValueError", "int8", "topk(0.1)"),
    ),
    "the state of another step": (
        lambda wire, rank, old: wire.load_state_dict(old if rank == 1 else wire.state_dict()),
        ("ValueError", "step"),
    ),
    "a file cut short": (lambda wire, rank, old: damage(wire, rank, "cut"), ("ValueError", "wire-1.safetensors")),
    "a file with a wrong bit": (
        lambda wire, rank, old: damage(wire, rank, "bit"),
        ("ValueError", "wire-1.safetensors", "checksum"),
    ),
    "a model instead of a wire": (
        lambda wire, rank, old: gradwire.save(fixtures.model(), "folder"),
        ("Sequential", "compress"),
    ),
}


def other_state() -> dict[str, torch.Tensor]:
    return gradwire.lockstep([fixtures.model()] * 2, "int8").wires[1].state_dict()


def damage(wire: gradwire.Wire, rank: int, how: str) -> None:
    """The file of rank 1 was cut short, or a bit of it is wrong: no rank loads, and none waits for another."""
    path = gradwire.save(wire, Path(how))
    whole = path.read_bytes()
    wrong = whole[: len(whole) // 2] if how == "cut" else whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:]
    if rank == 1:
        path.write_bytes(wrong)
    torch.distributed.barrier()  # or a rank would read a file that is being written
    gradwire.load(wire, Path(how))


def change(rank: int, world: int, case: str, folder: str) -> tuple[str, bool, str]:
    """The error, whether it left everything as it was, and the error of the next step."""
    net = fixtures.model()
    wire = gradwire.compress(net, "topk(0.1)")
    fixtures.plain_loop(net, wire, fixtures.sgd(net), range(2), rank)
    old = wire.state_dict()
    fixtures.plain_loop(net, wire, fixtures.sgd(net), range(2, 3), rank)
    before = {**wire.state_dict(), **fixtures.tensors(net)}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        text = fixtures.error_text(lambda: CHANGES[case][0](wire, rank, old))
    unchanged = fixtures.same(before, {**wire.state_dict(), **fixtures.tensors(net)})
    after = fixtures.error_text(lambda: fixtures.plain_loop(net, wire, fixtures.sgd(net), range(3, 4), rank))
    return text, unchanged, after


@pytest.fixture(scope="module")
def changes(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return run_cases(change, 2, {name: name for name in CHANGES}, str(tmp_path_factory.mktemp("states")))


@pytest.mark.parametrize("case", CHANGES)
def test_a_refused_change_is_refused_on_all_ranks_and_changes_nothing(case: str, changes: Answers):
    fixtures.check_message([(text, CHANGES[case][1]) for text, _, _ in changes[case]])
    assert all(unchanged and after == fixtures.NO_ERROR for _, unchanged, after in changes[case])


SPARSE = fixtures.by_name({"spec": "topk(0.1)"}, {"spec": "fp16"}, {"spec": "int8", "exchange": "two_way"})


def sparse_gradient(rank: int, world: int, options: dict[str, Any]) -> str:
    table = nn.Embedding(5, 3, sparse=rank == 1)
    optimizer = fixtures.wrap_optimizer(table, **options, bundle=None)
    table(torch.tensor([1, 2])).sum().backward()
    return fixtures.error_text(optimizer.step)


sparse_gradients = cases_fixture(sparse_gradient, 2, SPARSE)


@pytest.mark.parametrize("case", SPARSE)
def test_a_sparse_gradient_is_refused_on_all_ranks(case: str, sparse_gradients: Answers):
    first, second = sparse_gradients[case]
    words = ("ValueError", "sparse", "sparse=False")
    fixtures.check_message([(first, (*words, "rank")), (second, (*words, "'weight'"))])


def sgd_with_momentum(net: nn.Module) -> torch.optim.Optimizer:
    return fixtures.sgd(net, momentum=0.9)


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters())


def gradwire_sgd(net: nn.Module) -> torch.optim.Optimizer:
    return gradwire.SGD(net.parameters(), lr=0.1)


def wrapping(rank: int, make: MakeOptimizer, spec: str, only: int | None = None) -> str:
    net = fixtures.model()
    inner = make(net) if only in (None, rank) else fixtures.sgd(net)
    return fixtures.error_text(lambda: fixtures.wrap_optimizer(net, inner, spec=spec))


def wrapping_then_set(rank: int) -> str:
    net = fixtures.model()
    optimizer = fixtures.wrap_optimizer(net, sgd_with_momentum(net), spec="topk(0.1)")
    return fixtures.error_text(lambda: optimizer.wire.set("dgc(0.1)"))


def first_step(rank: int, make: MakeOptimizer, spec: str) -> str:
    """Behind `compress`, which does not get the optimizer."""
    net = fixtures.model()
    wire, optimizer = gradwire.compress(net, spec), make(net)
    fixtures.loss(net, rank, 0).backward()
    wire()
    before = fixtures.tensors(net)
    fixtures.sgd(fixtures.model(), momentum=0.9).step()  # parameters of another model do not matter
    text = fixtures.error_text(optimizer.step)
    assert text == fixtures.NO_ERROR or fixtures.same(before, fixtures.tensors(net)), "a refused step changes nothing"
    return text


def second_optimizer(rank: int) -> str:
    """An optimizer that fits has stepped, and now one that does not."""
    net = fixtures.model()
    wires = [gradwire.compress(net, "dgc(0.1)")]
    fixtures.sgd(net).step()
    text = fixtures.error_text(adam(net).step)
    wires.clear()
    assert fixtures.error_text(adam(net).step) == fixtures.NO_ERROR, "no wire is attached any more"
    return text


def step_after_set(rank: int, spec: str) -> str:
    """The optimizer fitted until the spec was changed."""
    net = fixtures.model()
    wire, optimizer = gradwire.compress(net, spec), sgd_with_momentum(net)
    optimizer.step()
    wire.set("dgc(0.1)")
    return fixtures.error_text(optimizer.step)


def wrong_arguments(optimizer: Any, parameters: Any) -> str:
    return fixtures.error_text(lambda: gradwire.DistributedOptimizer(optimizer, parameters, "sign"))


def unnamed(rank: int) -> str:
    net = fixtures.model()
    return wrong_arguments(fixtures.sgd(net), net[0].named_parameters())


def no_names(rank: int) -> str:
    net = fixtures.model()
    return wrong_arguments(fixtures.sgd(net), net.parameters())


def no_optimizer(rank: int) -> str:
    net = fixtures.model()
    return wrong_arguments(net, net.named_parameters())


MOMENTUM = ("momentum=0", "gradwire.SGD")
FOR_SGD = ("'dgc(0.1)', which is for SGD", "'int4' with Adam", "gradwire.SGD")  # which has no momentum=0
FINE = (fixtures.NO_ERROR,)
OPTIMIZERS: dict[str, tuple[Callable[[int], str], tuple[str, ...]]] = {
    "SGD": (lambda rank: wrapping(rank, sgd_with_momentum, "dgc(0.1)"), ("SGD", *MOMENTUM)),
    "Adam": (lambda rank: wrapping(rank, adam, "dgc(0.1)"), ("Adam", *FOR_SGD)),
    "SGD on rank 1": (lambda rank: wrapping(rank, sgd_with_momentum, "dgc(0.1)", only=1), MOMENTUM),
    "SGD, then set": (wrapping_then_set, MOMENTUM),
    "SGD at its first step": (lambda rank: first_step(rank, sgd_with_momentum, "dgc(0.1)"), ("SGD", *MOMENTUM)),
    "gradwire.SGD at its first step": (lambda rank: first_step(rank, gradwire_sgd, "dgc(0.1)"), FINE),
    "SGD at its first step under topk": (lambda rank: first_step(rank, sgd_with_momentum, "topk(0.1)"), FINE),
    "Adam after another optimizer": (second_optimizer, ("Adam", *FOR_SGD)),
    "a step after set": (lambda rank: step_after_set(rank, "topk(0.1)"), ("SGD", *MOMENTUM)),
    "a step after auto and set": (lambda rank: step_after_set(rank, "auto"), ("SGD", *MOMENTUM)),
    "SGD without momentum": (lambda rank: wrapping(rank, fixtures.sgd, "dgc(0.1)"), FINE),
    "gradwire.SGD": (lambda rank: wrapping(rank, gradwire_sgd, "dgc(0.1)"), FINE),
    "SGD under topk": (lambda rank: wrapping(rank, sgd_with_momentum, "topk(0.1)"), FINE),
    "a parameter without a name": (unnamed, ("ValueError", "(12, 16)", "named_parameters()")),
    "parameters without names": (no_names, ("Parameter", "named_parameters()")),
    "no optimizer": (no_optimizer, ("Sequential", "optimizer")),
}


def attach_optimizer(rank: int, world: int, case: str) -> str:
    return OPTIMIZERS[case][0](rank)


optimizers = cases_fixture(attach_optimizer, 2, {name: name for name in OPTIMIZERS})


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_momentum_twice_and_parameters_without_a_name_are_refused(case: str, optimizers: Answers):
    fixtures.check_message([(text, OPTIMIZERS[case][1]) for text in optimizers[case]])
