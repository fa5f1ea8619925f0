"""Every gradient is averaged once, between ``backward()`` and the optimizer's step; anything else is refused.

All cases run in one group, one after the other: a refused call leaves the group fit for the next.
"""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate

import fixtures
import gradwire
from gradwire.comm.backend import SingleBackend
from spawn import Answers, cases_fixture, run_ranks

SPEC = "topk(0.1)"


def compress_around_replicate(rank: int) -> object:
    return gradwire.compress(nn.Sequential(replicate(fixtures.model())), SPEC)


def compress_inside_ddp(rank: int) -> object:
    outer = fixtures.ddp(fixtures.model())
    return gradwire.compress(outer.module, SPEC)


def compress_then_ddp(rank: int) -> object:
    net = fixtures.model()
    wire, outer = gradwire.compress(net, SPEC), fixtures.ddp(net)
    return one_step(rank, outer, wire, fixtures.sgd(net))


def optimizer_of_ddp(rank: int) -> object:
    outer = fixtures.ddp(fixtures.model())
    return fixtures.wrap_optimizer(outer.module, spec=SPEC)


def optimizer_then_ddp(rank: int) -> object:
    net = fixtures.model()
    optimizer, outer = fixtures.wrap_optimizer(net, spec=SPEC), fixtures.ddp(net)
    return one_step(rank, outer, lambda: None, optimizer)


def optimizer_of_replicate(rank: int) -> object:
    net = replicate(fixtures.model())
    return one_step(rank, net, lambda: None, fixtures.wrap_optimizer(net, spec=SPEC))


def optimizer_of_optimizer(rank: int) -> object:
    net = fixtures.model()
    return fixtures.wrap_optimizer(net, fixtures.wrap_optimizer(net, spec=SPEC), spec=SPEC)


def two_wires(rank: int) -> object:
    net = fixtures.model()
    return gradwire.compress(net, SPEC), gradwire.compress(net[0], SPEC)


def optimizer_of_compressed(rank: int) -> object:
    net = fixtures.model()
    wire = gradwire.compress(net, SPEC)
    return wire, fixtures.wrap_optimizer(net, spec=SPEC)


def compress_of_optimized(rank: int) -> object:
    net = fixtures.model()
    optimizer = fixtures.wrap_optimizer(net, spec=SPEC)
    return optimizer, gradwire.compress(net, SPEC)


def compress_of_local(rank: int) -> object:
    net = fixtures.model()
    return gradwire.local(net, fixtures.sgd(net), "diloco(H=2)"), gradwire.compress(net[0], SPEC)


def ddp_of_local(rank: int) -> object:
    net = fixtures.model()
    return gradwire.local(net, fixtures.sgd(net), "diloco(H=2)"), gradwire.compress(fixtures.ddp(net), SPEC)


def optimizer_of_local(rank: int) -> object:
    net = fixtures.model()
    return gradwire.local(net, fixtures.sgd(net), "diloco(H=2)"), fixtures.wrap_optimizer(net, spec=SPEC)


def local_of_compressed(rank: int) -> object:
    net = fixtures.model()
    return gradwire.compress(net, SPEC), gradwire.local(net, fixtures.sgd(net), "diloco(H=2)")


def one_step(rank: int, net: Any, wire: Callable[[], None], optimizer: torch.optim.Optimizer) -> None:
    fixtures.loss(net, rank, 0).backward()
    wire()
    optimizer.step()


def one_step_without_backward(wire: Callable[[], None], optimizer: torch.optim.Optimizer) -> None:
    wire()
    optimizer.step()


def forgotten(rank: int) -> object:
    net = fixtures.model()
    wire, optimizer = gradwire.compress(net, SPEC), fixtures.sgd(net)
    one_step(rank, net, wire, optimizer)
    one_step(rank, net, lambda: None, optimizer)
    return wire


def forgotten_at_first(rank: int) -> object:
    net = fixtures.model()
    wire = gradwire.compress(net, SPEC)
    one_step(rank, net, lambda: None, fixtures.sgd(net))
    return wire


def forgotten_after_off(rank: int) -> object:
    """It averages without compression, and must be called for that."""
    net = fixtures.model()
    wire = gradwire.compress(net, SPEC)
    wire.off()
    one_step(rank, net, lambda: None, fixtures.sgd(net))
    return wire


