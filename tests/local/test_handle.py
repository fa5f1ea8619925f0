"""The handle of local steps: its start, reports, other specs, other worlds, and what it refuses."""

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import fixtures
import gradwire
import local_fixtures
from gradwire.core.payload import Payload, as_bytes
from gradwire.core.requests import run
from gradwire.integrations.local import round_length
from gradwire.local import local_method
from local_fixtures import train

SPARSE = "sparseloco(H=2, k=4, chunk=32)"


def local_replicas(spec: Any, world: int = 2, **options: Any) -> tuple[Any, ...]:
    return local_fixtures.local_replicas(spec, world, **options)


def owed(outer: Any) -> dict[str, torch.Tensor]:
    return fixtures.mean_pending_error([rank.wire for rank in outer.ranks])


# -- specs -------------------------------------------------------------------------------------------------------------


def test_presets_print_what_they_stand_for() -> None:
    text = str(gradwire.parse("sparseloco(H=5)"))
    for part in (
        "H=5",
        "chunk_topk(64) | sign(per=64)",
        "residual(decay=0.95)",
        "allgather(mean='senders')",
        "rate=1.0",
    ):
        assert part in text
    assert "Nesterov(rate=0.7, momentum=0.9)" in str(gradwire.parse("diloco(H=30)"))


def test_a_handle_prints_the_outer_optimizer_in_use_and_its_rate_now() -> None:
    net = fixtures.model()
    schedule = "local_schedule({0: diloco(H=2), 4: diloco(H=4)})"
    given = gradwire.local(net, fixtures.sgd(net), schedule, outer=lambda weights: torch.optim.Adam(weights, 1e-3))
    assert str(given).count("outer=Adam\n") == str(given).count("outer=Adam;") == 1 and "Nesterov" not in str(given)
    assert "step 0, 0 of 2 in the round, outer rate 0.001\n" in str(given)
    own = gradwire.local(net, fixtures.sgd(net), "diloco(H=2)")
    own.optimizer.param_groups[0]["lr"] = 0.35  # as a scheduler does
    assert "outer=Nesterov(rate=0.7, momentum=0.9)" in str(own) and "in the round, outer rate 0.35\n" in str(own)


