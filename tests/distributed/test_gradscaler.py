"""Under a GradScaler: state is kept in unscaled units, and an overflow on one rank makes all ranks back off."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fixtures
import gradwire
from spawn import Answers, cases_fixture, run_ranks

BAD_STEP = 3
STEPS = 7
ENTRY_POINTS = ("plain", "plain, unscaled first", "hook", "optimizer")
SPECS = fixtures.by_name(
    {"spec": "topk(0.1)", "bucket_mb": fixtures.BUCKET_MB},
    {"spec": "int4", "exchange": "two_way"},
    {"spec": "dgc(0.1, clip=0.2)"},
    {"spec": "powersgd(1)"},
    {"spec": "topk(0.1)", "exchange": "delayed"},
)
OVERFLOWS = {"no overflow": None, "an overflow": BAD_STEP}
CASES = {f"{name}, {what}": (options, at) for name, options in SPECS.items() for what, at in OVERFLOWS.items()}


def scaler_of(**options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2, **options)


def train(
    door: str, rank: int, options: dict[str, Any], overflows: Callable[[int], bool], **scaling: Any
) -> tuple[nn.Module, gradwire.Wire, list[float]]:
    """The loop of torch's manual. Scaling is by powers of two, so it changes no bit of the result."""
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
    net[2].weight.register_hook(lambda grad: grad * torch.inf if overflows(now[0]) else grad)
    scales = []
    for step in range(STEPS):
        now[0] = step
        optimizer.zero_grad()
        before, memories = fixtures.tensors(net), fixtures.memories(wire)
        scaler.scale(fixtures.loss(outer, rank, step)).backward()
        if door == "plain, unscaled first":
            scaler.unscale_(optimizer)
        if "plain" in door:
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
        fixtures.plain_loop(net, wire, fixtures.sgd(net), steps, rank)
    return fixtures.tensors(net), fixtures.memories(wire)


class Trained(NamedTuple):
    parameters: dict[str, Tensor]
    memories: dict[str, Tensor]
    scales: list[float]
    steps: int
    skipped: int
    dense: int


def scaled(rank: int, world: int, case: tuple[dict[str, Any], int | None]) -> tuple[Any, dict[str, Trained]]:
    """The same training without a scaler, and with one through every entry point."""
    options, skip = case
    trained = {}
    for door in ENTRY_POINTS:
        net, wire, scales = train(door, rank, options, lambda step: rank == 1 and step == skip)
        report = wire.report()
        counts = report.steps, report.skipped, report.dense
        trained[door] = Trained(fixtures.tensors(net), fixtures.memories(wire), scales, *counts)
    return unscaled(rank, options, skip), trained


answers = cases_fixture(scaled, 2, CASES)


@pytest.mark.parametrize("door", ENTRY_POINTS)
@pytest.mark.parametrize("case", CASES)
def test_scaling_changes_nothing_and_an_overflow_skips_the_step_on_all_ranks(case: str, door: str, answers: Answers):
    skipped = CASES[case][1] is not None
    for (parameters, memories), trained in answers[case]:
        found = trained[door]
        assert fixtures.same(found.parameters, parameters)
        assert fixtures.same(found.memories, memories)
        assert found.scales == answers[case][0][1][door].scales, "scales drift apart"
        assert (min(found.scales[1:]) < max(found.scales[:BAD_STEP])) == skipped
        assert (found.steps, found.skipped) == (STEPS, int(skipped))
        assert found.dense == 4 * 445 * (STEPS - skipped), "nothing is encoded in a skipped step"


def disabled(rank: int, world: int) -> list[dict[str, Tensor]]:
    """Parameters without a scaler, then with a disabled one through every entry point."""
    nets = [train(door, rank, {"spec": "topk(0.1)"}, lambda step: False, enabled=False)[0] for door in ENTRY_POINTS]
    return [unscaled(rank, {"spec": "topk(0.1)"}, None)[0], *map(fixtures.tensors, nets)]


def test_a_disabled_scaler_changes_nothing():
    for expected, *trained in run_ranks(disabled, 2):
        for door, parameters in zip(ENTRY_POINTS, trained, strict=True):
            assert fixtures.same(parameters, expected), door


def clipped(rank: int, world: int) -> list[dict[str, Tensor]]:
    """With `DistributedOptimizer` the loop may unscale first, as clipping needs it."""
    trained = []
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
        trained.append(fixtures.tensors(net))
    return trained


def test_gradients_may_be_unscaled_and_clipped_before_the_step():
    for with_scaler, without in run_ranks(clipped, 2):
        assert fixtures.same(with_scaler, without)


def scaler_not_passed(rank: int, world: int) -> str:
    net = fixtures.model()
    scaler = scaler_of()
    optimizer = gradwire.DistributedOptimizer(fixtures.sgd(net), net.named_parameters(), "topk(0.1)")
    scaler.scale(fixtures.loss(net, rank, 0)).backward()
    return fixtures.error_text(lambda: scaler.step(optimizer))


def test_a_scaler_that_was_not_passed_to_the_optimizer_is_refused():
    for text in run_ranks(scaler_not_passed, 2):
        assert text.startswith("ValueError") and "scaler=scaler" in text


class Half(nn.Module):
    """A model whose gradients pass through float16, where a large scale overflows by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = fixtures.model()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).half().float()


def real_overflow(rank: int, world: int) -> tuple[list[float], int, bool]:
    """The scales, the steps skipped, and whether all parameters are finite."""
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
    return scales, wire.skipped, all(bool(torch.isfinite(p).all()) for p in net.parameters())


def test_scales_settle_alike_on_all_ranks():
    first, second = run_ranks(real_overflow, 2)
    scales, skipped, finite = first
    assert first == second and scales[-1] < 2.0**24
    assert 0 < skipped < 24 and finite


def not_given(rank: int, world: int, door: str) -> str:
    net, scaler = fixtures.model(), scaler_of()
    outer, optimizer = fixtures.ddp(net) if door == "hook" else net, fixtures.sgd(net)
    wire = gradwire.compress(outer, "int4")
    scaler.scale(fixtures.loss(outer, rank, 0)).backward()
    if "unscaled" in door:
        scaler.unscale_(optimizer)
    if "plain" in door:
        wire()
    return fixtures.error_text(lambda: scaler.step(optimizer))


@pytest.mark.parametrize("door", ["plain", "plain, unscaled first", "hook"])
def test_a_scaler_that_the_wire_was_not_given_is_refused(door: str) -> None:
    """It would find zeros where gradients overflow, never back off, and train nothing."""
    fixtures.check_message([(text, ("ValueError", "SGD", "scaler=scaler")) for text in run_ranks(not_given, 2, door)])
