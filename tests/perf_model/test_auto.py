"""``auto`` among real ranks: all decide alike, a choice that is not faster is taken back, and DDP is left alone."""

import json
import os
import time
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

import gradwire
from gradwire.comm.rates import LinkSpec
from gradwire_lab.autotune import tuner, wire_costs
from gradwire_lab.autotune.tuner import AutoTuner
from gradwire_lab.autotune.wire_costs import StepTimes, WireCosts
from gradwire_lab.cli.main import app
from gradwire_lab.perf_model.calibration import Calibration, CodingCost
from gradwire_lab.perf_model.cluster import Cluster
from gradwire_lab.perf_model.costs import Prediction
from gradwire_lab.perf_model.local_steps import LocalAdvice, to_take, trained
from gradwire_lab.perf_model.timeline import StepTime
from gradwire_lab.perf_model.training_time import STEPS as STEPS_OF_TRAININGS
from gradwire_lab.perf_model.training_time import Phase
from gradwire_lab.train.compression import arguments, corrects_momentum
from gradwire_lab.train.recipe_files import resolve
from spawn import RankError, run_ranks

STEPS = 30
FORMATS = {"fp32": "float32", "bf16": "bfloat16"}
THIN = "10mbit,1ms"


def net(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))


def train(model: nn.Module, wire: gradwire.Wire, steps: int, seed: int, plain: bool) -> None:
    draw = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    width = next(model.parameters()).shape[1]
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, width, generator=draw)).square().mean().backward()
        if plain:
            wire()
        optimizer.step()


def test_auto_weighs_what_was_trained_with_the_optimizer() -> None:
    model = nn.Linear(8, 8, bias=False)
    wire = gradwire.compress(model, "dense")
    costs = WireCosts(wire, overlaps=True, ddp_reduces=False, link=None)
    assert "topk(0.01) | sign" in costs.specs
    for make, fitting in ((torch.optim.AdamW, {"int8", "int4"}), (torch.optim.Muon, {"int8"})):
        model(torch.ones(1, 8)).sum().backward()
        wire()
        make(model.parameters()).step()
        assert {*costs.specs} == fitting and costs.optimizer == make.__name__
    assert wire.adaptive == {"AdamW", "Muon"}
    assert costs.evidence("int8") == "accuracy by trainings of transformer models with Muon"


def test_auto_weighs_what_was_trained_with_the_kind_of_model() -> None:
    made = {"topk(0.01) | sign": nn.Conv2d(3, 8, 3), "topk(0.001) | fp16": nn.LSTM(8, 8)}
    for spec, model in made.items():
        costs = WireCosts(gradwire.compress(model, "dense"), overlaps=True, ddp_reduces=False, link=None)
        assert {*costs.specs} & {*made} == {spec}


def tuner_of(wire: gradwire.Wire) -> AutoTuner:
    assert isinstance(wire.tuner, AutoTuner)
    return wire.tuner


def outcome(wire: gradwire.Wire, model: nn.Module) -> dict[str, Any]:
    hook = tuner_of(wire)._hook
    return {
        "specs": [decision.spec for decision in wire.decisions],
        "decided": tuner_of(wire).decided,
        "hooked": hook is not None,
        "plain": None if hook is None else str(hook.dense_dtype),
        "weights": [p.detach().clone() for p in model.parameters()],
        "text": str(wire),
        "note": wire.report().note,
    }


def over_a_thin_link(rank: int, world: int, plain: bool) -> dict[str, Any]:
    os.environ["GRADWIRE_LINK"] = THIN
    inner = net(200)
    model = inner if plain else DistributedDataParallel(inner)
    wire = gradwire.compress(model, "auto", link=THIN)
    train(model, wire, STEPS, rank, plain)
    return {**outcome(wire, inner), "resumed": resumed(wire.state_dict(), plain)}