@pytest.mark.parametrize(
    ("spec", "options", "named"),
    [
        ("topk(0.01)", {}, "topk"),
        ("diloco(H=0)", {}, "^H=0 must be a whole number of inner steps from 1; the round is"),
        ("sparseloco(H=3, start=4, first=onebit_adam)", {}, "^'{0: twobit, .* where a codec belongs; .* int4$"),
        ("diloco(H=2, momentum=1.5)", {}, "momentum=1.5"),
        ("local_sgd(alpha=1.0)", {}, "alpha=1.0"),
        ("diloco(H=3, delay=3)", {}, "delay=3"),
        ("local_sgd(H=2)", {"codec": "onebit_adam"}, "common_momentum"),
        ("diloco(H=2)", {"codec": "dgc(0.1)"}, "momentum_correction"),
        ("local_sgd(H=2)", {"codec": "demo"}, "hands back signs"),
        ("local_sgd(H=2)", {"codec": "int8", "exchange": "delayed"}, "delayed"),
    ],
)
def test_what_makes_no_round_is_refused(spec: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        local_replicas(spec, **options)


def test_compress_says_where_local_steps_belong() -> None:
    with pytest.raises(ValueError, match=r"gradwire\.local"):
        gradwire.method("diloco(H=5)")


# -- the start ---------------------------------------------------------------------------------------------------------


def test_a_step_of_the_start_needs_averaged_gradients() -> None:
    nets, optimizers, outer = local_replicas("post_local_sgd(H=2, start=2)")
    fixtures.loss(nets[0], 0, 0).backward()
    with pytest.raises(RuntimeError, match="average_gradients"):
        optimizers[0].step()
    with pytest.raises(RuntimeError, match="average_gradients"):
        outer()


def test_replicas_are_equal_in_the_start_and_differ_inside_rounds() -> None:
    nets, optimizers, outer = local_replicas("diloco(H=2, start=3)")
    train(nets, optimizers, outer, range(3))
    assert fixtures.same(fixtures.tensors(nets[0]), fixtures.tensors(nets[1]))
    train(nets, optimizers, outer, range(3, 4))
    assert not fixtures.same(fixtures.tensors(nets[0]), fixtures.tensors(nets[1]))
    assert outer.ranks[0].inside == 1 and outer.ranks[0].steps == 4


def test_weights_that_are_loaded_too_late_are_refused() -> None:
    """The first round would take them back to where the handle began."""
    for spec, is_refused in (("diloco(H=4)", True), ("post_local_sgd(H=4, start=2)", False)):
        nets, optimizers, outer = local_replicas(spec)
        for net in nets:
            net.load_state_dict(fixtures.model(seed=7).state_dict())
        with pytest.raises(RuntimeError, match=r"changed since gradwire\.local") if is_refused else nullcontext():
            train(nets, optimizers, outer, range(4))


# -- reports -----------------------------------------------------------------------------------------------------------


def test_a_report_before_the_first_round_says_so() -> None:
    nets, optimizers, outer = local_replicas("diloco(H=30)")
    train(nets, optimizers, outer, range(8))
    assert "no round" in str(outer.ranks[0].report())


def test_ratios_count_inner_steps() -> None:
    nets, optimizers, outer = local_replicas("local_sgd(H=4)")
    train(nets, optimizers, outer, range(9))
    report = outer.ranks[0].report()
    n = 4 * sum(p.numel() for p in nets[0].parameters())
    assert report.rounds.steps == 2 and report.local_steps == 8 and report.start is None
    assert report.payload == 2 * n
    assert report.payload_ratio == report.payload_ratio_all_in == pytest.approx(4.0)
    assert report.wire_ratio == pytest.approx(4.0, rel=0.02)  # less a byte of status
    assert "8 local steps in 2 rounds" in str(report) and "2 rounds (0 skipped)" in str(report)
    assert "per round" in str(report) and "per step" not in str(report)


def test_the_start_has_an_account_of_its_own() -> None:
    nets, optimizers, outer = local_replicas("post_local_sgd(H=4, start=4)")
    train(nets, optimizers, outer, range(12))
    report = outer.ranks[0].report()
    assert report.start is not None and report.start.steps == report.start_steps == 4
    assert report.sent == report.start.sent + report.rounds.sent == outer.ranks[0].link.traffic.sent
    assert report.payload_ratio == pytest.approx(4.0)
    assert report.payload_ratio_all_in == pytest.approx(12 / (4 + 2))
    assert "the start" in str(report) and "in the start" not in str(report)


def test_a_report_says_where_in_the_start_it_is() -> None:
    nets, optimizers, outer = local_replicas("post_local_sgd(H=4, start=4)")
    train(nets, optimizers, outer, range(1))
    text = str(outer.ranks[0].report())
    assert "1 step of the start" in text and "in the start: 1 of 4 steps" in text
    assert "with the start payload 1.0x smaller" in text and "payload -" not in text and "inf" not in text


def test_a_report_after_a_resume_says_from_where_it_counts() -> None:
    nets, optimizers, outer = local_replicas("local_sgd(H=4)")
    train(nets, optimizers, outer, range(9))
    again, others, resumed = local_replicas("local_sgd(H=4)")
    for rank, one in zip(resumed.ranks, outer.ranks, strict=True):
        rank.load_state_dict(one.state_dict())
    train(again, others, resumed, range(9, 12))
    text = str(resumed.report())
    assert "4 local steps in 1 round" in text and "since step 9" in text and "the start" not in text


def test_a_codec_is_told_where_it_belongs() -> None:
    net = torch.nn.Linear(4, 4)
    adam = torch.optim.AdamW(net.parameters())
    with pytest.raises(ValueError, match=r"gradwire\.local takes .* use gradwire\.compress\(model, 'int4'\)") as wrong:
        gradwire.local(net, adam, "int4")
    assert wrong.value.__suppress_context__, "the error is printed once"
    assert any(frame.name == "rounds" for frame in wrong.traceback), "and where it arose"
    with pytest.raises(ValueError, match=r"local_lockstep takes .* use gradwire\.lockstep\(models, 'int4'\)"):
        gradwire.local_lockstep([net], [adam], "int4")


@pytest.mark.parametrize("spec", ["local_gossip(choco(ring), H=5)", "noloco(ring)"])
def test_a_gossip_method_is_told_where_it_belongs(spec: str) -> None:
    """It has local steps, too, so that their number is not what it lacks."""
    net = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"neighbors; use gradwire\.gossip\(model, '") as wrong:
        gradwire.local(net, fixtures.sgd(net), spec)
    assert repr(spec) in str(wrong.value) and "number of local steps" not in str(wrong.value)


