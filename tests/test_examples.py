"""Every example runs, and prints what it should."""

import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
PRINTS = {
    "01_one_tensor.py": "with error feedback, lost after 200 steps",
    "02_plain_loop.py": "replicas agree bit for bit: True",
    "03_ddp.py": "50 steps (0 skipped), world of 2",
    "04_your_own_codec.py": "topk(0.05) | crowd",
    "05_gossip_ring.py": "120 steps, world of 8, 2 neighbors",
    "06_accelerate.py": "64 steps (0 skipped), world of 2",
    "07_lightning.py": "64 steps (0 skipped), world of 2",
    "08_transformers.py": "30 steps (0 skipped), world of 2",
}
# These start no processes and register nothing, so that they need no interpreter of their own, which takes 3 s.
HERE = ("01_one_tensor.py", "02_plain_loop.py", "05_gossip_ring.py")
# Trainers of other projects, and how they are started. Warnings of those projects are no errors here.
FRAMEWORKS = {
    "06_accelerate.py": ("accelerate", ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]),
    "07_lightning.py": ("lightning", []),
    "08_transformers.py": ("transformers", ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]),
}
# Its callback is tested in tests/trainers; importing transformers twice more takes as long as all that.
LONG = {"08_transformers.py": pytest.mark.study}


def test_no_example_is_forgotten():
    assert {path.name for path in FOLDER.glob("*.py")} == set(PRINTS)


@pytest.mark.parametrize("name", HERE)
def test_example_in_this_process(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(FOLDER / name)])
    runpy.run_path(str(FOLDER / name), run_name="__main__")
    assert PRINTS[name] in capsys.readouterr().out


@pytest.mark.parametrize("name", [pytest.param(name, marks=LONG.get(name, ())) for name in sorted({*PRINTS} - {*HERE})])
def test_example(name, tmp_path):
    framework, how = FRAMEWORKS.get(name, ("torch", ["-W", "error"]))
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed: pip install gradwire[{framework}]")
    done = subprocess.run(
        [sys.executable, *how, FOLDER / name, *([tmp_path] if name in FRAMEWORKS else [])],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert PRINTS[name] in done.stdout