def resumed(state: dict[str, Any], plain: bool) -> dict[str, Any]:
    """Another training, which goes on from what was saved."""
    inner = net(200)
    model = inner if plain else DistributedDataParallel(inner)
    wire = gradwire.compress(model, "auto")
    wire.load_state_dict(state)
    train(model, wire, 1, 0, plain)
    same = all(torch.equal(x, wire.state_dict()[name]) for name, x in state.items() if name == "gradwire/spec")
    return {**outcome(wire, inner), "same": same, "step": wire.engine.unwrapped.step}


def between_thin_hosts(rank: int, world: int) -> dict[str, Any]:
    """The link is not described; dense steps must show it, though it is thin between hosts alone."""
    os.environ["GRADWIRE_LINK"] = THIN
    model = DistributedDataParallel(net(200))
    wire = gradwire.compress(model, "auto", across=[[0], [1]])
    train(model, wire, 1, rank, plain=False)
    began = time.monotonic()
    train(model, wire, 1, rank, plain=False)
    took = time.monotonic() - began
    costs = tuner_of(wire)._costs()
    due = costs.dense_seconds(LinkSpec.parse(THIN))
    cluster = costs.cluster(StepTimes(1.0, 0.5, due, due))
    return {"took": took, "due": due, "cluster": cluster}


@pytest.mark.parametrize(("seconds", "said"), [(1.0, True), (0.45, False), (0.25, False)])
def test_a_step_that_still_waits_for_the_link_is_told_to_take_local_steps(seconds: float, said: bool) -> None:
    record = next(one for one in trained("AdamW") if "H=5" in one.spec)
    rounds = LocalAdvice(record.spec, (Phase(225, None, 0.8, 1e3), Phase(1275, 5, 0.22, 100.0)), record)
    decided: Any = SimpleNamespace(decided=True, _rounds=(rounds,), _seconds=seconds, _compute=0.2)
    text = AutoTuner._local_steps(decided)
    assert ("5 times its computing" in text and "H = 5" in text and "2 % more loss, by trainings of" in text) is said
    assert (rounds.call in text and "1,500 steps are 3.3 times faster" in text) is said


def test_the_coding_of_local_steps_is_measured_before_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round may save all bytes of a small model, and still cost more than they do."""
    wire = gradwire.compress(net(64), "dense")
    costs = WireCosts(wire, overlaps=False, ddp_reduces=False, link=None)
    monkeypatch.setattr(WireCosts, "optimizer", "AdamW")
    dense, thin = StepTimes(0.3, 0.1, 0.2, 0.2), Cluster(2, LinkSpec.parse("1mbit"))
    free = costs.free_coding(dense)
    for seconds, found in ((1e-3, True), (20.0, False)):
        monkeypatch.setattr(wire_costs, "time_coding", lambda *_, seconds=seconds, **__: CodingCost(seconds, seconds))
        taken = to_take(costs.local_choices(free, thin, dense.period), STEPS_OF_TRAININGS * dense.period)
        assert (taken is not None) is found
    assert costs.local_choices(free, thin, 0.12) == (), "nothing is measured where nothing is to be gained"


def test_a_thin_link_between_hosts_is_emulated_and_measured() -> None:
    one, two = run_ranks(between_thin_hosts, 2)
    # 81,204 float32, of which each rank sends as many as there are, at 10 mbit: 0.26 s, and there are headers.
    assert 0.26 < one["due"] < one["took"] and one["due"] < 0.35
    assert one["cluster"] == two["cluster"] and 9e6 < one["cluster"].link.rate_bits < 12e6


def on_hosts_that_differ(rank: int, world: int) -> tuple[list[float], str]:
    """Ranks that reckon with processors of their own would choose different specs, and refuse each other's."""
    wire_costs.cores_per_thread = lambda device, ranks: (8.0, 0.5)[rank]
    wire = gradwire.compress(net(8), "auto", link="10mbit")
    shared = tuner_of(wire)._costs().free_coding(StepTimes(1.0, 0.5, 0.1, 0.1))
    cores = [shared.cores, wire_costs.cores_per_thread(torch.device("cpu"), 1)]
    with pytest.raises(ValueError, match="another spec") as refused:
        gradwire.compress(net(8), "auto", link=("10mbit", "1gbit")[rank])
    return cores, str(refused.value)


