"""The adviser as people meet it: a table, a verdict, JSON, and sentences for what cannot be."""

import json
import runpy
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

import gradwire
from fixtures import free_port
from gradwire_lab.bench.network import calibrate, calibration_cache, devices, workloads
from gradwire_lab.cli import output
from gradwire_lab.cli.advise import recipe_workload
from gradwire_lab.cli.main import app
from gradwire_lab.perf_model.accuracy_records import (
    AccuracyRecord,
    accuracy_records,
    free_of_losses,
    records_of,
)
from gradwire_lab.perf_model.calibration import Calibration, CodingCost, save
from gradwire_lab.perf_model.candidates import PRESETS
from gradwire_lab.perf_model.model import ModelProfile
from gradwire_lab.perf_model.timing import Stopwatch
from gradwire_lab.train.recipe_files import resolve
from spawn import run_ranks

FIGURES = Calibration(
    ModelProfile({"embed": (10_000, 650), "bias": (2600,), "head": (10_000, 650)}),
    0.1,
    0.2,
    {
        "ddp-fp32": CodingCost(0.0, 0.0),
        "ddp-bf16": CodingCost(0.004, 0.004),
        "topk(0.001) | sign": CodingCost(0.02, 0.01),
        "powersgd(2)": CodingCost(0.02, 0.03),
        "int4": CodingCost(0.03, 0.03),
    },
    world=4,
    note="by hand",
)


def told(*options: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["advise", *options])
    return done.exit_code, done.output


@pytest.fixture
def figures(tmp_path: Path) -> str:
    save(FIGURES, tmp_path / "figures.json")
    return str(tmp_path / "figures.json")


def test_it_says_what_to_take(figures: str) -> None:
    code, said = told("--workers", "4", "--link", "100mbit,5ms", "--calibration", figures)
    assert code == 0
    assert "\nTake powersgd(2):" in said and "times faster than bf16 DDP" in said
    assert 'gradwire.compress(model, "powersgd(2)"' in said and "pays on links below" in said
    assert "by hand" in said


def test_what_lost_accuracy_is_shown_but_not_taken(figures: str) -> None:
    place = ("--workers", "4", "--link", "100mbit,5ms", "--calibration", figures, "--json")
    free, asked = (json.loads(told(*place, *more)[1]) for more in ((), ("--specs", "topk(0.001) | sign")))
    assert free["ways"][0]["spec"] == "topk(0.001) | sign" != free["choice"]
    assert asked["choice"] == "topk(0.001) | sign"
    assert records_of("topk(0.001) | sign")[0].gain < -0.01


@pytest.mark.parametrize(("optimizer", "choice"), [("sgd", "powersgd(2)"), ("adamw", "int4"), ("RMSprop", "int4")])
def test_what_starves_the_optimizer_is_shown_but_not_taken(figures: str, optimizer: str, choice: str) -> None:
    place = ("--workers", "4", "--link", "10mbit,5ms", "--calibration", figures, "--json")
    found = json.loads(told(*place, "--optimizer", optimizer)[1])
    assert found["choice"] == choice and "powersgd(2)" in [way["spec"] for way in found["ways"]]


def test_figures_are_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: list[int] = []
    before = [0]

    def measure(job: object, beside: int) -> Calibration:
        asked.append(beside)
        return FIGURES

    monkeypatch.setattr(calibrate, "calibrate", measure)
    monkeypatch.setattr(calibration_cache, "disturbance", lambda: "disturbed, so not kept")
    said = told("digits", "--workers", "4", "--link", "100mbit")[1]
    assert "disturbed, so not kept" in " ".join(said.split())
    asked.clear()
    monkeypatch.setattr(calibration_cache, "disturbance", str)
    for words, times in (((), 1), ((), 1), (("--link", "1gbit"), 1), (("--sharing", "2"), 2), (("--fresh",), 3)):
        code, said = told("digits", "--workers", "4", "--link", "100mbit", *words)
        assert code == 0 and len(asked) == times, said
        assert ("--fresh measures again" in said) == (asked == before), "what is old is told as old"
        before = list(asked)


