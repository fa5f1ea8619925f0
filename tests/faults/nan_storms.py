"""NaN storms: a gradient that is not finite, on any rank, drops the step on all, and leaves all memories alone."""

import random
import traceback
from typing import Any

import torch

import fixtures
from faults.campaign import Campaign

SPECS: list[dict[str, Any]] = [
    {"spec": "fp32"},
    {"spec": "fp16"},
    {"spec": "topk(0.1)"},
    {"spec": "topk(0.1) | sign"},
    {"spec": "dgc(0.1)"},
    {"spec": "int8", "exchange": "two_way"},
    {"spec": "sign", "exchange": "majority"},
    {"spec": "qsgd(7)", "feedback": "residual"},
    {"spec": "terngrad"},
    {"spec": "powersgd(2)"},
    {"spec": "randomk(0.2)"},
    {"spec": "threshold(0.01)", "feedback": "residual"},
    {"spec": "adacomp(bin=50)"},
    {"spec": "hadamard | int4", "feedback": "residual"},
    {"spec": "topk(0.1)", "feedback": "ef21"},
    {"spec": "topk(0.1)", "granularity": "model"},
    {"spec": "natural", "bundle": None},
]
VALUES = {"NaN": float("nan"), "infinity": float("inf"), "minus infinity": float("-inf")}


def poison(net: torch.nn.Module, value: float, draw: random.Random) -> None:
    """One entry, one tensor, or all gradients."""
    chosen = list(net.parameters())
    how = draw.choice(("entry", "tensor", "all"))
    if how != "all":
        chosen = [draw.choice(chosen)]
    for p in chosen:
        assert p.grad is not None
        if how == "entry":
            p.grad.view(-1)[draw.randrange(p.numel())] = value
        else:
            p.grad.fill_(value)


def run(campaign: Campaign) -> None:
    torch.set_num_threads(1)
    draw = campaign.random
    while campaign.going():
        options, world = draw.choice(SPECS), draw.choice((1, 2, 3))
        nets, workers = fixtures.replicas(world, **{**options, "seed": draw.randrange(1000)})
        where = f"{options} of {world} ranks"
        try:
            storm(campaign, nets, workers, where)
        except Exception:
            campaign.fail("traceback", f"{where}: {traceback.format_exc(limit=-4)}")


def storm(campaign: Campaign, nets: Any, workers: Any, where: str, steps: int = 8) -> None:
    """Some steps, about half of which are poisoned on some ranks."""
    draw, skipped = campaign.random, 0
    for step in range(steps):
        for rank, net in enumerate(nets):
            net.zero_grad()
            fixtures.loss(net, rank, step).backward()
        poisoned = draw.random() < 0.5
        if poisoned:
            name = draw.choice(list(VALUES))
            for net in draw.sample(nets, draw.randint(1, len(nets))):
                poison(net, VALUES[name], draw)
            campaign.made(name)
            skipped += 1
        before = [fixtures.memories(wire) for wire in workers.wires]
        workers()
        updates = [{name: p.grad for name, p in net.named_parameters()} for net in nets]
        finite = all(bool(x.isfinite().all()) for x in updates[0].values())
        campaign.expect(finite, "wrong result", f"{where}: step {step} is not finite")
        campaign.expect(all(fixtures.same(updates[0], x) for x in updates), "wrong result", f"{where}: ranks differ")
        if poisoned:
            zero = all(not bool(x.any()) for x in updates[0].values())
            campaign.expect(zero, "wrong result", f"{where}: the update of a dropped step is not zero")
            kept = all(fixtures.same(b, fixtures.memories(w)) for b, w in zip(before, workers.wires, strict=True))
            campaign.expect(kept, "wrong result", f"{where}: a dropped step changed memories")
        for net in nets:
            fixtures.sgd_step(net)
    counted = [wire.skipped for wire in workers.wires]
    campaign.expect(counted == [skipped] * len(nets), "wrong result", f"{where}: {counted} steps were counted")
