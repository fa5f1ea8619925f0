"""`bench calls` times what a user calls, by every entry point, beside the bytes that it cannot avoid."""

import json
from math import prod
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from gradwire_lab.bench import calls
from gradwire_lab.bench.fixed_gradients import MODELS, FixedGradients, shapes_of
from gradwire_lab.cli.main import bench as app


def test_resnet50_has_54_weights() -> None:
    shapes = shapes_of("resnet50")
    assert len(shapes) == 54 and sum(map(prod, shapes)) == 25_502_912
    assert shapes[0] == (64, 3, 7, 7) and shapes[-1] == (1000, 2048)


@pytest.mark.parametrize("model", MODELS)
def test_a_size_narrows_the_weights(model: str) -> None:
    total = sum(map(prod, shapes_of(model, 100_000)))
    assert 80_000 < total < 130_000
    assert len(shapes_of(model, 100_000)) == len(shapes_of(model))


@pytest.mark.parametrize("addresses", calls.ADDRESSES)
@pytest.mark.parametrize("entry_point", calls.ENTRY_POINTS)
def test_every_entry_point_is_timed(entry_point: str, addresses: str) -> None:
    bench = calls.CallBench("one", entry_point, ("dgc(0.001)",), 20_000, addresses=addresses, repeats=2)
    plain, row = calls.measure(bench)
    assert (plain["spec"], row["spec"]) == (calls.PLAIN, "dgc(0.001)")
    assert row["ms"] > 0 and row["worst_ms"] >= row["ms"]
    assert row["to_floor"] == pytest.approx(row["call_ms"] / row["floor_ms"])
    assert row["call_ms"] == pytest.approx(row["ms"] - row["without_ms"])
    assert (row["without_ms"] > 0) == (entry_point in ("ddp", "optimizer"))
    assert row["to_plain"] == pytest.approx(row["call_ms"] / plain["call_ms"])
    assert row["to_kernels"] is None if entry_point != "loop" else row["to_kernels"] > 1


@pytest.mark.parametrize(
    ("spec", "needed"), [("dgc(0.001)", 24), ("topk(0.001)", 16), ("ef_signsgd", 24.25), ("qsgd", 10)]
)
def test_bytes_that_cannot_be_avoided(spec: str, needed: float) -> None:
    _, row = calls.measure(calls.CallBench("one", "loop", (spec,), 100_000, repeats=1))
    assert row["bytes_per_param"] == pytest.approx(needed, abs=0.1)


def test_addresses_move() -> None:
    weights = FixedGradients([(40, 50)], torch.device("cpu"))
    (p,) = weights.weights
    weights.fill_in_place()
    first = p.grad
    weights.fill_in_place()
    assert p.grad is first and first is not None and torch.equal(first, weights.fixed[0])
    addresses = set()
    for _ in range(20):
        weights.fill_elsewhere()
        assert p.grad is not None
        addresses.add(p.grad.data_ptr())
    assert len(addresses) > 2


def test_ranks_write_rows(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    words = ["calls", "--workers", "2", "--model", "one", "--size", "5000", "--spec", "int4", "--repeats", "1"]
    done = CliRunner().invoke(app, [*words, "--entry-point", "hosts", "--jsonl", str(path)])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["spec"] for row in rows] == [calls.PLAIN, "int4"]
    assert all(row["ranks"] == 2 for row in rows)
    assert "x floor" in done.stdout


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--model", "vgg"), "'vgg'"),
        (("--entry-point", "window"), "'window'"),
        (("--addresses", "none"), "'none'"),
        (("--spec", "nonsense(3)"), "nonsense"),
        (("--entry-point", "hosts", "--ranks", "3"), "--workers 4"),
        (("--device", "foo"), "'foo'"),
    ],
)
def test_bad_input_is_named(words: tuple[str, ...], named: str) -> None:
    done = CliRunner().invoke(app, ["calls", "--size", "1000", *words])
    assert done.exit_code == 2 and named in done.stderr


def test_the_old_name_of_the_entry_point_works() -> None:
    with pytest.warns(FutureWarning, match="--entry-point"):
        done = CliRunner().invoke(app, ["calls", "--size", "1000", "--door", "window"])
    assert done.exit_code == 2 and "'window'" in done.stderr
