"""`bench kernels` times everything it names, and bad input to a bench gets a sentence before anything is measured."""

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from numba.core import event
from typer.testing import CliRunner

from gradwire_lab.bench import cases, kernels, memory, plain, selections
from gradwire_lab.bench.kernel_inputs import KernelInputs
from gradwire_lab.cli.main import bench as app

CPU = torch.device("cpu")
SIZE = 3000


def bench(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, words)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    return done.exit_code, done.stdout, done.stderr


def test_every_kernel_is_timed() -> None:
    code, out, _ = bench("kernels", "--size", str(SIZE), "--repeats", "1", "--json")
    assert code == 0
    rows = {row["kernel"]: row for row in map(json.loads, out.splitlines())}
    assert list(rows) == cases.names((SIZE,))
    for row in rows.values():
        assert row["n"] == SIZE and row["segments"] == 1
        assert row["ms"] > 0 and row["floor_ms"] > 0 and row["reference_ms"] > 0
        assert row["to_floor"] == pytest.approx(row["ms"] / row["floor_ms"])
        assert row["to_reference"] == pytest.approx(row["reference_ms"] / row["ms"])
    for name, composed in kernels.COMPOSED.items():
        assert rows[name]["to_torch"] == pytest.approx(rows[composed]["ms"] / rows[name]["ms"])
    for name, gaussian in selections.GAUSSIAN.items():
        assert rows[name]["to_gaussian"] == pytest.approx(rows[name]["ms"] / rows[gaussian]["ms"])


class FakeClock:
    """A clock that stands still but for a microsecond at each look, and for copies."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now

    def takes(self, seconds: float) -> Callable[[object, object], None]:
        def copy(target: object, source: object) -> None:
            self.now += seconds

        return copy


def test_a_small_floor_is_that_of_the_fastest_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that wait for one another may take a hundred times as long as the copy itself."""
    clock = FakeClock()
    monkeypatch.setattr(kernels, "time", clock)
    monkeypatch.setattr(torch.Tensor, "copy_", clock.takes(4e-3))
    monkeypatch.setattr(kernels, "np", SimpleNamespace(copyto=clock.takes(1e-3)))
    (row,) = kernels.measure(CPU, [(100_000,)], only="sign_decode", repeats=3)
    assert row["floor_ms"] == pytest.approx(1, abs=0.01), "by one thread"
    (row,) = kernels.measure(CPU, [(kernels.TURN // 4,)], only="sign_decode", repeats=3)
    assert row["floor_ms"] == pytest.approx(4, abs=0.01), "a long copy is made once in a turn, by all threads"


def test_resnet50() -> None:
    lengths = kernels.resnet50()
    assert sum(lengths) == 25_557_032 and len(lengths) == 161
    code, out, _ = bench("kernels", "--size", "64", "--resnet50", "--only", "draw", "--repeats", "1", "--json")
    assert code == 0
    assert [(row["n"], row["segments"]) for row in map(json.loads, out.splitlines())] == [(64, 1), (25_557_032, 161)]
    assert set(cases.CASES) - set(cases.names(lengths)) == {
        f"torch_{n}" for n in ("dgc", "topk", "onebit_adam", "sign", "qsgd", "int4")
    }


@pytest.mark.parametrize("name", cases.names((700, 1, 64, 300)))
def test_every_case_takes_segments(name: str) -> None:
    inputs = KernelInputs((700, 1, 64, 300), CPU)
    case = cases.CASES[name](inputs)
    assert case.bytes > 0
    for _ in range(2):
        case.run()


def test_kernels_that_are_compiled_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    rows = kernels.measure(CPU, [(3000,)], "sign_", repeats=1)
    with caplog.at_level(logging.WARNING, "gradwire"):
        next(rows)
        for _ in range(2):
            with event.trigger_event("numba:compile"):
                assert caplog.text.count("compiling CPU kernels") == 1
        assert len(list(rows)) > 1
    assert caplog.text.count("compiling CPU kernels") == caplog.text.count("were compiled in 0 s") == 1


def test_lines_of_a_process_that_weighs_memory_are_passed_on_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    child = tmp_path / "child"
    child.write_text('#!/bin/sh\necho gradwire: compiling >&2\necho other >&2\necho \'{"spec": "sign"}\'\n')
    child.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(child))
    assert list(memory.measure(("sign", "sign"), "cpu", 1000)) == [{"spec": "sign"}] * 2
    assert capfd.readouterr().err == "gradwire: compiling\n"
    child.write_text("#!/bin/sh\necho gradwire: compiling >&2\necho no room >&2\nexit 3\n")
    with pytest.raises(RuntimeError, match="'sign' could not be measured: no room"):
        list(memory.measure(("sign",), "cpu", 1000))


def test_the_table_fits_and_rows_are_told_as_they_come() -> None:
    code, out, told = bench("kernels", "--size", "1000000", "--only", "sign_encode", "--repeats", "1")
    assert code == 0
    assert "1,000,000" in out and "segments" in out and "…" not in out
    assert "sign_encode, 1,000,000 elements, segments: 1:" in told


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("kernels", "--size", "0"), "--size"),
        (("kernels", "--size", "-5"), "--size"),
        (("kernels", "--device", "foo"), "nothing is measured on 'foo'"),
        (("kernels", "--only", "nonsense"), "there is no kernel 'nonsense'"),
        (("kernels", "--resnet50", "--only", "torch_dgc"), "there is no kernel 'torch_dgc'"),
        (("step", "--device", "foo"), "nothing is measured on 'foo'"),
        (("step", "--method", "nonsense(3)"), "nonsense"),
        (("step", "--workload", "resnet20", "--workload", "resnet21"), "there is no workload 'resnet21'"),
        (("memory", "--device", "foo"), "nothing is measured on 'foo'"),
        (("memory", "--spec", "fp16", "--spec", "nonsense(3)"), "nonsense"),
        (("memory", "--spec", "ddp-fp32"), "ddp"),
    ],
)
def test_bad_input_gets_a_sentence(words: tuple[str, ...], sentence: str) -> None:
    code, out, said = bench(*words)
    assert code == 2 and not out
    assert sentence in said and "Traceback" not in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("command", ["kernels", "step", "memory"])
