"""What a person reads while a training goes on."""

import re
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from gradwire_lab.train import display

START = {
    "event": "start",
    "world": 2,
    "simulated": False,
    "device": "cpu",
    "parameters": 9,
    "batch": 50,
    "method": "sign",
}
BYTES = {"sent": 2e6, "payload_ratio": 32.0}


def told(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run of 100 steps, gone on with at step 40 after 1000 seconds, tested at 50, and now at step 60."""
    monkeypatch.setattr(display, "QUIET_SECONDS", -1.0)
    console = Console(file=StringIO(), force_terminal=terminal, width=80 if terminal else 200)
    start = {**START, "steps": 100, "steps_per_epoch": 50, "step": 40, "seconds": 1000.0}
    epoch = {"event": "epoch", "train_loss": 1.0, "metric": "top1", "value": 0.875, "seconds": 1070.0}
    records: list[dict[str, Any]] = [
        start,
        {"event": "step", "step": 45, "epoch": 0.9, "loss": 1.5, "seconds": 1005.0, **BYTES},
        {**epoch, "step": 50, "epoch": 1.0, **BYTES},
        {"event": "step", "step": 60, "epoch": 1.2, "loss": 0.25, "seconds": 1080.0, **BYTES},
    ]
    with display.Display(console) as shown:
        for record in records:
            shown.show(record)
    said: str = console.file.getvalue()
    return said


def test_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    said = told(False, monkeypatch)
    assert "epoch   0.90  loss 1.5000  100 examples/s" in said  # 500 in 5 s, however long it took before
    assert "epoch   1.20  loss 0.2500  test top1 87.50%  100 examples/s  2.00 MB sent, payload 32x smaller" in said
    assert "0:02:40 left" in said  # 4 s a step, tests included


def test_few_bytes_are_not_rounded_away() -> None:
    said = display._bytes({"sent": 3400.0, "payload_ratio": 1.46})
    assert said == "3.40 kB sent, payload 1.5x smaller"


def test_the_line_of_an_epoch_fits_80_columns_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]+", told(True, monkeypatch))]
    (epoch,) = (line for line in lines if "test top1" in line)
    assert epoch.rstrip().endswith("1070.0 s") and len(epoch.rstrip()) <= 80


def test_what_is_not_compressed_is_not_called_smaller() -> None:
    assert display._bytes({"sent": 2e6, "payload_ratio": 1.0}) == "2.00 MB sent, payload as in float32"
    assert display._less(1.0, "a float32 ring") == "as much as a float32 ring"
    assert display._less(35.04, "float32") == "35.0x less than float32"


def test_a_live_line_leaves_room_for_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    said = told(True, monkeypatch)
    assert "epoch 1.20  loss 0.2500  top1 87.50%  100 ex/s  2.00 MB, 32x" in said
    assert re.search(r"[-\d]:[-\d]{2}:[-\d]{2}", said.rpartition("32x")[2])


def test_a_run_that_has_ended_and_a_worker_alone_are_called_so() -> None:
    console = Console(file=StringIO(), width=200)
    start = {**START, "world": 1, "steps": 100, "steps_per_epoch": 50, "step": 100, "seconds": 9.0}
    ratios = dict.fromkeys(("wire_ratio", "payload_ratio"), float("inf"))
    spent = dict.fromkeys(("seconds", "encode_seconds", "wire_seconds", "decode_seconds", "sent", "payload"), 0)
    final = {"event": "final", "metric": "top1", "value": 0.5, "best": 0.5, "skipped": 0, **ratios, **spent}
    with display.Display(console) as shown:
        shown.show(start)
        shown.show(final)
    said = console.file.getvalue()
    assert "1 worker on cpu" in said and "ended already, at step 100: nothing is left to train" in said
    assert re.search(r"sent +nothing *\n", said) and "inf" not in said


@pytest.mark.parametrize(("load", "warned"), [(9.5, True), (1.5, False)])
def test_a_busy_machine_is_a_warning(load: float, warned: bool) -> None:
    console = Console(file=StringIO(), width=200)
    start = {**START, "steps": 100, "steps_per_epoch": 50, "step": 0, "seconds": 0.0}
    display.Display(console).show({**start, "load": load, "cores": 2, "threads": 2})
    assert (f"load {load} on 2 cores" in console.file.getvalue()) == warned