def forgotten_by_optimizer(rank: int) -> object:
    """The optimizer inside steps, not the one that synchronizes."""
    net = fixtures.model()
    inner = fixtures.sgd(net)
    outer = fixtures.wrap_optimizer(net, inner, spec=SPEC)
    one_step(rank, net, lambda: None, inner)
    return outer


def twice(rank: int) -> object:
    net = fixtures.model()
    wire = gradwire.compress(net, SPEC)
    fixtures.loss(net, rank, 0).backward()
    wire()
    return wire, one_step_without_backward(wire, fixtures.sgd(net))


def before_backward(rank: int) -> object:
    net = fixtures.model()
    wire = gradwire.compress(net, SPEC)
    wire()
    return wire, one_step(rank, net, lambda: None, fixtures.sgd(net))


DDP = ("DistributedDataParallel",)
ORDER = ("RuntimeError", "wire()", "backward()")
REFUSED: dict[str, tuple[Callable[[int], object], tuple[str, ...]]] = {
    "a part under replicate": (compress_around_replicate, ("ValueError", "'0'", "replicate")),
    "the module inside DDP": (compress_inside_ddp, ("ValueError", "'0.weight'", *DDP)),
    "DDP after compress": (compress_then_ddp, ("ValueError", "'0.weight'", *DDP)),
    "an optimizer of DDP": (optimizer_of_ddp, ("ValueError", "'0.weight'", *DDP)),
    "DDP after an optimizer": (optimizer_then_ddp, ("ValueError", "'0.weight'", *DDP)),
    "an optimizer of replicate": (optimizer_of_replicate, ("ValueError", "'0.weight'", *DDP)),
    "an optimizer around itself": (optimizer_of_optimizer, ("ValueError", "DistributedOptimizer")),
    "two wires": (two_wires, ("ValueError", "'weight'", "wire.set")),
    "an optimizer of a compressed model": (optimizer_of_compressed, ("ValueError", "'0.weight'", "wire.set")),
    "compress of an optimizer's model": (compress_of_optimized, ("ValueError", "'0.weight'", "wire.set")),
    "compress after local": (compress_of_local, ("ValueError", "'weight'", "local")),
    "DDP after local": (ddp_of_local, ("ValueError", "'0.weight'", "local")),
    "an optimizer after local": (optimizer_of_local, ("ValueError", "'0.weight'", "local")),
    "local after compress": (local_of_compressed, ("ValueError", "'0.weight'", "local steps")),
    "wire() forgotten": (forgotten, ORDER),
    "wire() forgotten at first": (forgotten_at_first, ORDER),
    "wire() forgotten after off()": (forgotten_after_off, ORDER),
    "the optimizer inside": (forgotten_by_optimizer, ORDER),
    "wire() twice": (twice, ("RuntimeError", "wire()", "twice")),
    "wire() before backward()": (before_backward, ORDER),
}


def refuse(rank: int, world: int, case: str) -> str:
    return fixtures.error_text(lambda: REFUSED[case][0](rank))


refusals = cases_fixture(refuse, 2, {name: name for name in REFUSED})


@pytest.mark.parametrize("case", REFUSED)
def test_gradients_that_are_not_averaged_exactly_once_are_refused_on_all_ranks(case: str, refusals: Answers):
    fixtures.check_message([(text, REFUSED[case][1]) for text in refusals[case]])


def plain(net: nn.Module, wire: gradwire.Wire, rank: int) -> None:
    fixtures.plain_loop(net, wire, fixtures.sgd(net), range(3), rank)


def another_model(net: nn.Module, wire: gradwire.Wire, rank: int) -> None:
    fixtures.loss(net, rank, 0).backward()
    other = fixtures.model()
    one_step(rank, other, lambda: None, fixtures.sgd(other))


def after_off(net: nn.Module, wire: gradwire.Wire, rank: int) -> None:
    wire.off()
    one_step(rank, net, wire, fixtures.sgd(net))


def accumulation(net: nn.Module, wire: gradwire.Wire, rank: int) -> None:
    optimizer = fixtures.sgd(net)
    for step in range(4):
        fixtures.loss(net, rank, step).backward()
        if step % 2:
            wire()
            optimizer.step()
            optimizer.zero_grad()


def discarded(net: nn.Module, wire: gradwire.Wire, rank: int) -> None:
    """Gradients of a batch are thrown away, before and after the call."""
    fixtures.loss(net, rank, 0).backward()
    net.zero_grad()
    fixtures.sgd(net).step()
    fixtures.loss(net, rank, 1).backward()
    wire()
    plain(net, wire, rank)


