"""The adviser as people meet it: a table, a verdict, JSON, and sentences for what cannot be."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradwire.bench.network import calibrate, workloads
from gradwire.cli.advise import recipe_workload
from gradwire.cli.main import app
from gradwire.forecast.calibration import Calibration, Cost, save
from gradwire.forecast.evidence import Evidence, evidence, shelf, sound
from gradwire.forecast.model import Model
from gradwire.train.shelf import resolve

FIGURES = Calibration(
    Model({"embed": (10_000, 650), "bias": (2600,), "head": (10_000, 650)}),
    0.1,
    0.2,
    {
        "ddp-fp32": Cost(0.0, 0.0),
        "ddp-bf16": Cost(0.004, 0.004),
        "topk(0.001) | sign": Cost(0.02, 0.01),
        "powersgd(2)": Cost(0.02, 0.03),
        "int4": Cost(0.03, 0.03),
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
    assert "Take powersgd(2):" in said and "times faster than bf16 DDP" in said
    assert 'gradwire.compress(model, "powersgd(2)"' in said and "pays on links below" in said
    assert "by hand" in said


def test_what_lost_accuracy_is_shown_but_not_taken(figures: str) -> None:
    place = ("--workers", "4", "--link", "100mbit,5ms", "--calibration", figures, "--json")
    free, asked = (json.loads(told(*place, *more)[1]) for more in ((), ("--specs", "topk(0.001) | sign")))
    assert free["ways"][0]["spec"] == "topk(0.001) | sign" != free["choice"]
    assert asked["choice"] == "topk(0.001) | sign"
    assert evidence("topk(0.001) | sign")[0].gain < -0.01


def test_figures_are_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: list[int] = []
    before = [0]

    def measure(job: object, beside: int) -> Calibration:
        asked.append(beside)
        return FIGURES

    monkeypatch.setattr(calibrate, "calibrate", measure)
    for words, times in (((), 1), ((), 1), (("--link", "1gbit"), 1), (("--sharing", "2"), 2), (("--fresh",), 3)):
        code, said = told("digits", "--workers", "4", "--link", "100mbit", *words)
        assert code == 0 and len(asked) == times, said
        assert ("--fresh measures again" in said) == (asked == before), "what is old is told as old"
        before = list(asked)


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
        (["--link", "fast"], "cannot read 'fast'"),
        ([], "what is the link between the workers?"),
        (["--link", "1gbit", "--specs", "sing"], "did you mean"),
        (["--link", "1gbit", "--model", "nothing"], "there is no workload 'nothing'"),
        (["nothing", "--link", "1gbit"], "no recipe called 'nothing'"),
        (["digits", "--model", "lstm", "--link", "1gbit"], "not both"),
        (["--link", "1gbit", "--calibration", figures + "x"], "there is no calibration"),
    ):
        code, said = told(*options)
        assert code == 2 and words in said, said


def test_a_changed_file_is_another_workload(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def make():\n    return 1\n")
    first = workloads.source(f"{mine}:make")
    mine.write_text("def make():\n    return 2\n")
    assert first != workloads.source(f"{mine}:make") and workloads.source("lstm") == ""


def test_a_recipe_is_a_workload() -> None:
    for name in ("digits", "cifar10-resnet20", "ptb-lstm700", "pydoc-gpt"):
        recipe = resolve([name], ["train.batch=4", "train.batch_per=worker"])
        workload = recipe_workload(recipe, 2)
        workload.loss(workload.model).backward()
        assert all(p.grad is not None for p in workload.model.parameters())


def test_evidence_is_looked_up_by_what_a_spec_means() -> None:
    assert evidence("randomk(0.3)") == [], "nobody has trained that"
    for one in shelf():
        assert one in evidence(one.spec) and one.seeds >= 1
    assert evidence("ef_signsgd") == evidence("sign") != []
    assert set(sound(["int4", "sign", "randomk(0.3)"])) == {"int4", "randomk(0.3)"}
    assert str(Evidence("x", "digits", "%", 4, 3, 98.0, -0.5, -1.0, 0.0)) == "-0.50 [-1.00, +0.00] on digits, 3 seeds"
