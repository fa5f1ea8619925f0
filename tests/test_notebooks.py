"""Every notebook runs from its first cell to its last."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "docs" / "notebooks"
PRINTS = {
    "compare-on-your-model.ipynb": "AdamW  powersgd(2)",
    "a-codec-of-your-own.ipynb": "hadamard | dense_near_zero",
    "what-a-link-costs.ipynb": "100 gbit",
}


def code(notebook: Path) -> str:
    cells = json.loads(notebook.read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def test_no_notebook_is_forgotten() -> None:
    assert {path.name for path in FOLDER.glob("*.ipynb")} == set(PRINTS)


@pytest.mark.study
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PRINTS)
def test_the_notebook_runs(name: str) -> None:
    command = [sys.executable, "-W", "error::DeprecationWarning", "-c", code(FOLDER / name)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert PRINTS[name] in done.stdout