def test_a_narrow_terminal_has_a_line_or_two_for_each_spec(figures: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "Console", lambda **_: Console(width=80))
    lines = told("--workers", "4", "--link", "100mbit,5ms", "--calibration", figures)[1].splitlines()
    first = next(i for i, line in enumerate(lines) if "─" in line) + 1
    last = next(i for i, line in enumerate(lines) if line.startswith("by hand"))
    assert last - first <= 2 * 5 and max(map(len, lines[:last])) <= 80
    assert any(line.split()[0] == "int4" and line.rstrip().endswith("lost < 1 %") for line in lines[first:last])
    assert any(line.rstrip().endswith("no: lost > 1 %") for line in lines[first:last])


def test_what_is_asked_for_by_name_is_told_as_it_is(figures: str) -> None:
    where = ("--workers", "4", "--link", "100mbit,5ms", "--calibration", figures)
    assert "no: lost > 1 %" in told(*where)[1]
    named = told(*where, "--specs", "topk(0.001) | sign")[1]
    assert "it lost more than 1 %:\n- test accuracy -2.6 points" in named and "no: lost" not in named


def test_presets_that_nobody_has_trained_with_are_shown_but_not_taken(tmp_path: Path) -> None:
    costs = {"ddp-fp32": CodingCost(0.0, 0.0), **{spec: CodingCost(0.01, 0.01) for spec in ("int8", *PRESETS)}}
    save(replace(FIGURES, costs=costs), tmp_path / "figures.json")
    where = ("--workers", "4", "--link", "10mbit", "--calibration", str(tmp_path / "figures.json"))
    found = json.loads(told(*where, "--json")[1])
    assert {way["spec"] for way in found["ways"]} == set(costs) and found["choice"] == "int8"
    assert found["ways"][0]["spec"] == "terngrad" and "no: never trained" in told(*where)[1]
    assert json.loads(told(*where, "--json", "--specs", "terngrad")[1])["choice"] == "terngrad"


WRITTEN = {
    "int4; exchange=two_way; bundle=none": '"int4", exchange="two_way", bundle=None',
    "onebit_adam": '"onebit_adam", optimizer=optimizer',
    "zero_one_adam": '"zero_one_adam", optimizer=optimizer',
}


@pytest.mark.parametrize("spec", WRITTEN)
def test_what_to_write_is_what_compress_takes(spec: str, tmp_path: Path) -> None:
    save(
        replace(FIGURES, costs={"ddp-fp32": CodingCost(0.0, 0.0), spec: CodingCost(0.01, 0.01)}),
        tmp_path / "figures.json",
    )
    said = told("--link", "100mbit", "--calibration", str(tmp_path / "figures.json"), "--specs", spec)[1]
    written = [line for line in said.splitlines() if line.startswith(("wire = ", "optimizer = "))]
    assert written[-1] == f"wire = gradwire.compress(model, {WRITTEN[spec]})"
    names = {"gradwire": gradwire, "model": nn.Linear(2, 2)}
    exec("\n".join(written), names)
    assert isinstance(names["wire"], gradwire.Wire)
    assert isinstance(names.get("optimizer"), gradwire.AdamW) is spec.endswith("adam"), "to step with"
    rule = "longer of the learning rate's warm-up and 15 % of the training, but no fewer than 100 steps"
    assert (rule in " ".join(said.split())) is ("start=256 never trained" in said) is spec.endswith("adam")


def test_evidence_of_a_start_is_of_trainings_of_one_length(tmp_path: Path) -> None:
    """Of a training of 100,000 steps, 450 are too few, and the step is not that of the start."""
    spec = "onebit_adam(start=450)"
    costs = {"ddp-fp32": CodingCost(0.0, 0.0), spec: CodingCost(0.01, 0.01)}
    save(replace(FIGURES, costs=costs), tmp_path / "figures.json")
    where = ("--link", "100mbit", "--calibration", str(tmp_path / "figures.json"), "--optimizer", "adamw")
    text = " ".join(told(*where, "--specs", spec)[1].split())
    assert "ms a step after its start, " in text and "15,000 of 100,000" in text
    assert "it had, in 1,500 steps with this start: - test loss" in text


def test_gradients_of_two_bytes(figures: str) -> None:
    where = ("--workers", "4", "--link", "100mbit", "--calibration", figures, "--json")
    whole, half = (json.loads(told(*where, *more)[1]) for more in ((), ("--dtype", "bfloat16")))
    assert (whole["dtype"], half["dtype"]) == ("float32", "bfloat16")
    dense = [{way["spec"]: way for way in one["ways"]} for one in (whole, half)]
    assert "ddp-fp32" not in dense[1] and dense[1]["ddp-bf16"]["sent"] == dense[0]["ddp-bf16"]["sent"]