def test_no_gpu_is_told(command: str) -> None:
    code, out, said = bench(command, "--device", "cuda")
    assert code == 2 and not out
    assert "there is no cuda here" in said


def test_a_picture_needs_a_folder_and_is_left_alone_when_nothing_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    code, _, said = bench("kernels", "--picture", str(tmp_path / "absent" / "x.svg"))
    assert code == 2 and "there is no folder" in said
    old = tmp_path / "old.svg"
    old.write_text("as it was")
    assert bench("kernels", "--only", "nonsense", "--picture", str(old))[0] == 2
    assert old.read_text() == "as it was"


def test_plain_compositions_compress() -> None:
    """They stand for what a person would write, so they must be right, if not to the bit."""
    torch.manual_seed(0)
    x = torch.randn(5000)
    momentum, residual = torch.zeros(5000), torch.zeros(5000)
    found, values = plain.dgc_(x, momentum, residual, 50)
    assert 0 < found.numel() <= 50 and torch.equal(values, x[found])
    assert not residual[found].any() and torch.equal(residual + 0, x.index_fill(0, found, 0.0))
    scale, bits = plain.sign(x)
    assert scale == x.abs().mean() and bits.numel() == 625
    assert torch.equal((bits[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten().bool(), x >= 0)
    norms, levels = plain.qsgd(x)
    heard = (levels / 127 * norms).flatten()[:5000]
    assert (heard - x).abs().max() <= norms.max() / 127 * 1.001
    scales, codes = plain.int4(x)
    pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(1).float() - 8
    assert (pairs * scales - plain._rows(x, 256)).abs().max() <= scales.max() / 2 * 1.001