def test_messages_of_a_chunk_have_the_size_that_their_card_says() -> None:
    """64 of 4,096: at most Rice's bits, a sign each, and a float32 scale."""
    nets = [torch.nn.Linear(256, 256, bias=False) for _ in range(2)]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in nets]
    outer = gradwire.local_lockstep(nets, optimizers, "sparseloco(H=5)")
    for step in range(5):
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            optimizer.zero_grad()
            net(fixtures.batch(rank, step, width=256)).square().mean().backward()
            optimizer.step()
        outer()
    assert outer.ranks[0].report().payload_ratio > 5 * 190


# -- ranks of unlike speed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("diloco(H=4, delay=2)", "delay=2"),
        ("streaming_diloco(H=4, fragments=2, delay=0)", "fragments=2"),
        ("local_schedule({0: diloco(H=2), 4: diloco(H=4)})", "is a local_schedule"),
    ],
)
def test_uneven_rounds_have_no_delay_and_no_fragments(spec: str, named: str) -> None:
    net = fixtures.model()
    with pytest.raises(ValueError, match=named):
        gradwire.local(net, fixtures.sgd(net), spec, uneven=True)


def test_uneven_rounds_take_no_delay_later() -> None:
    net = fixtures.model()
    outer = gradwire.local(net, fixtures.sgd(net), "diloco(H=4)", uneven=True)
    with pytest.raises(ValueError, match="delay=1"):
        outer.set("diloco(H=4, delay=1)")
    outer.set("diloco(H=3)")
    assert outer.uneven_steps is not None and outer.uneven_steps.own == 3 and "uneven" in outer.wire.setup.note


# -- rounds that are measured ------------------------------------------------------------------------------------------