def test_started_by_torchrun_it_counts_the_ranks(figures: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def among(rank: int, world: int, beside: int) -> tuple[str, ...]:
        ranks = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": beside}
        for name, value in {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29999}.items():
            monkeypatch.setenv(name, str(value))
        return "--link", "1gbit", "--calibration", figures, "--json"

    found = json.loads(told(*among(0, 16, 8))[1])
    assert (found["workers"], found["per_host"]) == (16, 8)
    found = json.loads(told(*among(0, 8, 8))[1])
    assert (found["workers"], found["per_host"]) == (8, 1), "on one host, all exchange with all"
    assert told(*among(1, 16, 8)) == (0, ""), "rank 0 speaks for all"
    code, said = told(*among(0, 16, 8), "--workers", "4")
    assert code == 2 and "there are 16 ranks" in said and "makes 4" in said


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_never_come_are_told_in_a_sentence(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**ranks, "MASTER_PORT": free_port(), "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, str(value))
    began = time.monotonic()
    code, said = told("--probe-timeout", "0.5")
    assert code == 2 and "link probe" in said and "within 0.5 s" in said
    assert time.monotonic() - began < 10, "it waits that long unless it is told otherwise"


def test_the_old_name_of_the_probe_timeout_works(figures: str) -> None:
    with pytest.warns(FutureWarning, match="--probe-timeout"):
        code, said = told("--link", "1gbit", "--calibration", figures, "--patience", "-3")
    assert code == 2 and "-3 s" in said


def test_it_says_when_not_to(figures: str) -> None:
    code, said = told("--workers", "4", "--link", "100gbit", "--calibration", figures)
    assert code == 0 and "Stay with fp32 DDP" in said and "pays on links below" in said


def test_hosts_are_compressed_between(figures: str) -> None:
    code, said = told("--hosts", "4", "--per-host", "8", "--link", "1gbit", "--calibration", figures)
    assert code == 0 and "32 workers on 4 hosts" in said and 'across="hosts"' in said


def test_the_same_as_json(figures: str) -> None:
    code, said = told("--workers", "4", "--link", "100mbit,5ms", "--calibration", figures, "--json")
    found = json.loads(said)
    assert code == 0 and found["choice"] == "powersgd(2)" and found["compresses"] and found["speedup"] > 5
    assert {way["spec"] for way in found["ways"]} == set(FIGURES.costs)
    for way in found["ways"]:
        parts = way["compute"] + way["encode"] + way["wire"] + way["decode"] - way["hidden"]
        assert way["seconds"] == pytest.approx(parts)
    assert found["break_even"]["spec"] == "powersgd(2)" and 1e8 < found["break_even"]["bits_per_second"] < 1e12


def test_refusals_are_sentences(figures: str) -> None:
    for options, words in (
        (["--link", "100mbit", "--hosts", "3", "--workers", "4"], "3 hosts of 1 are not 4 workers"),
        (["--link", "0mbit"], "impossible"),
        (["--link", "1gbit", "--probe-timeout", "nan"], "a probe cannot wait nan s"),
        (["--link", "1gbit", "--hosts", "1"], "a single worker"),
        (["--link", "1gbit", "--dtype", "float99"], "gradients in float99"),
        (["--probe-timeout", "-3"], "a probe cannot wait -3 s"),
        (["--link", "fast"], "cannot read 'fast'"),
        ([], "the link between the workers"),
        (["--link", "1gbit", "--specs", "sing"], "did you mean"),
        (["--link", "1gbit", "--model", "nothing"], "there is no workload 'nothing'"),
        (["nothing", "--link", "1gbit"], "no recipe called 'nothing'"),
        (["digits", "--model", "lstm", "--link", "1gbit"], "lstm brings its own batches"),
        (["--link", "1gbit", "--calibration", figures + "x"], "there is no calibration"),
        (["--link", "1gbit", "--calibration", figures, "--specs", "int8"], "'int8' was not calibrated; measured are"),
        (["--link", "1gbit", "--calibration", figures, "--specs", "int4; int8"], "'int8' was not calibrated"),
        (["--link", "1gbit", "--specs", "int4; colour=red"], "cannot read the option 'colour=red'"),
        (["--link", "1gbit", "--device", "tpu"], "nothing is measured on 'tpu'; give --device cpu, cuda, or cuda:1"),
        (["--link", "1gbit,20ms,5ms", "--calibration", figures], "has jitter or loss too"),
        (["--link", "1gbit", "--calibration", figures, "--dtype", "int8"], "gradients in int8"),
    ):
        code, said = told(*options)
        assert code == 2 and words in said, said


def test_a_changed_file_is_another_workload(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def make():\n    return 1\n")
    first = workloads.source(f"{mine}:make")
    mine.write_text("def make():\n    return 2\n")
    assert first != workloads.source(f"{mine}:make") and workloads.source("lstm") == ""


def test_what_is_nowhere_is_not_measured() -> None:
    with torch.device("meta"):
        elsewhere = workloads.Workload(nn.Linear(2, 2), lambda run: torch.zeros(()))
    with pytest.raises(ValueError, match="is on meta; only a model that is on processors, or on one GPU, is measured"):
        devices.check(elsewhere)
    torn = workloads.Workload(nn.Sequential(nn.Linear(2, 2), elsewhere.model), elsewhere.loss)
    with pytest.raises(ValueError, match=r"0.bias is on cpu; only a model that is on processors, or on one GPU"):
        devices.check(torn)


@pytest.mark.parametrize("name", ["lstm", "resnet20", "gpt", "digits", "ptb-lstm700"])
def test_a_workload_is_made_on_the_device_that_is_told(name: str) -> None:
    """Batches and states too: on a device without memory, a step goes through if all of it is there."""
    make = partial(workloads.load, name)
    if name not in workloads.WORKLOADS:
        make = partial(recipe_workload, resolve([name], ["train.batch=4", "train.batch_per=worker"]), 2)
    made = devices.placed(make, torch.device("meta"), "bfloat16")
    loss = made.loss(made.model)
    loss.backward()
    assert (loss.device.type, loss.dtype) == ("meta", torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in made.model.parameters()} == {("meta", torch.bfloat16)}
    assert torch.get_default_dtype() == torch.float32 and torch.zeros(1).device.type == "cpu"


def test_a_model_that_was_made_elsewhere_is_moved() -> None:
    made = devices.placed(lambda: workloads.Workload(nn.Linear(2, 2, device="cpu"), abs), torch.device("meta"))
    assert {p.device.type for p in made.model.parameters()} == {"meta"}


class Event:
    """A GPU's event, on a GPU whose queue takes 8 ms from each to the next, of which its host knows nothing."""

    queue: ClassVar[list["Event"]] = []
    passed: ClassVar[int] = 0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        self.queue.append(self)

    def synchronize(self) -> None:
        Event.passed = max(self.passed, self.queue.index(self) + 1)

    def elapsed_time(self, other: "Event") -> float:
        first, last = self.queue.index(self), self.queue.index(other)
        assert last < self.passed, "asked before the device was there"
        return 8.0 * (last - first)


def test_a_gpu_is_timed_by_its_own_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "queue", [])
    monkeypatch.setattr(Event, "passed", 0)
    workload = workloads.linear(8)
    watch = Stopwatch(torch.device("cuda"))
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.0)
    steps = [calibrate._step(workload.model, workload, optimizer, watch) for _ in range(3)]
    assert Event.passed == 0, "steps queue up, and wait for nothing"
    assert {calibrate._read(watch, step)[:2] for step in steps} == {(0.016, 0.008)}
    assert len(Event.queue) == 12 and Stopwatch(torch.device("cpu"))() < time.perf_counter()


def test_the_device_reaches_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: list[calibrate.CalibrationJob] = []
    made: list[tuple[str, str]] = []

    def measure(job: calibrate.CalibrationJob, beside: int) -> Calibration:
        asked.append(job)
        return FIGURES

    def placed(make: calibrate.Make, device: torch.device, dtype: str) -> workloads.Workload:
        made.append((str(device), dtype))
        return make()

    monkeypatch.setattr(calibrate, "calibrate", measure)
    monkeypatch.setattr(devices, "placed", placed)
    monkeypatch.setattr(calibration_cache, "disturbance", str)
    where = ("--model", "linear", "--workers", "2", "--link", "1gbit", "--dtype", "bfloat16")
    assert told(*where)[0] == 0 and (asked.pop().device, made.pop()) == ("cpu", ("cpu", "bfloat16"))
    for name, value in (("is_available", True), ("device_count", 2), ("get_device_name", "A")):
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    for gpu in ("A", "B"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *args, gpu=gpu: gpu)
        for device, first in (("cuda", "cuda:0"), ("cuda:1", "cuda:1")):
            assert told(*where, "--device", device)[0] == 0, "figures of another device do not serve"
            job = asked.pop()
            assert (job.device, job.dtype, made.pop()) == (device, "bfloat16", (first, "bfloat16"))
            assert told(*where, "--device", device)[0] == 0 and not asked
    assert [str(devices.of_rank("cuda", rank)) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    code, said = told(*where, "--device", "cuda:2")
    assert code == 2 and "there is no cuda:2 here, torch sees 2 GPUs" in said


def measured(rank: int, world: int) -> Calibration:
    return calibrate._rank(rank, world, JOB)


def test_a_calibration_is_measured() -> None:
    """By two ranks, of a model in bfloat16: figures for every way, the same everywhere, and hardly any time spent."""
    found, other = run_ranks(measured, 2)
    assert (found.forward, found.backward, found.costs) == (other.forward, other.backward, other.costs)
    assert set(found.costs) == {"ddp-fp32", "ddp-bf16", "ddp-fp16", *JOB.specs}
    assert found.forward > 0 and found.backward > 0 and all(found.costs[spec].encode > 0 for spec in JOB.specs)
    assert found.model.dtype == "bfloat16" and found.model.elements == 4 * 64 * 64
    assert sorted(found.model.arrival) == [f"{i}.weight" for i in range(4)] and found.software.latency["all_reduce"] > 0
    assert "CPU" in found.note and "2 at a time" in found.note


def halves() -> workloads.Workload:
    model, _ = workloads.linear(64)
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    return workloads.Workload(model.to(torch.bfloat16), lambda run: run(x).square().mean())


JOB = calibrate.CalibrationJob(halves, ("fp16", "powersgd(2)"), 2, seconds=0.0)


def test_a_recipe_is_a_workload() -> None:
    for name in ("digits", "cifar10-resnet20", "ptb-lstm700", "pydoc-gpt"):
        recipe = resolve([name], ["train.batch=4", "train.batch_per=worker"])
        workload = recipe_workload(recipe, 2)
        workload.loss(workload.model).backward()
        assert all(p.grad is not None for p in workload.model.parameters())


def test_evidence_is_looked_up_by_what_a_spec_means() -> None:
    assert records_of("randomk(0.3)") == [], "nobody has trained that"
    for one in accuracy_records():
        assert one in records_of(one.spec, one.optimizer) and one.seeds >= 1
    assert records_of("ef_signsgd") == records_of("sign") != []
    starved = "topk(0.01) | sign"
    assert {one.optimizer for one in records_of(starved)} == {"SGD"} and free_of_losses([starved])
    assert {one.optimizer for one in records_of(starved, "adamw")} == {"AdamW"} and not free_of_losses(
        [starved], "adamw"
    )
    assert records_of("powersgd(2)", "adamw") == records_of("powersgd(2)"), "no other evidence there is"
    assert set(free_of_losses(["int4", "sign", "randomk(0.3)"])) == {"int4", "randomk(0.3)"}
    lost = "topk(0.001) | fp16"  # for certain on the digits, though not on average
    assert sum(one.gain for one in records_of(lost)) / len(records_of(lost)) > -0.01 and not free_of_losses([lost])
    assert (
        str(AccuracyRecord("x", "digits", "test accuracy (%)", 4, 3, 98.0, -0.5, -1.0, 0.0))
        == "test accuracy -0.5 points [-1, +0] (digits, SGD, 3 seeds)"
    )
    worse = AccuracyRecord("x", "ptb", "perplexity", 4, 1, 90.0, 1.0, None, None, larger_is_better=False)
    assert str(worse) == "perplexity +1.1 % (ptb, SGD, 1 seed)" and worse.gain < -0.01


def test_evidence_is_what_the_published_runs_say() -> None:
    published = Path(__file__).parents[2] / "docs" / "results"
    collected = runpy.run_path(str(published / "accuracy_records.py"))["collected"]
    for folder in ("resnet9", "resnet9-choices"):
        told = list(collected([published / folder]))
        assert told
        for one in told:
            held = [other for other in records_of(one.spec) if other.task == one.task]
            assert held == [one], f"write down what python docs/results/accuracy_records.py docs/results/{folder} says"
