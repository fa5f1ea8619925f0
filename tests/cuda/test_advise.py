"""`advise` measures on the GPU."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from gradwire_lab.bench.network import calibrate, workloads
from gradwire_lab.cli.main import app
from gradwire_lab.perf_model.calibration import Calibration
from spawn import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CYCLES = 100_000_000  # 40 ms or more: no GPU makes 2.5 GHz of them
SPECS = ("int8", "powersgd(2)", "topk(0.01) | sign")


def sleeping_workload() -> workloads.Workload:
    """A step whose forward pass keeps the GPU busy for a while, but not its host."""
    made = workloads.linear(512)

    def loss(run: nn.Module) -> Tensor:
        torch.cuda._sleep(CYCLES)
        return made.loss(run)

    return workloads.Workload(made.model, loss)


def measured(rank: int, world: int, dtype: str) -> tuple[Calibration, int]:
    job = calibrate.CalibrationJob(sleeping_workload, SPECS, 4, seconds=0.0, device="cuda", dtype=dtype)
    return calibrate._rank(rank, world, job), torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_calibration_is_measured_on_the_gpu(dtype: str) -> None:
    for found, room in run_ranks(measured, 1, dtype, timeout=110):
        assert found.forward > 0.04 and found.backward < found.forward, "the watch is the GPU's, and not its host's"
        assert found.model.dtype == dtype and room > 4 * 512 * 512 * found.model.format.itemsize
        assert all(found.costs[spec].encode > 0 and found.costs[spec].decode > 0 for spec in SPECS)
        arrival = [found.model.arrival[f"{layer}.weight"] for layer in (3, 2, 1, 0)]
        assert arrival == sorted(arrival) and 0 < arrival[0] <= arrival[-1] <= 1
        assert torch.cuda.get_device_name() in found.note and "1 at a time" in found.note and found.cores == 1.0


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("device", "sharing"), [("cuda", "2"), ("cuda:0", "1")])
def test_the_command(device: str, sharing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = [
        "advise",
        "--model",
        "lstm",
        "--workers",
        "4",
        "--link",
        "100mbit",
        "--specs",
        "topk(0.01) | sign",
        "--json",
    ]
    done = CliRunner().invoke(app, [*words, "--specs", "topk(0.01) | sign", "--device", device, "--sharing", sharing])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert torch.cuda.get_device_name() in found["note"] and f"{sharing} at a time" in found["note"]
    assert found["choice"] == "topk(0.01) | sign"


def test_a_batch_on_another_device_is_refused() -> None:
    x = torch.randn(4, 8)
    job = calibrate.CalibrationJob(
        lambda: workloads.Workload(nn.Linear(8, 8), lambda run: run(x).sum()), (), 2, device="cuda"
    )
    with pytest.raises(ValueError, match="cuda:0"):
        calibrate.checked(job)