def test_hosts_that_differ_decide_alike() -> None:
    one, two = run_ranks(on_hosts_that_differ, 2)
    assert one[0] == [0.5, 8.0] and two[0] == [0.5, 0.5]
    assert one[1] == two[1] and "1gbit" in one[1], "nor may their links be described differently"


@pytest.mark.parametrize("plain", [False, True])
def test_on_a_thin_link_it_compresses_and_ranks_stay_alike(plain: bool) -> None:
    one, two = run_ranks(over_a_thin_link, 2, plain)
    assert one["decided"] and one["specs"] == two["specs"]
    assert one["specs"][-1] in tuner.automatic() and one["specs"][-1] != "fp32", one["text"]
    assert "on trial" in one["text"]
    again = one["resumed"]
    assert again["decided"] and again["specs"][-1] == one["specs"][-1] and again["same"] and again["step"] > 1
    assert all(map(torch.equal, one["weights"], two["weights"]))


def by_an_optimizer(rank: int, world: int) -> dict[str, Any]:
    os.environ["GRADWIRE_LINK"] = THIN
    model = net(200)
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = gradwire.DistributedOptimizer(inner, model.named_parameters(), "auto", link=THIN)
    draw = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 200, generator=draw)).square().mean().backward()
        optimizer.step()
    return outcome(optimizer.wire, model)


def test_a_wrapped_optimizer_decides_too() -> None:
    one, two = run_ranks(by_an_optimizer, 2)
    assert one["decided"] and one["specs"] == two["specs"]
    assert one["specs"][-1] in tuner.automatic(), one["text"]
    assert all(map(torch.equal, one["weights"], two["weights"]))


def on_loopback(rank: int, world: int, plain: bool) -> dict[str, Any]:
    inner = net(24)
    model = inner if plain else DistributedDataParallel(inner)
    wire = gradwire.compress(model, "auto", link="100gbit")
    train(model, wire, 20, rank, plain)
    return outcome(wire, inner)


@pytest.mark.parametrize("plain", [False, True])
def test_on_a_fast_link_it_leaves_ddp_alone(plain: bool) -> None:
    one, two = run_ranks(on_loopback, 2, plain)
    assert one["decided"] and one["specs"] == two["specs"], one["text"]
    assert set(one["specs"]) <= {"fp32", "bf16"}, "nothing is worth compressing here"
    assert one["hooked"] is (not plain and one["specs"] != ["fp32"])
    assert ("DDP" in one["note"]) is ("not counted" in one["note"]) is (not plain), "what is left out is said"
    assert plain or FORMATS[one["specs"][-1]] in one["note"]
    assert one["note"] in one["text"]
    assert all(map(torch.equal, one["weights"], two["weights"]))


def slower_than_expected(rank: int, world: int) -> dict[str, Any]:
    """As if forecasts had been wrong: what is chosen turns out slower than dense, by the clock of this test."""

    def best(self: WireCosts, calibration: Calibration, cluster: Cluster) -> Prediction:
        return Prediction("topk(0.1)", StepTime(0.0, 0.0, 0.0, 0.0, step=0.0), 0.0, 0, 0)

    WireCosts.promising = lambda *_: ["topk(0.1)"]
    WireCosts.best = best
    inner = net(24)
    model = DistributedDataParallel(inner)
    wire = gradwire.compress(model, "auto", link="100gbit")
    periods, slowest = chain([0.01], repeat(0.02)), tuner.slowest
    tuner.slowest = lambda link, medians: [next(periods), *slowest(link, medians)[1:]]
    train(model, wire, STEPS, rank, plain=False)
    owed = max(float(debt.abs().max()) for debt in wire.debts().values())
    return {**outcome(wire, inner), "owed": owed}


