"""Refusals that come after attaching, or that concern the optimizer: on every rank, and without any change.

All attempts of a test run in one group, one after the other: a refusal leaves the group fit for the next.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import fixtures
import gradwire
from spawn import run_ranks


def later(rank: int, world: int, folder: str) -> dict[str, fixtures.Case]:
    """After attaching: changes of mind, states, and gradients that no attach could foresee."""
    net = fixtures.model()
    wire = gradwire.compress(net, "topk(0.1)")
    fixtures.plain(net, wire, fixtures.sgd(net), range(2), rank)
    old = wire.state_dict()
    fixtures.plain(net, wire, fixtures.sgd(net), range(2, 3), rank)
    before = {**wire.state_dict(), **fixtures.tensors(net)}
    other = gradwire.compress(fixtures.model(), "int8").state_dict()
    found = {
        "set": (fixtures.sentence(lambda: wire.set("topk(0.1" if rank == 1 else "sign")), ("'topk(0.1'", "joined by")),
        "two": (fixtures.sentence(lambda: wire.set(f"topk(0.{rank + 2})")), ("topk(0.2)", "topk(0.3)", "same spec")),
        "add": (fixtures.sentence(lambda: wire.set("sign", exchange="allreduce")), ("allreduce", "sign")),
        "load": (
            fixtures.sentence(lambda: wire.load_state_dict(other if rank == 1 else before)),
            ("int8", "topk(0.1)", "attach with the saved spec"),
        ),
        "steps": (
            fixtures.sentence(lambda: wire.load_state_dict(old if rank == 1 else wire.state_dict())),
            ("another step", "same step everywhere"),
        ),
    }
    found |= damaged(wire, rank, Path(folder))
    assert fixtures.same(before, {**wire.state_dict(), **fixtures.tensors(net)}), "a refusal changes nothing"
    fixtures.plain(net, wire, fixtures.sgd(net), range(3, 4), rank)
    return found | sparse_at_last(rank)


def damaged(wire: gradwire.Wire, rank: int, folder: Path) -> dict[str, fixtures.Case]:
    """A file of rank 1 that was cut short, or of which a bit fell over: no rank loads, and none waits for another."""
    path = gradwire.save(wire, folder)
    whole = path.read_bytes()
    flipped = whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:]
    found: dict[str, fixtures.Case] = {}
    for case, content, why in (("cut", whole[: len(whole) // 2], "metadata"), ("bit", flipped, "checksum is wrong")):
        torch.distributed.barrier()
        if rank == 1:
            path.write_bytes(content)
        words = ("ValueError", "wire-1.safetensors cannot be read", why, "whole copy")
        found[f"a file with {case}"] = (fixtures.sentence(lambda: gradwire.load(wire, folder)), words)
    found["a model"] = (fixtures.sentence(lambda: gradwire.save(fixtures.model(), folder)), ("Sequential", "compress"))
    return found


def sparse_at_last(rank: int) -> dict[str, fixtures.Case]:
    found: dict[str, fixtures.Case] = {}
    for spec in ("topk(0.1)", "fp16", "int8"):
        exchange = "two_way" if spec == "int8" else None
        table = nn.Embedding(5, 3, sparse=rank == 1)
        optimizer = fixtures.wrapped(table, spec=spec, exchange=exchange, bundle=None)
        table(torch.tensor([1, 2])).sum().backward()
        words = ("'weight'", "sparse=False") if rank == 1 else ("another rank", "sparse=False")
        found[f"sparse under {spec}"] = (fixtures.sentence(optimizer.step), ("sparse", "dense", words[1]))
        assert words[0] in found[f"sparse under {spec}"][0]
    return found


def test_what_only_shows_after_attaching(tmp_path: Path):
    fixtures.check_sentences(run_ranks(later, 2, str(tmp_path)))


def momenta(rank: int, world: int) -> dict[str, fixtures.Case]:
    def attempt(make: Callable[[nn.Module], torch.optim.Optimizer], spec: str, only: int | None = None) -> str:
        net = fixtures.model()
        inner = make(net) if only in (None, rank) else fixtures.sgd(net)
        return fixtures.sentence(lambda: fixtures.wrapped(net, inner, spec=spec))

    def momentum(net: nn.Module) -> torch.optim.Optimizer:
        return fixtures.sgd(net, momentum=0.9)

    def adam(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(net.parameters())

    def own(net: nn.Module) -> torch.optim.Optimizer:
        return gradwire.SGD(net.parameters(), lr=0.1)

    def stepped(make: Callable[[nn.Module], torch.optim.Optimizer], spec: str) -> str:
        """Behind `compress`, which is not shown the optimizer."""
        net = fixtures.model()
        wire, optimizer = gradwire.compress(net, spec), make(net)
        fixtures.loss(net, rank, 0).backward()
        wire()
        before = fixtures.tensors(net)
        fixtures.sgd(fixtures.model(), momentum=0.9).step()  # whose parameters are no matter
        said = fixtures.sentence(optimizer.step)
        assert (said == "no refusal") or fixtures.same(before, fixtures.tensors(net))
        return said

    def second() -> str:
        """An optimizer that fits has stepped, and now one that does not."""
        net = fixtures.model()
        wires = [gradwire.compress(net, "dgc(0.1)")]
        fixtures.sgd(net).step()
        said = fixtures.sentence(adam(net).step)
        wires.clear()
        assert fixtures.sentence(adam(net).step) == "no refusal", "nobody is attached any more"
        return said

    def changed(spec: str) -> str:
        """An optimizer has fitted until the spec was changed."""
        net = fixtures.model()
        wire, optimizer = gradwire.compress(net, spec), momentum(net)
        optimizer.step()
        wire.set("dgc(0.1)")
        return fixtures.sentence(optimizer.step)

    later = fixtures.wrapped(net := fixtures.model(), momentum(net), spec="topk(0.1)")
    partly = fixtures.model()
    words = ("momentum of its own", "momentum=0", "gradwire.SGD")
    return {
        "SGD": (attempt(momentum, "dgc(0.1)"), ("SGD has", *words)),
        "Adam": (attempt(adam, "dgc(0.1)"), ("Adam has", *words)),
        "on one rank": (attempt(momentum, "dgc(0.1)", only=1), words),
        "later": (fixtures.sentence(lambda: later.wire.set("dgc(0.1)")), words),
        "at the first step": (stepped(momentum, "dgc(0.1)"), ("SGD has", *words)),
        "at the first step, ours": (stepped(own, "dgc(0.1)"), ("no refusal",)),
        "at the first step, of another spec": (stepped(momentum, "topk(0.1)"), ("no refusal",)),
        "at the first step of a second one": (second(), ("Adam has", *words)),
        "at a step after set": (changed("topk(0.1)"), ("SGD has", *words)),
        "at a step after set, chosen by itself before": (changed("auto"), ("SGD has", *words)),
        "no momentum": (attempt(fixtures.sgd, "dgc(0.1)"), ("no refusal",)),
        "our own": (attempt(own, "dgc(0.1)"), ("no refusal",)),
        "no correction": (attempt(momentum, "topk(0.1)"), ("no refusal",)),
        "unnamed": (
            fixtures.sentence(
                lambda: gradwire.DistributedOptimizer(fixtures.sgd(partly), partly[0].named_parameters(), "sign")
            ),
            ("shape (12, 16)", "model.named_parameters()"),
        ),
        "no names": (
            fixtures.sentence(lambda: gradwire.DistributedOptimizer(fixtures.sgd(partly), partly.parameters(), "sign")),
            ("Parameter is no such pair", "model.named_parameters()"),
        ),
        "no optimizer": (
            fixtures.sentence(lambda: gradwire.DistributedOptimizer(partly, partly.named_parameters(), "sign")),
            ("Sequential is no torch optimizer",),
        ),
    }


def test_momentum_twice_and_parameters_without_a_name():
    fixtures.check_sentences(run_ranks(momenta, 2))
