"""Every notebook runs from its first cell to its last: in a short form in CI, and as it is in `make study`."""

import io
import json
import os
import subprocess
import sys
import time
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from gradwire_lab.launch import launch

FOLDER = Path(__file__).parent.parent / "docs" / "notebooks"
SECONDS = 15  # of processors, which CI may spend on each notebook, besides the import of torch
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


def printed(rank: int, world: int, text: str) -> tuple[str, float]:
    """What a notebook prints in a forked process, which has imported torch, and its seconds of processors."""
    warnings.simplefilter("error", DeprecationWarning)
    begun = time.process_time()
    with redirect_stdout(io.StringIO()) as out:
        exec(compile(text, "notebook", "exec"), {"__name__": "__main__"})
    return out.getvalue(), time.process_time() - begun


def test_no_notebook_is_forgotten() -> None:
    assert {path.name for path in FOLDER.glob("*.ipynb")} == set(PRINTS)


@pytest.mark.parametrize("name", PRINTS)
def test_a_short_form_of_the_notebook_runs(name: str) -> None:
    text, (long, short) = code(name), SHORTER.get(name, ("", ""))
    assert long in text
    ((shown, seconds),) = launch(printed, 1, text.replace(long, short) if long else text, backend="", threads=1)
    assert PRINTS[name] in shown
    assert seconds < SECONDS


@pytest.mark.study
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SHORTER)
def test_the_notebook_runs(name: str) -> None:
    run(name, code(name))