def test_a_choice_that_is_not_faster_is_taken_back_and_all_errors_are_sent() -> None:
    one, two = run_ranks(slower_than_expected, 2)
    assert one["specs"] == two["specs"] and one["specs"][:2] == ["topk(0.1)", "fp32"], one["text"]
    assert one["specs"][-1] in ("fp32", "bf16") and one["plain"] in ("torch.float32", "torch.bfloat16")
    assert "back to dense" in one["text"]
    assert one["owed"] == two["owed"] == 0.0
    assert all(map(torch.equal, one["weights"], two["weights"]))


def in_halves(rank: int, world: int) -> dict[str, Any]:
    inner = net(24).to(torch.bfloat16)
    model = DistributedDataParallel(inner)
    wire = gradwire.compress(model, "auto")
    draw = torch.Generator().manual_seed(rank)
    WireCosts.promising = lambda *_: []
    for _ in range(12):
        model(torch.randn(8, 24, generator=draw).to(torch.bfloat16)).square().mean().backward()
    found = outcome(wire, inner)
    tuner_of(wire)._try("topk(0.1)", "as if there had been a trial")
    tuner_of(wire)._conclude("fp32", "which failed")
    return {**found, "plain": outcome(wire, inner)["plain"]}


def test_gradients_of_two_bytes_are_neither_halved_nor_doubled() -> None:
    one, two = run_ranks(in_halves, 2)
    assert one["specs"] == two["specs"] == ["fp32"] and one["decided"], one["text"]
    assert one["plain"] == "torch.bfloat16", "dense means as DDP would do it"


def misspelled(rank: int, world: int) -> None:
    gradwire.compress(net(8), "auto", link="100 parsec" if rank else "100mbit")


def test_a_bad_argument_on_one_rank_is_an_error_on_all() -> None:
    with pytest.raises(RankError, match="parsec"):
        run_ranks(misspelled, 2)


def test_arguments_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"link='100mbit'.*'auto'"):
        gradwire.compress(net(8), "sign", link="100mbit")
    with pytest.raises(ValueError, match="jitter"):
        gradwire.compress(net(8), "auto", link="100mbit,5ms,1ms")
    with pytest.raises(ValueError, match="feedback and exchange"):
        gradwire.compress(net(8), "auto", exchange="allgather")


def test_a_recipe_may_say_auto(tmp_path: Path) -> None:
    recipe = resolve(["digits"], ["sync.spec=auto"])
    assert arguments(recipe, 0)["spec"] == "auto" and not corrects_momentum(recipe)
    with pytest.raises(ValueError, match=r"sync\.feedback"):
        resolve(["digits"], ["sync.spec=auto", "sync.feedback=residual"])
    plan = CliRunner().invoke(app, ["plan", "digits", "--spec", "auto"], env={"COLUMNS": "200"})
    assert plan.exit_code == 0 and "auto" in plan.output
    words = ["train", "digits", "--spec", "auto", "--in-process", "2", "--runs", str(tmp_path)]
    refused = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert refused.exit_code != 0 and "'auto'" in refused.output and "--workers" in refused.output


def test_decisions_are_logged_and_shown(tmp_path: Path) -> None:
    few = [word for one in ("train.iterations=10", "model.options={width=4}") for word in ("--set", one)]
    words = ["train", "digits", "--spec", "auto", "--workers", "2", *few, "--runs", str(tmp_path)]
    done = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    records = [json.loads(line) for line in next(tmp_path.rglob("run.jsonl")).read_text().splitlines()]
    first = next(record for record in records if record["event"] == "decision")
    assert first["step"] == tuner.WARMUP + tuner.MEASURED + 1 and first["why"]
    assert f"auto, step {first['step']}: {first['spec']}, {first['why']}"[:60] in done.stdout


def test_a_world_of_one_is_decided_at_once() -> None:
    model = net(8)
    wire = gradwire.compress(model, "auto")
    train(model, wire, 3, 0, plain=True)
    assert tuner_of(wire).decided and [decision.spec for decision in wire.decisions] == ["fp32"]
    assert "no other rank" in str(wire)
