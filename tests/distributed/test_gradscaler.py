"""Under a GradScaler: memories live in unscaled units, and an overflow on one rank makes all ranks back off."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fixtures
import gradwire
from spawn import run_ranks

BAD_STEP = 3
STEPS = 7
DOORS = ("plain", "hook", "optimizer")


def scaler_of(**options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2, **options)


def train(
    door: str, rank: int, options: dict[str, Any], strike: Callable[[int], bool], **scaling: Any
) -> tuple[nn.Module, gradwire.Wire, list[float]]:
    """A loop as the manual writes it; scaling is by powers of two, so it changes no bit of the outcome."""
    net = fixtures.model()
    scaler = scaler_of(**scaling)
    outer: nn.Module = fixtures.ddp(net) if door == "hook" else net
    optimizer: torch.optim.Optimizer = fixtures.sgd(net)
    if door == "optimizer":
        optimizer = gradwire.DistributedOptimizer(optimizer, net.named_parameters(), scaler=scaler, **options)
        wire = optimizer.wire
    else:
        wire = gradwire.compress(outer, scaler=scaler, **options)
    now = [0]
    net[2].weight.register_hook(lambda grad: grad * torch.inf if strike(now[0]) else grad)
    scales = []
    for step in range(STEPS):
        now[0] = step
        optimizer.zero_grad()
        before, memories = fixtures.tensors(net), fixtures.memories(wire)
        scaler.scale(fixtures.loss(outer, rank, step)).backward()
        if door == "plain":
            wire()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if scaler.is_enabled() and step == BAD_STEP and wire.skipped:
            assert fixtures.same(fixtures.tensors(net), before), (door, options)
            assert fixtures.same(fixtures.memories(wire), memories), (door, options)
    return net, wire, scales


def unscaled(rank: int, options: dict[str, Any], skip: int | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    net = fixtures.model()
    wire = gradwire.compress(net, **options)
    for steps in (range(skip), range(skip + 1, STEPS)) if skip is not None else (range(STEPS),):
        fixtures.plain(net, wire, fixtures.sgd(net), steps, rank)
    return fixtures.tensors(net), fixtures.memories(wire)


def scaled(rank: int, world: int) -> None:
    for options in (
        {"spec": "topk(0.1)", "launch_mb": fixtures.LAUNCH_MB},
        {"spec": "int4", "exchange": "two_way"},
        {"spec": "dgc(0.1, clip=0.2)"},
        {"spec": "powersgd(1)"},
        {"spec": "topk(0.1)", "exchange": "delayed"},
    ):
        for skip in (None, BAD_STEP):
            parameters, memories = unscaled(rank, options, skip)
            for door in DOORS:
                at = -1 if skip is None else BAD_STEP
                net, wire, scales = train(door, rank, options, lambda step, at=at: rank == 1 and step == at)
                assert fixtures.same(fixtures.tensors(net), parameters), (door, options, skip)
                assert fixtures.same(fixtures.memories(wire), memories), (door, options, skip)
                check_account(wire, scales, skip)


def check_account(wire: gradwire.Wire, scales: list[float], skip: int | None) -> None:
    assert fixtures.agreed(torch.tensor(scales)), "scales drift apart"
    assert (min(scales[1:]) < max(scales[:BAD_STEP])) == (skip is not None)
    report = wire.report()
    assert (report.steps, report.skipped) == (STEPS, 0 if skip is None else 1)
    assert report.dense == 4 * 445 * (STEPS - report.skipped), "nothing was encoded in a skipped step"


def test_scaling_changes_nothing_and_an_overflow_is_everybodys():
    run_ranks(scaled, 2, timeout=100)


def disabled(rank: int, world: int) -> None:
    parameters, _ = unscaled(rank, {"spec": "topk(0.1)"}, None)
    for door in DOORS:
        net, _, _ = train(door, rank, {"spec": "topk(0.1)"}, lambda step: False, enabled=False)
        assert fixtures.same(fixtures.tensors(net), parameters), door


def test_a_disabled_scaler_is_none():
    run_ranks(disabled, 2)


def clipped(rank: int, world: int) -> list[dict[str, Tensor]]:
    """The optimizer's door lets the loop unscale first, as clipping wants it."""
    found = []
    for enabled in (True, False):
        net = fixtures.model()
        scaler = scaler_of(enabled=enabled)
        optimizer = gradwire.DistributedOptimizer(
            fixtures.sgd(net), net.named_parameters(), "topk(0.1)", scaler=scaler, bundle=None
        )
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(fixtures.loss(net, rank, step)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
        found.append(fixtures.tensors(net))
    return found


def test_gradients_may_be_unscaled_and_clipped_before_the_step():
    for with_scaler, without in run_ranks(clipped, 2):
        assert fixtures.same(with_scaler, without)


def untold(rank: int, world: int) -> str:
    net = fixtures.model()
    scaler = scaler_of()
    optimizer = gradwire.DistributedOptimizer(fixtures.sgd(net), net.named_parameters(), "topk(0.1)")
    scaler.scale(fixtures.loss(net, rank, 0)).backward()
    return fixtures.sentence(lambda: scaler.step(optimizer))


def test_a_scaler_that_the_optimizer_was_not_told_of():
    for said in run_ranks(untold, 2):
        assert "drift apart" in said and "scaler=scaler" in said


class Half(nn.Module):
    """A model whose gradients pass through float16, where a large scale overflows by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = fixtures.model()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).half().float()


def real_overflow(rank: int, world: int) -> list[float]:
    net = Half()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=100)
    wire = gradwire.compress(net, "topk(0.1)", scaler=scaler)
    optimizer = fixtures.sgd(net)
    scales = []
    for step in range(24):
        optimizer.zero_grad()
        loss = net(fixtures.batch(rank, step) * (1 + 30 * rank)).square().mean()
        scaler.scale(loss).backward()
        wire()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert 0 < wire.skipped < 24
    assert all(bool(torch.isfinite(p).all()) for p in net.parameters())
    return scales


def test_scales_settle_together():
    first, second = run_ranks(real_overflow, 2)
    assert first == second and first[-1] < 2.0**24
