"""The bench of steps over thin links: what it accepts, what it remembers, what it concludes, and one short runner."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fixtures
from gradwire.comm.emulated import VARIABLE
from gradwire_lab.bench.network import grid, methods, results_table, runner
from gradwire_lab.bench.network.emulation_error import EXCHANGES, compare
from gradwire_lab.bench.network.grid import Budget, Scenario
from gradwire_lab.bench.network.runner import measure, turns
from gradwire_lab.cli import output
from gradwire_lab.cli.main import app
from gradwire_lab.launch import RankError
from gradwire_lab.network.namespaces import lacking
from gradwire_lab.train.record import append_line

FIELD = Scenario("linear", "100mbit", 4, "hosts")


def row(method: str, ms: float, **more: Any) -> dict[str, Any]:
    found = {"step_ms": ms, "silent_ms": 10.0, "nic": None, "framed": None, "reported": None}
    return {**grid.described(FIELD, method, Budget()), **found, **more}


def told(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["bench", "network", *words])
    return done.exit_code, done.output


def test_options_follow_the_spec() -> None:
    spec, options = methods.parse("int8; exchange=two_way; bundle=none; bucket_mb=50")
    assert spec == "int8" and options == {"exchange": "two_way", "bundle": None, "bucket_mb": 50.0}
    with pytest.warns(FutureWarning, match="bucket_mb"):
        assert methods.parse("int8; launch_mb=50") == ("int8", {"bucket_mb": 50.0})
    assert methods.parse("int8; feedback=none")[1] == {"feedback": "none"}  # which is not the default
    assert methods.parse("int8; rollback=false")[1] == {"rollback": False}


@pytest.mark.parametrize("name", methods.ALL)
def test_every_method_that_is_measured_by_default_exists(name: str) -> None:
    assert fixtures.error_text(lambda: methods.check(name)) == fixtures.NO_ERROR


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--method", "ddp-int7"), "torch has no 'ddp-int7'"),
        (("--method", "ddp"), "take ddp-none, ddp-fp32"),
        (("--method", "topk(0.1); exchange"), "write for example exchange=two_way"),
        (("--method", "topkk(0.1)"), "topkk"),
        (("--method", "local:topk(0.1)"), "sparseloco"),
        (("--link", "12parsec", "--method", "ddp-none"), "no unit of rate"),
        (("--link", "0bit", "--method", "ddp-none"), "impossible"),
        (("--model", "lsmt", "--method", "ddp-none"), "there is no workload 'lsmt'"),
        (("--model", "absent.py:make", "--method", "ddp-none"), "absent.py"),
        (("--picture", "bench.jpg"), "a picture is a PNG or an SVG"),
        (("--link", "1gbit,1ms,1%", "--throttled", "--method", "ddp-none"), "has jitter or loss too"),
        (("--method", "topk(0.1); bucket_mb=x"), "cannot read bucket_mb=x of 'topk(0.1); bucket_mb=x'"),
        (("--method", "topk(0.1); rollback=maybe"), "cannot read rollback=maybe"),
        (("--turn", "nan"), "a turn of nan s"),
        (("--model", "linear", "--link", "1gbit", "--timeout", "-1"), "a timeout of -1 s"),
        (("--out", "."), ". is a folder"),
        (("--out", __file__), "holds something else than rows"),
    ],
)
def test_bad_input_gets_a_sentence(words: tuple[str, ...], sentence: str) -> None:
    code, said = told(*words)
    assert code == 2 and sentence in said


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append_line(path, row("ddp-fp32", 50.0))
    with path.open("a") as out:
        out.write('{"model": "li')  # an interrupted run
    assert grid.missing(FIELD, ["ddp-fp32", "int8"], grid.read(path), Budget()) == ["int8"]
    append_line(path, row("int8", 20.0))
    assert grid.missing(FIELD, ["ddp-fp32", "int8"], grid.read(path), Budget()) == []
    path.write_text('{"model": "li')
    assert grid.read(path) == []


def test_what_failed_is_done_again_if_that_may_help(tmp_path: Path) -> None:
    path, methods = tmp_path / "rows.jsonl", ["ddp-fp32", "ddp-bf16", "int8"]
    hasty = Budget(timeout=60)
    for method, why in (("ddp-fp32", "timeout: no end"), ("ddp-bf16", "refused: it does"), ("int8", "died: so")):
        append_line(path, {**grid.described(FIELD, method, hasty), "failed": why})
    rows = grid.read(path)
    assert grid.missing(FIELD, methods, rows, hasty) == []
    assert grid.missing(FIELD, methods, rows, Budget(timeout=61)) == ["ddp-fp32"]
    assert grid.missing(FIELD, methods, rows, hasty, retry=True) == methods
    append_line(path, row("ddp-fp32", 50.0))
    again = grid.read(path)
    assert len(again) == 3 and grid.missing(FIELD, methods, again, Budget(timeout=61)) == []


def test_plain_ddp_gets_the_time_that_a_thin_link_takes() -> None:
    thin, nbytes = Scenario("lstm", "10mbit", 4, "hosts"), 79_000_000
    # 118 MB of a ring at 10 mbit, with headers: 111 s a step were measured, and a turn has four at least.
    assert 4 * 111 < grid.with_timeout(Budget(), thin, nbytes).timeout < 10 * 111
    assert grid.with_timeout(Budget(), Scenario("lstm", "1gbit", 4, "hosts"), nbytes) == Budget()


def test_speed_ups_are_over_the_better_dense_way() -> None:
    rows = [row("ddp-fp32", 90.0), row("ddp-fp16", 50.0), row("int8", 20.0, nic=103.0, framed=100.0)]
    rows.append({**grid.described(FIELD, "ddp-bf16", Budget()), "failed": "refused: it does"})
    found = {row["method"]: row for row in results_table.results(rows)}
    assert found["int8"]["multiple"] == 2.0 and found["int8"]["speedup"] == 2.5
    assert found["int8"]["honest"] == pytest.approx(1.03)
    assert found["ddp-bf16"]["multiple"] is None
    assert results_table.row_cells(found["ddp-bf16"])[4] == "refused"


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    results_table.picture(results_table.results([row("ddp-fp32", 90.0), row("int8", 20.0)]), tmp_path / "bench.svg")
    drawn = (tmp_path / "bench.svg").read_text()
    assert "<svg" in drawn and drawn.count(">link</text>") == 1


def test_ranks_on_an_emulated_link_make_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    budget = Budget(rounds=1, steps=2, warmup=2)
    methods = ["ddp-fp32", "ddp-bf16", "fp16", "local:local_sgd(H=3)", "local:diloco(H=3, delay=1)"]
    begun: list[str] = []
    rows = measure(Scenario("linear", "200mbit", 2, "throttled"), methods, budget, begun.append)
    found = {one["method"]: one for one in rows}
    assert len(begun) == turns(methods, budget) - 1  # the start has no line
    assert "refused" in found["ddp-bf16"]["failed"]
    dense, ours = found["ddp-fp32"], found["fp16"]
    assert dense["steps"] == 4 and dense["reported"] == 4 * 4 * 512 * 512
    # 4.2 MB at 200 mbit, with headers.
    assert dense["step_ms"] > 170 and dense["silent_ms"] < dense["step_ms"]
    assert ours["reported"] == pytest.approx(dense["reported"] / 2, rel=0.01)
    rounds = found["local:local_sgd(H=3)"]
    assert rounds["steps"] == 6 and rounds["reported"] == pytest.approx(dense["reported"] / 3, rel=0.01)
    late = found["local:diloco(H=3, delay=1)"]
    assert late["steps"] == 6 and late["reported"] == pytest.approx(rounds["reported"], rel=0.01)
    assert late["step_ms"] > 170 / 3  # its message is waited for while it is timed
    assert VARIABLE not in os.environ


@pytest.mark.skipif(bool(lacking()), reason=lacking() or "hosts can be made")
def test_ranks_in_hosts_make_rows() -> None:
    rows = list(measure(Scenario("linear", "200mbit", 2, "hosts"), ["ddp-fp32"], Budget(rounds=1, steps=2, warmup=2)))
    assert [row["method"] for row in rows] == ["ddp-fp32"] and "failed" not in rows[0]
    assert rows[0]["step_ms"] > 170  # 4.2 MB at 200 mbit
    assert rows[0]["nic"] == pytest.approx(rows[0]["framed"], rel=0.03)


def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "find_spec", lambda name: None)
    for command in ("network", "kernels"):
        done = CliRunner().invoke(app, ["bench", command, "--picture", "bench.png"])
        assert done.exit_code == 2 and "pip install 'gradwire[report]'" in done.output


def test_ranks_that_cannot_begin_are_nobodys_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when they do not find each other: an error at once, and no row that says that a method died."""

    def run(*args: object) -> None:
        raise RankError("rank 0 of 4 failed:\nTraceback (most recent call last):\nOSError: the harbor is closed")

    monkeypatch.setattr(runner, "_run", run)
    with pytest.raises(runner.StartupError, match=r"ended before the first turn: OSError: the harbor is closed"):
        list(runner.measure(FIELD, ["ddp-fp32", "int8"], Budget(rounds=1)))


def test_rows_are_shown_as_json(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for one in (row("ddp-none", 10.0), row("int8", 20.0)):
        append_line(path, {**one, "where": "throttled"})
    words = ["--model", "linear", "--link", "100mbit", "--workers", "4", "--throttled", "--json", "--out", str(path)]
    code, said = told(*words, "--method", "ddp-none", "--method", "int8")
    assert code == 0
    assert [json.loads(line)["multiple"] for line in said.splitlines()] == [1.0, 2.0]


@pytest.mark.study
@pytest.mark.skipif(bool(lacking()), reason=lacking() or "hosts can be made")
@pytest.mark.parametrize("link", ["100mbit", "1gbit"])
def test_emulated_links_are_like_shaped_ones(link: str) -> None:
    """Within 15 % at 4 hosts. Timings: run it on an idle machine."""
    found = list(compare("linear", link, 4, Budget(rounds=3, steps=8), lambda line: None, list(EXCHANGES)))
    assert len(found) == 4
    for one in found:
        assert not one.failed and 0.85 < one.ratio < 1.15, one
