"""Refusals that come after attaching, or that concern the optimizer: on every rank, and without any change.

All attempts of a test run in one group, one after the other: a refusal leaves the group fit for the next.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import gradwire
import scenes
from workers import run_ranks


def later(rank: int, world: int, folder: str) -> dict[str, scenes.Case]:
    """After attaching: changes of mind, states, and gradients that no attach could foresee."""
    net = scenes.model()
    wire = gradwire.compress(net, "topk(0.1)")
    scenes.plain(net, wire, scenes.sgd(net), range(2), rank)
    old = wire.state_dict()
    scenes.plain(net, wire, scenes.sgd(net), range(2, 3), rank)
    before = {**wire.state_dict(), **scenes.tensors(net)}
    other = gradwire.compress(scenes.model(), "int8").state_dict()
    found = {
        "set": (scenes.sentence(lambda: wire.set("topk(0.1" if rank == 1 else "sign")), ("'topk(0.1'", "joined by")),
        "two": (scenes.sentence(lambda: wire.set(f"topk(0.{rank + 2})")), ("topk(0.2)", "topk(0.3)", "same spec")),
        "add": (scenes.sentence(lambda: wire.set("sign", exchange="allreduce")), ("allreduce", "sign")),
        "load": (
            scenes.sentence(lambda: wire.load_state_dict(other if rank == 1 else before)),
            ("int8", "topk(0.1)", "attach with the saved spec"),
        ),
        "steps": (
            scenes.sentence(lambda: wire.load_state_dict(old if rank == 1 else wire.state_dict())),
            ("another step", "same step everywhere"),
        ),
    }
    found |= damaged(wire, rank, Path(folder))
    assert scenes.same(before, {**wire.state_dict(), **scenes.tensors(net)}), "a refusal changes nothing"
    scenes.plain(net, wire, scenes.sgd(net), range(3, 4), rank)
    return found | sparse_at_last(rank)


def damaged(wire: gradwire.Wire, rank: int, folder: Path) -> dict[str, scenes.Case]:
    """A file of rank 1 that was cut short, or of which a bit fell over: no rank loads, and none waits for another."""
    path = gradwire.save(wire, folder)
    whole = path.read_bytes()
    flipped = whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:]
    found: dict[str, scenes.Case] = {}
    for case, content, why in (("cut", whole[: len(whole) // 2], "metadata"), ("bit", flipped, "checksum is wrong")):
        torch.distributed.barrier()
        if rank == 1:
            path.write_bytes(content)
        words = ("ValueError", "wire-1.safetensors cannot be read", why, "whole copy")
        found[f"a file with {case}"] = (scenes.sentence(lambda: gradwire.load(wire, folder)), words)
    found["a model"] = (scenes.sentence(lambda: gradwire.save(scenes.model(), folder)), ("Sequential", "compress"))
    return found


def sparse_at_last(rank: int) -> dict[str, scenes.Case]:
    found: dict[str, scenes.Case] = {}
    for spec in ("topk(0.1)", "fp16", "int8"):
        exchange = "two_way" if spec == "int8" else None
        table = nn.Embedding(5, 3, sparse=rank == 1)
        optimizer = scenes.wrapped(table, spec=spec, exchange=exchange, bundle=None)
        table(torch.tensor([1, 2])).sum().backward()
        words = ("'weight'", "sparse=False") if rank == 1 else ("another rank", "sparse=False")
        found[f"sparse under {spec}"] = (scenes.sentence(optimizer.step), ("sparse", "dense", words[1]))
        assert words[0] in found[f"sparse under {spec}"][0]
    return found


def test_what_only_shows_after_attaching(tmp_path: Path):
    scenes.check_sentences(run_ranks(later, 2, str(tmp_path)))


def momenta(rank: int, world: int) -> dict[str, scenes.Case]:
    def attempt(make: Callable[[nn.Module], torch.optim.Optimizer], spec: str, only: int | None = None) -> str:
        net = scenes.model()
        inner = make(net) if only in (None, rank) else scenes.sgd(net)
        return scenes.sentence(lambda: scenes.wrapped(net, inner, spec=spec))

    def momentum(net: nn.Module) -> torch.optim.Optimizer:
        return scenes.sgd(net, momentum=0.9)

    def adam(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(net.parameters())

    def own(net: nn.Module) -> torch.optim.Optimizer:
        return gradwire.SGD(net.parameters(), lr=0.1)

    def stepped(make: Callable[[nn.Module], torch.optim.Optimizer], spec: str) -> str:
        """Behind `compress`, which is not shown the optimizer."""
        net = scenes.model()
        wire, optimizer = gradwire.compress(net, spec), make(net)
        scenes.loss(net, rank, 0).backward()
        wire()
        before = scenes.tensors(net)
        scenes.sgd(scenes.model(), momentum=0.9).step()  # whose parameters are no matter
        said = scenes.sentence(optimizer.step)
        assert (said == "no refusal") or scenes.same(before, scenes.tensors(net))
        return said

    def second() -> str:
        """An optimizer that fits has stepped, and now one that does not."""
        net = scenes.model()
        wires = [gradwire.compress(net, "dgc(0.1)")]
        scenes.sgd(net).step()
        said = scenes.sentence(adam(net).step)
        wires.clear()
        assert scenes.sentence(adam(net).step) == "no refusal", "nobody is attached any more"
        return said

    def changed(spec: str) -> str:
        """An optimizer has fitted until the spec was changed."""
        net = scenes.model()
        wire, optimizer = gradwire.compress(net, spec), momentum(net)
        optimizer.step()
        wire.set("dgc(0.1)")
        return scenes.sentence(optimizer.step)

    later = scenes.wrapped(net := scenes.model(), momentum(net), spec="topk(0.1)")
    partly = scenes.model()
    words = ("momentum of its own", "momentum=0", "gradwire.SGD")
    return {
        "SGD": (attempt(momentum, "dgc(0.1)"), ("SGD has", *words)),
        "Adam": (attempt(adam, "dgc(0.1)"), ("Adam has", *words)),
        "on one rank": (attempt(momentum, "dgc(0.1)", only=1), words),
        "later": (scenes.sentence(lambda: later.wire.set("dgc(0.1)")), words),
        "at the first step": (stepped(momentum, "dgc(0.1)"), ("SGD has", *words)),
        "at the first step, ours": (stepped(own, "dgc(0.1)"), ("no refusal",)),
        "at the first step, of another spec": (stepped(momentum, "topk(0.1)"), ("no refusal",)),
        "at the first step of a second one": (second(), ("Adam has", *words)),
        "at a step after set": (changed("topk(0.1)"), ("SGD has", *words)),
        "at a step after set, chosen by itself before": (changed("auto"), ("SGD has", *words)),
        "no momentum": (attempt(scenes.sgd, "dgc(0.1)"), ("no refusal",)),
        "our own": (attempt(own, "dgc(0.1)"), ("no refusal",)),
        "no correction": (attempt(momentum, "topk(0.1)"), ("no refusal",)),
        "unnamed": (
            scenes.sentence(
                lambda: gradwire.DistributedOptimizer(scenes.sgd(partly), partly[0].named_parameters(), "sign")
            ),
            ("shape (12, 16)", "model.named_parameters()"),
        ),
        "no names": (
            scenes.sentence(lambda: gradwire.DistributedOptimizer(scenes.sgd(partly), partly.parameters(), "sign")),
            ("Parameter is no such pair", "model.named_parameters()"),
        ),
        "no optimizer": (
            scenes.sentence(lambda: gradwire.DistributedOptimizer(partly, partly.named_parameters(), "sign")),
            ("Sequential is no torch optimizer",),
        ),
    }


def test_momentum_twice_and_parameters_without_a_name():
    scenes.check_sentences(run_ranks(momenta, 2))