def test_the_first_rounds_tell_how_long_others_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes a second, and a message 0.55: six steps share it."""
    clock = [0.0]
    monkeypatch.setattr(round_length.time, "perf_counter", lambda: clock[0])
    net, again = fixtures.model(), fixtures.model()
    optimizer = fixtures.sgd(net)
    outer = gradwire.local(net, optimizer, "local_sgd(H=2)", auto=True)
    send = outer.fragments[0].wire.sync

    def slow(differences: Any) -> Any:
        clock[0] += 0.55
        return send(differences)

    outer.fragments[0].wire.sync = slow
    inside = []
    for step in range(12):
        clock[0] += 5.0 if step < 2 else 1.0  # kernels compile at first
        fixtures.loss(net, 0, step).backward()
        optimizer.step()
        outer()
        inside.append(outer.inside)
    assert inside == [1, 0, 1, 0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert outer.method.H == 6 and "2 of 6" in str(outer)
    resumed = gradwire.local(again, fixtures.sgd(again), "local_sgd(H=2)", auto=True)
    resumed.load_state_dict(outer.state_dict())
    for handle in (outer, resumed):
        assert handle.method.H == 6 and handle.inside == 2
        handle.set("int8")
        assert handle.method.H == 6 and handle.inside == 2, "another codec keeps the rounds"
    outer.set("local_sgd(H=4)")
    resumed.set("local_sgd(H=2)")
    resumed.load_state_dict(outer.state_dict())
    assert resumed.method.H == 4, "H was set after it was measured"


@pytest.mark.parametrize(("message", "fits", "chosen"), [(0.5, 25, 25), (20.0, 1000, 30)])
def test_the_slowest_rank_tells_what_computing_takes_and_the_last_one_what_a_message_takes(
    message: float, fits: int, chosen: int, caplog: pytest.LogCaptureFixture
) -> None:
    """No longer round is taken than one whose loss was measured."""
    rounds = round_length.MeasuredRounds()
    run(rounds.agree(torch.device("cpu"), 5), lambda _: pytest.fail("one round is not enough"))
    pairs = [[0.1, 3.0 + message], [0.2, message], [0.05, 4.0 + message]]
    payloads = [Payload(as_bytes(torch.tensor(pair, dtype=torch.float64))) for pair in pairs]
    with caplog.at_level(logging.INFO, "gradwire"):
        run(rounds.agree(torch.device("cpu"), 5), lambda _: [payloads])
    assert rounds.chosen == chosen and f"takes H={chosen}; " in caplog.text and f"from H={fits} on" in caplog.text


@pytest.mark.parametrize("options", [{"uneven": True}, {"spec": "diloco(H=4, delay=1)"}])
def test_only_plain_rounds_are_measured(options: dict[str, Any]) -> None:
    net = fixtures.model()
    with pytest.raises(ValueError, match="auto=True"):
        gradwire.local(net, fixtures.sgd(net), **{"spec": "diloco(H=4)", "auto": True, **options})


# -- other specs, other worlds -----------------------------------------------------------------------------------------


def test_set_takes_other_rounds_and_keeps_what_is_owed() -> None:
    nets, optimizers, outer = local_replicas(SPARSE)
    train(nets, optimizers, outer, range(4))
    before = owed(outer)
    for rank in outer.ranks:
        rank.set("diloco(H=3, rate=0.5)", feedback="residual")
    after = owed(outer)
    assert all(torch.allclose(before[name], after[name], atol=1e-7) for name in before)
    assert outer.ranks[0].method.H == 3
    assert outer.ranks[0].optimizer.param_groups[0]["lr"] == 0.5
    train(nets, optimizers, outer, range(4, 7))
    assert outer.ranks[0].inside == 0
    assert all(float(x.abs().max()) < 1e-6 for x in owed(outer).values())


def test_set_applies_a_message_that_is_under_way() -> None:
    nets, optimizers, outer = local_replicas("diloco(H=4, delay=3)")
    train(nets, optimizers, outer, range(5))
    before = outer.ranks[0].outer.weights["0.weight"].detach().clone()
    for rank in outer.ranks:
        rank.set("local_sgd(H=1)")
        assert rank.fragments[0].pending_result is None
    assert not torch.equal(outer.ranks[0].outer.weights["0.weight"], before)
    train(nets, optimizers, outer, range(5, 6))
    assert fixtures.same(fixtures.tensors(nets[0]), fixtures.tensors(nets[1]))


def test_a_codec_alone_keeps_the_rounds() -> None:
    nets, optimizers, outer = local_replicas("diloco(H=3)")
    for rank in outer.ranks:
        rank.set("int8")
    assert outer.ranks[0].method.H == 3 and "int8" in outer.ranks[0].wire.spec
    train(nets, optimizers, outer, range(3))


def test_a_codec_alone_keeps_the_feedback_and_the_mean_over_senders() -> None:
    sparse = local_method("sparseloco(H=5)", "chunk_topk(32) | int4").message
    assert str(sparse.feedback) == "residual(decay=0.95)" and str(sparse.exchange) == "allgather(mean='senders')"
    whole = local_method("sparseloco(H=5)", "int4").message  # all ranks send all entries
    assert str(whole.feedback) == "residual(decay=0.95)" and str(whole.exchange) == "auto"
    given = local_method("sparseloco(H=5)", "topk(0.1)", "ef21", "allgather").message
    assert (str(given.feedback), str(given.exchange)) == ("ef21", "allgather")
    assert str(local_method("diloco(H=5)", "int4").message.feedback) == "residual"
    _, _, outer = local_replicas(SPARSE)
    for stops in (False, True):
        for rank in outer.ranks:
            if stops:
                rank.off()
            rank.set("topk(0.1)")
        message = outer.ranks[0].method.message
        assert str(message.feedback) == "residual(decay=0.95)" and str(message.exchange) == "allgather(mean='senders')"


@pytest.mark.parametrize(
    ("later", "named"),
    [
        ("diloco(H=4)", "H=4, rate=0.7, momentum=0.9, nesterov=1, and these have H=3,"),
        ("diloco(H=3, momentum=0.5)", "momentum=0.5"),
        ("local_schedule({0: diloco(H=3), 6: diloco(H=5)})", "H=5, rate=0.7, momentum=0.9, nesterov=1 from step 6"),
    ],
)
def test_a_state_of_other_rounds_is_refused(later: str, named: str) -> None:
    """The rate of one and the momentum of another would continue."""
    nets, optimizers, outer = local_replicas("diloco(H=3)")
    _, _, again = local_replicas("diloco(H=3)")
    for rank in outer.ranks:
        rank.set(later)
    train(nets, optimizers, outer, range(2))
    state = outer.ranks[0].state_dict()
    with pytest.raises(ValueError, match=named):
        again.ranks[0].load_state_dict(state)
    again.ranks[0].set(later)
    again.ranks[0].load_state_dict(state)
    del state["local/method"]  # older states have none
    again.ranks[0].load_state_dict(state)


def test_a_wire_refuses_a_state_of_local_steps() -> None:
    """What is owed there are weights, and would be added to gradients."""
    net = fixtures.model()
    state = gradwire.local(net, fixtures.sgd(net), "diloco(H=2)", codec="int4").state_dict()
    wire = gradwire.compress(fixtures.model(), "int4", feedback="residual")
    with pytest.raises(ValueError, match="state of local steps"):
        wire.load_state_dict(state)


def test_a_model_of_64_bits_takes_its_first_step() -> None:
    net = torch.nn.Linear(4, 4, dtype=torch.float64)
    optimizer = fixtures.sgd(net)
    outer = gradwire.local(net, optimizer, "local_sgd(H=2)")
    for _ in range(2):
        net(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
        optimizer.step()
        outer()
    assert outer.inside == 0 and outer.rounds == 1


def test_off_sends_what_is_owed() -> None:
    nets, optimizers, outer = local_replicas(SPARSE)
    train(nets, optimizers, outer, range(4))
    for rank in outer.ranks:
        rank.off()
    train(nets, optimizers, outer, range(4, 6))
    assert all(float(x.abs().max()) < 1e-6 for x in owed(outer).values())


def test_four_workers_become_two_and_four_again() -> None:
    nets, optimizers, outer = local_replicas(SPARSE, 4)
    train(nets, optimizers, outer, range(6))
    for world in (2, 4):
        shared, before = fixtures.tensors(nets[0]), owed(outer)
        states = [rank.state_dict() for rank in outer.ranks]
        nets, optimizers, outer = local_replicas(SPARSE, world)
        for rank in outer.ranks:
            rank.load_state_dict(states)
        after = owed(outer)
        assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in before)
        assert all(fixtures.same(fixtures.tensors(net), shared) for net in nets)
        train(nets, optimizers, outer, range(6, 10))
        assert outer.ranks[0].inside == 0


def test_inside_a_round_another_world_starts_a_new_one_from_the_outer_weights() -> None:
    nets, optimizers, outer = local_replicas("diloco(H=4)", 2)
    train(nets, optimizers, outer, range(6))
    states, shared = [rank.state_dict() for rank in outer.ranks], outer.ranks[0].outer.weights
    nets, _, other = local_replicas("diloco(H=4)", 3)
    for rank in other.ranks:
        rank.load_state_dict(states)
    assert other.ranks[2].inside == 0 and other.ranks[2].steps == 6
    assert all(torch.equal(p, shared[name]) for name, p in nets[2].named_parameters())


def test_another_world_applies_a_message_that_was_under_way() -> None:
    nets, optimizers, outer = local_replicas("diloco(H=4, delay=2)", 2)
    train(nets, optimizers, outer, range(5))
    states = [rank.state_dict() for rank in outer.ranks]
    outer()  # the message is applied
    nets, _, other = local_replicas("diloco(H=4, delay=2)", 3)
    for rank in other.ranks:
        rank.load_state_dict(states)
    shared = outer.ranks[0].outer.weights
    assert other.ranks[2].inside == 0 and other.ranks[2].fragments[0].pending_result is None
    assert all(torch.equal(p, shared[name]) for name, p in nets[2].named_parameters())


class Fading(torch.optim.SGD):
    """Steps by the rate over how many it has taken, which it counts without a tensor."""

    extra: Any = None

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            held = self.state[p]
            held |= {
                "step": held.get("step", 0) + 1,
                "share": held.get("share", 1.0) / 3.0,
                "seen": True,
                "extra": self.extra,
            }
            p.data.add_(p.grad, alpha=-held["share"] / held["step"])


def test_numbers_of_an_outer_optimizer_are_saved_as_what_they_are(tmp_path: Path) -> None:
    """Some count steps by an int, and began again at each load."""
    through, resumed = (local_replicas("diloco(H=2)", 1, outer=Fading) for _ in range(2))
    train(*through, range(6))
    gradwire.save(through[2].ranks[0], tmp_path)
    gradwire.load(resumed[2].ranks[0], tmp_path)
    (held, *_), (again, *_) = (list(each[2].ranks[0].optimizer.state.values()) for each in (through, resumed))
    assert {key: x for key, x in held.items() if x is not None} == again
    assert [type(again[key]) for key in ("step", "share", "seen")] == [int, float, bool]
    for each in (through, resumed):
        train(*each, range(6, 12))
    assert fixtures.same(*(fixtures.tensors(nets[0]) for nets, _, _ in (through, resumed)))


def test_a_state_that_is_neither_a_tensor_nor_a_number_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fading, "extra", [1])
    nets, optimizers, outer = local_replicas("diloco(H=2)", 1, outer=Fading)
    train(nets, optimizers, outer, range(2))
    with pytest.raises(ValueError, match=r"Fading has 'extra' of '0\.weight' as a list"):
        outer.ranks[0].state_dict()


@pytest.mark.parametrize("state", [{}, {"gradwire/spec": torch.zeros(1)}])
def test_a_state_of_something_else_is_refused(state: dict[str, torch.Tensor]) -> None:
    _, _, outer = local_replicas("diloco(H=2)", 1)
    with pytest.raises(ValueError, match="local/steps"):
        outer.ranks[0].load_state_dict(state)


def test_a_state_of_another_model_is_refused() -> None:
    _, _, outer = local_replicas("diloco(H=2)", 1)
    net = torch.nn.Linear(3, 2)
    other = gradwire.local_lockstep([net], [fixtures.sgd(net)], "diloco(H=2)")
    with pytest.raises(ValueError, match="another model"):
        outer.ranks[0].load_state_dict(other.ranks[0].state_dict())


def test_printing_shows_the_round_and_the_plan() -> None:
    _, _, outer = local_replicas(SPARSE)
    text = str(outer.ranks[0])
    assert "H=2" in text and "0 of 2" in text and "chunk_topk(4, chunk=32)" in text


def test_kept_errors_are_refused_between_hosts_also_later() -> None:
    nets, optimizers, outer = local_fixtures.local_replicas(SPARSE, 4, across=[[0, 1], [2, 3]])
    local_fixtures.train(nets, optimizers, outer, range(2))
    with pytest.raises(ValueError, match="keep="):
        outer.ranks[0].set("sparseloco(H=2, k=4, chunk=32, keep=1.0)")
