"""The handle: its report, and that a change of spec loses no compression error."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fixtures
import gradwire
from gradwire.codecs.quantizers import Sign
from gradwire.codecs.selectors import TopK
from gradwire.core.segments import Segments
from gradwire.exchanges import AllGather
from gradwire.feedback import Residual
from spawn import run_ranks

PARAMETERS = 445
BIASES = 16 + 12 + 5


def report(rank: int, world: int, options: dict[str, Any]) -> gradwire.Report:
    net = fixtures.model()
    wire = gradwire.compress(net, **options)
    fixtures.plain_loop(net, wire, fixtures.sgd(net), range(3), rank)
    return wire.report()


def test_reported_bytes_are_the_sizes_of_the_codec():
    """Gathered by two ranks: top tenths of 160, 192 and 60 entries at 8 bytes, and 33 biases in float16."""
    sizes = [gradwire.codec("topk(0.1) | int32").size(Segments.single(n)) for n in (160, 192, 60)]
    assert sizes == [8 * 16, 8 * 19, 8 * 6]
    for found in run_ranks(report, 2, {"spec": "topk(0.1) | int32"}):
        assert (found.steps, found.skipped, found.world) == (3, 0, 2)
        assert found.payload == 3 * (sum(sizes) + 2 * BIASES)
        assert found.dense == 3 * 4 * PARAMETERS
        # The status of the step travels with the first message: here as one more float16.
        assert found.sent == found.received == 3 * (sum(sizes) + 2 * BIASES + 2)
        assert found.sent_per_step == found.received_per_step == found.sent / 3
        assert found.collectives == 3 * 2
        assert found.payload_ratio == found.dense / found.payload
        assert found.wire_ratio == pytest.approx(found.dense / found.sent)  # two ranks: a ring sends each byte once
        assert found.wire_ratio_bf16 == found.wire_ratio / 2
        assert found.rules == {"dim<=1": (3 * 2 * BIASES, 3 * 4 * BIASES), "*": (3 * 328, 3 * 4 * 412)}


def test_bytes_of_dense_training():
    (one, two, three) = run_ranks(report, 3, {"spec": "fp32"})
    assert one.payload == one.dense == 3 * 4 * PARAMETERS
    assert one.sent == two.sent == three.sent == pytest.approx(2 * 2 / 3 * 3 * 4 * (PARAMETERS + 1))
    assert one.wire_ratio == pytest.approx(PARAMETERS / (PARAMETERS + 1)) and one.payload_ratio == 1


def test_a_report_as_text():
    net = fixtures.model()
    wire = gradwire.compress(net, "topk(0.1)")
    assert "0 steps" in str(wire.report())
    fixtures.plain_loop(net, wire, fixtures.sgd(net), range(2), 0)
    text = str(wire.report())
    assert "2 steps (0 skipped), world of 1" in text
    assert "rule dim<=1" in text and "rule *" in text and "encode" in text
    assert "wire      a world of one sends nothing\n" in text
    assert "inf" not in text and "- less" not in text, "it has no ratio"


def test_seconds_are_reported_by_rule():
    nets, workers = fixtures.replicas(2, "topk(0.1)")
    fixtures.train_steps(nets, workers, range(2))
    found = workers.wires[0].report()
    assert found.rule_seconds.keys() == found.rules.keys() == {"dim<=1", "*"}
    assert all(encode > 0 and decode > 0 for encode, decode in found.rule_seconds.values())
    workers.wires[0].set("sign")
    assert workers.wires[0].report().rule_seconds == found.rule_seconds


def test_printing_shows_the_plan():
    rules = (gradwire.Rule("int8", name="0.*", min_dim=2),)
    wire = gradwire.compress(fixtures.model(), "dgc(0.1)", rules=rules)
    shown = str(wire)
    for words in (
        "rank 0 of 1",
        "0.* dim>=2",
        "dim<=1",
        "topk(0.1)",
        "int8",
        "fp16",
        "momentum_correction",
        "residual",
    ):
        assert words in shown, shown
    assert "allgather" in shown and "allreduce" in shown
    ramp = gradwire.compress(fixtures.model(), {0: "fp32", 5: "topk(0.1)"})
    assert "fp32 -> topk(0.1)" in str(ramp)


CHANGES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"spec": "topk(0.2)"}, {"spec": "topk(0.05) | sign"}),
    ({"spec": "topk(0.2)"}, {"spec": "int4", "exchange": "two_way"}),
    ({"spec": "int4", "exchange": "two_way"}, {"spec": "topk(0.1)"}),
    ({"spec": "int4", "exchange": "two_way"}, {"spec": "qsgd"}),
    ({"spec": "dgc(0.1)"}, {"spec": "topk(0.3)"}),
    ({"spec": "dgc(0.1)"}, {"spec": "sign", "feedback": "ef21"}),
    ({"spec": "topk(0.2)"}, {"spec": "dgc(0.2)"}),
    ({"spec": "topk(0.2)"}, {"spec": "powersgd(1)"}),
    ({"spec": "topk(0.2)", "exchange": "delayed"}, {"spec": "sign"}),
    ({"spec": "topk(0.2)", "granularity": "model", "bundle": None}, {"spec": "dense"}),
]


@pytest.mark.parametrize(("first", "second"), CHANGES)
def test_a_change_of_spec_keeps_pending_errors(first: dict[str, Any], second: dict[str, Any]):
    nets, workers = fixtures.replicas(3, **first)
    fixtures.train_steps(nets, workers, range(3))
    before = [wire.debts() for wire in workers.wires]
    assert any(debt.any() for debt in before[0].values())
    for wire, debts in zip(workers.wires, before, strict=True):
        wire.set(**second)
        for name, debt in wire.debts().items():
            torch.testing.assert_close(debt, debts[name], rtol=1e-6, atol=1e-8)
        assert wire.report().steps == 3
    fixtures.train_steps(nets, workers, range(3, 5))
    assert all(fixtures.same(fixtures.tensors(net), fixtures.tensors(nets[0])) for net in nets)


def main_feedback(wire: gradwire.Wire) -> str:
    return str(wire.engine.plan.lanes[-1].feedback)


def test_which_feedback_a_change_of_spec_keeps():
    wire = gradwire.compress(fixtures.model(), "fp16")
    assert main_feedback(wire) == "none"
    wire.set("topk(0.1)")
    assert main_feedback(wire) == "residual", "a biased codec gets error feedback"
    wire.set("qsgd")
    assert main_feedback(wire) == "residual", "a codec alone keeps the feedback that was there"
    wire.set("dgc(0.1)")
    assert main_feedback(wire) == "momentum_correction", "a preset brings its own"
    wire.set("topk(0.2)")
    assert main_feedback(wire) == "momentum_correction"
    wire.set("topk(0.2)", feedback="none")
    assert main_feedback(wire) == "none", "a named feedback wins"


RULES = (gradwire.Rule("topk(0.05)", name="0.*", granularity="layer"),)


@pytest.mark.parametrize(
    "options",
    [
        {"spec": "topk(0.1)"},
        {"spec": "topk(0.1)", "rules": RULES},
        {"spec": "fp16", "rules": RULES},
        {"spec": "int4", "exchange": "two_way"},
        {"spec": "qsgd", "exchange": "delayed"},
    ],
)
def test_off_is_dense_and_delivers_pending_errors(options: dict[str, Any]):
    nets, workers = fixtures.replicas(2, **options)
    fixtures.train_steps(nets, workers, range(3))
    owed = fixtures.mean_pending_error(workers.wires)
    for wire in workers.wires:
        wire.off()
    for rank, net in enumerate(nets):
        net.zero_grad()
        fixtures.loss(net, rank, 3).backward()
    mean = {
        name: torch.stack([dict(net.named_parameters())[name].grad.double() for net in nets]).mean(0) for name in owed
    }
    accounting = workers.wires[0].engine.unwrapped.accounting
    before = sum(accounting.encoded.values())
    workers()
    assert sum(accounting.encoded.values()) - before == 4 * PARAMETERS, "all of it is sent in float32"
    for name, p in nets[1].named_parameters():
        torch.testing.assert_close(p.grad.double(), mean[name] + owed[name], rtol=1e-5, atol=1e-7)
    assert all(float(debt.abs().max()) < 1e-7 for debt in fixtures.mean_pending_error(workers.wires).values())


def test_off_keeps_momentum_and_rules_come_back():
    net = fixtures.model()
    wire = gradwire.compress(net, "dgc(0.1, masking=False)", rules=RULES)
    fixtures.plain_loop(net, wire, fixtures.sgd(net), range(2), 0)
    before = fixtures.memories(wire)
    wire.off()
    assert torch.equal(fixtures.memories(wire)["momentum/2.weight"], before["momentum/2.weight"])
    assert [lane.label for lane in wire.engine.plan.lanes] == ["*"]
    wire.set("topk(0.1)")
    assert "0.*" in {lane.label for lane in wire.engine.plan.lanes}


def test_noop_returns_the_own_gradient():
    nets, workers = fixtures.replicas(2, "fp32", exchange="noop")
    own = []
    for rank, net in enumerate(nets):
        fixtures.loss(net, rank, 0).backward()
        own.append({name: p.grad.clone() for name, p in net.named_parameters()})
    workers()
    for net, grads, wire in zip(nets, own, workers.wires, strict=True):
        assert fixtures.same({name: p.grad for name, p in net.named_parameters()}, grads)
        assert wire.report().sent == 0 and wire.report().collectives == 0


def variance_step(moment: float | None) -> int:
    """How many entries of one layer pass the test at the first step."""
    net = nn.Sequential(nn.Linear(10, 16))
    wire = gradwire.compress(net, "variance(alpha=1.5)", bundle=None)
    fixtures.loss(net, 0, 0).backward()
    if moment is not None:
        wire.observe({name: torch.full_like(p, moment) for name, p in net.named_parameters()})
    wire()
    return sum(int((p.grad != 0).sum()) for p in net.parameters())


def test_the_variance_criterion_uses_observed_moments():
    assert variance_step(None) == 0, "the batch as one sample: g^2 does not exceed 1.5 g^2"
    assert variance_step(1e6) == 0
    assert variance_step(0.0) == 176
    assert 0 < variance_step(1e-4) < 176


def test_observed_moments_are_clipped_as_gradients_are():
    """By the factor of momentum correction."""
    kept = []
    for clip in (None, 0.1):
        net = nn.Sequential(nn.Linear(10, 16))
        wire = gradwire.compress(
            net, "variance", feedback=f"momentum_correction(clip={clip})" if clip else None, bundle=None
        )
        fixtures.loss(net, 0, 0).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in net.parameters()])
        wire.observe({name: torch.full_like(p, 1e6) for name, p in net.named_parameters()})
        wire()
        kept.append(fixtures.memories(wire)["second_moment/0.weight"])
    torch.testing.assert_close(kept[1], kept[0] * (0.1 / norm) ** 2)


def test_observed_moments_must_fit_and_survive_a_delayed_step():
    net = fixtures.model()
    wire = gradwire.compress(net, "variance", exchange="delayed")
    for wrong in ({"unknown.weight": torch.ones(3)}, {"0.weight": torch.ones(3)}):
        text = fixtures.error_text(lambda wrong=wrong: wire.observe(wrong))
        assert text.startswith("ValueError") and next(iter(wrong)) in text and "named_parameters" in text
    fixtures.loss(net, 0, 0).backward()
    wire()
    moments = {name: torch.rand_like(p) for name, p in net.named_parameters()}
    wire.observe(moments)
    kept = fixtures.memories(wire)
    assert torch.equal(kept["observed/0.weight"], moments["0.weight"].flatten())


@pytest.mark.parametrize(("spec", "communicates"), [("powersgd(1)", True), ("topk(0.1)", False)])
def test_lockstep_reports_seconds(spec, communicates):
    """Ranks that step all at once write no messages, so no time is spent in collectives."""
    nets, workers = fixtures.replicas(3, spec)
    fixtures.train_steps(nets, workers, range(2))
    before = [wire.report() for wire in workers.wires]
    fixtures.train_steps(nets, workers, range(2, 6))
    for old, wire in zip(before, workers.wires, strict=True):
        new = wire.report()
        assert 0 < old.encode_seconds < new.encode_seconds
        assert 0 < old.decode_seconds < new.decode_seconds
        assert (0 < old.wire_seconds < new.wire_seconds) if communicates else new.wire_seconds == 0
    assert len({wire.report().wire_seconds for wire in workers.wires}) == 1


def test_lockstep_refuses_no_replicas_and_scalers():
    with pytest.raises(ValueError, match="replica"):
        gradwire.lockstep([], "sign")
    with pytest.raises(ValueError, match="GradScaler"):
        gradwire.lockstep([fixtures.model()], "sign", scaler=torch.amp.GradScaler("cpu", enabled=False))


def test_parts_may_be_objects():
    nets, workers = fixtures.replicas(2, TopK(0.1) | Sign(), feedback=Residual(0.9), exchange=AllGather())
    others, named = fixtures.replicas(2, "topk(0.1) | sign", feedback="residual(decay=0.9)", exchange="allgather")
    fixtures.train_steps(nets, workers, range(3))
    fixtures.train_steps(others, named, range(3))
    assert fixtures.same(fixtures.memories(workers.wires[0]), fixtures.memories(named.wires[0]))
    workers.wires[0].set(Sign(), feedback=Residual())
    assert main_feedback(workers.wires[0]) == "residual"


def test_a_ramp_goes_by_step():
    net = nn.Sequential(nn.Linear(100, 100, bias=False))
    wire = gradwire.compress(net, "ramp(topk(0.01), 6)")
    kept = []
    for step in range(8):
        net.zero_grad()
        net(fixtures.batch(0, step, width=100)).square().mean().backward()
        wire()
        kept.append(int((net[0].weight.grad != 0).sum()))
    assert kept == [2500, 2500, 625, 625, 156, 156, 100, 100]


def rule_of(wire: gradwire.Wire) -> dict[str, str]:
    return {name: lane.label for lane in wire.engine.plan.lanes for name in lane.tensors.names}


def test_the_first_rule_that_matches_wins():
    rules = (
        gradwire.Rule("fp32", name="4.*"),
        gradwire.Rule("int8", name="?.weight", min_size=190),
        gradwire.Rule("int4", name="*.weight"),
        gradwire.Rule("sign", min_dim=2),
        gradwire.Rule("bf16", max_dim=1, max_size=12),
    )
    wire = gradwire.compress(fixtures.model(), "topk(0.1)", rules=rules)
    assert rule_of(wire) == {
        "4.weight": "4.*",
        "4.bias": "4.*",
        "2.weight": "?.weight size>=190",
        "0.weight": "*.weight",
        "2.bias": "dim<=1 size<=12",
        "0.bias": "dim<=1",
    }
    loss = fixtures.loss
    nets, workers = fixtures.replicas(2, "topk(0.1)", rules=rules)
    grads: list[Tensor] = []
    for rank, net in enumerate(nets):
        loss(net, rank, 0).backward()
        grads.append(net[4].weight.grad.clone())
    workers()
    assert torch.equal(nets[0][4].weight.grad, (grads[0] + grads[1]) / 2), "this layer travels in float32"


def test_a_rank_without_a_process_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="init_process_group"):
        gradwire.compress(nn.Linear(3, 2), "sign")


def test_the_report_after_a_load_is_of_this_wire(tmp_path) -> None:
    """It counts neither the steps nor the bytes of the wire that was saved."""
    first, second = nn.Linear(30, 20), nn.Linear(30, 20)
    opt = gradwire.DistributedOptimizer(torch.optim.SGD(first.parameters(), 0.1), first.named_parameters(), "sign")
    for _ in range(3):
        first(torch.ones(4, 30)).sum().backward()
        opt.step()
    gradwire.save(opt, tmp_path)
    wire = gradwire.compress(second, "sign")
    gradwire.load(wire, tmp_path)
    second(torch.ones(4, 30)).sum().backward()
    wire()
    report = wire.report()
    assert report.steps == 1
    assert report.payload * 3 == opt.wire.report().payload
    assert report.collectives * 3 == opt.wire.report().collectives


class Shifted(nn.Module):
    """Adds one parameter of 40 entries, whose gradient is the same everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4, 10))


@pytest.mark.parametrize("door", ["plain", "optimizer", "lockstep"])
@pytest.mark.parametrize("spec", ["dense", "topk(0.1)"])
def test_a_gradient_whose_entries_share_memory_is_compressed(door: str, spec: str) -> None:
    """As `torch.autograd.grad` returns it; optimizers of torch step by it, too."""
    updates = []
    for expanded in (False, True):
        net = Shifted()
        (grad,) = torch.autograd.grad(net.shift.sum(), [net.shift])
        assert grad.stride() == (0, 0)
        net.shift.grad = grad if expanded else grad.contiguous()
        if door == "optimizer":
            fixtures.wrap_optimizer(net, spec=spec).step()
        else:
            made = gradwire.compress(net, spec) if door == "plain" else gradwire.lockstep([net], spec)
            made()
        updates.append(net.shift.grad)
    assert torch.equal(*updates) and updates[0].any()
