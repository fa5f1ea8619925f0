"""Every notebook runs from its first cell to its last: in a short form in CI, and as it is in `make study`."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "docs" / "notebooks"
SECONDS = 20  # of processors, which CI may spend on each notebook
PRINTS = {
    "compare-on-your-model.ipynb": "AdamW  powersgd(2)",
    "a-codec-of-your-own.ipynb": "hadamard | dense_near_zero",
    "what-a-link-costs.ipynb": "100 gbit",
}
SHORTER = {"compare-on-your-model.ipynb": ("WORKERS, STEPS, BATCH = 4, 60, 32", "WORKERS, STEPS, BATCH = 2, 3, 8")}


def code(name: str) -> str:
    cells = json.loads((FOLDER / name).read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def run(name: str, text: str) -> None:
    command = [sys.executable, "-W", "error::DeprecationWarning", "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert PRINTS[name] in done.stdout


def processor_seconds() -> float:
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def test_no_notebook_is_forgotten() -> None:
    assert {path.name for path in FOLDER.glob("*.ipynb")} == set(PRINTS)


@pytest.mark.parametrize("name", PRINTS)
def test_a_short_form_of_the_notebook_runs(name: str) -> None:
    text, (long, short) = code(name), SHORTER.get(name, ("", ""))
    assert long in text
    before = processor_seconds()
    run(name, text.replace(long, short) if long else text)
    assert processor_seconds() - before < SECONDS


@pytest.mark.study
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SHORTER)
def test_the_notebook_runs(name: str) -> None:
    run(name, code(name))