def two_optimizers(net: nn.Module, wire: gradwire.Wire, rank: int) -> None:
    first, second = fixtures.sgd(net[0]), fixtures.sgd(net[2])
    for step in range(2):
        fixtures.loss(net, rank, step).backward()
        wire()
        first.step()
        second.step()


def by_hand(net: nn.Module, wire: gradwire.Wire, rank: int) -> None:
    optimizer = fixtures.sgd(net)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    for _ in range(2):
        wire()
        optimizer.step()


def ddp_anew(net: nn.Module, wire: gradwire.Wire, rank: int) -> None:
    """A DDP of the same parameters is gone."""
    other = fixtures.model()
    outer = fixtures.ddp(other)
    outer.itself = [outer]  # a cycle, which only the collector frees
    del outer
    plain(other, gradwire.compress(other, SPEC), rank)


def inside_hosts(net: nn.Module, wire: gradwire.Wire, rank: int) -> None:
    """Local steps of all ranks, and gradients that are averaged over some of them."""
    other = fixtures.model()
    outer = gradwire.local(other, fixtures.sgd(other), "diloco(H=2)")
    gradwire.compress(other, SPEC, link=SingleBackend())
    assert outer.steps == 0


def local_anew(net: nn.Module, wire: gradwire.Wire, rank: int) -> None:
    """The handle of local steps is gone, and so is its optimizer."""
    other = fixtures.model()
    gradwire.local(other, fixtures.sgd(other), "diloco(H=2)")
    plain(other, gradwire.compress(other, SPEC), rank)


ALLOWED = {
    "a plain loop": plain,
    "another model's optimizer": another_model,
    "after off": after_off,
    "accumulation": accumulation,
    "gradients that are thrown away": discarded,
    "two optimizers": two_optimizers,
    "gradients by hand": by_hand,
    "a DDP that is gone": ddp_anew,
    "local steps between hosts": inside_hosts,
    "local steps that are gone": local_anew,
}


def allow(rank: int, world: int, case: str) -> str:
    net = fixtures.model()
    wire = gradwire.compress(net, SPEC)
    text = fixtures.error_text(partial(ALLOWED[case], net, wire, rank))
    del wire
    gradwire.compress(net, SPEC)  # the old wire is gone, so the model takes another one
    return text


allowances = cases_fixture(allow, 2, {name: name for name in ALLOWED})


@pytest.mark.parametrize("case", ALLOWED)
def test_gradients_that_are_averaged_once_are_not_refused(case: str, allowances: Answers):
    assert allowances[case] == [fixtures.NO_ERROR] * 2


def called_ddp(rank: int, world: int, call: str) -> list[str]:
    """Warnings of two steps whose loop calls a DDP around the model, or what is inside of it."""
    net = fixtures.model()
    ddp, optimizer = fixtures.ddp(net), fixtures.sgd(net)
    refused = fixtures.error_text(lambda: gradwire.local(ddp, optimizer, "diloco(H=2)"))
    assert "call that module in the loop, without DDP" in refused
    outer = gradwire.local(ddp.module, optimizer, "diloco(H=2)")
    with warnings.catch_warnings(record=True) as seen, ddp.no_sync() if call == "no_sync" else nullcontext():
        warnings.simplefilter("always")
        for step in range(2):
            fixtures.loss(net if call == "module" else ddp, rank, step).backward()
            optimizer.step()
            outer()
        outer.close()
        fixtures.loss(ddp, rank, 2)
        with torch.no_grad():
            fixtures.loss(ddp, rank, 2)
    return [str(one.message) for one in seen if "local steps" in str(one.message)]


ddp_calls = cases_fixture(called_ddp, 2, {name: name for name in ("ddp", "module", "no_sync")})


@pytest.mark.parametrize(("case", "count"), [("ddp", 1), ("module", 0), ("no_sync", 0)])
def test_a_ddp_around_what_takes_local_steps_is_warned_of_where_it_is_called(case: str, count: int, ddp_calls: Answers):
    first, second = ddp_calls[case]
    assert len(first) == count and second == [] and all("ddp.module" in text for text in first)


def alone(rank: int, world: int) -> str:
    net = fixtures.model()
    wire = gradwire.compress(net, SPEC)
    text = fixtures.error_text(lambda: one_step(rank, net, lambda: None, fixtures.sgd(net)))
    assert wire.link.world == 1
    return text


def test_a_world_of_one_may_forget_the_call():
    assert run_ranks(alone, 1) == [fixtures.NO_ERROR]
