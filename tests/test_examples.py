"""Every example runs, and says what it should."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
SAYS = {
    "01_one_tensor.py": "with error feedback, lost after 200 steps",
    "02_plain_loop.py": "replicas agree bit for bit: True",
    "03_ddp.py": "50 steps (0 skipped), world of 2",
    "04_your_own_codec.py": "topk(0.05) | crowd",
    "05_gossip_ring.py": "120 steps, world of 8, 2 neighbors",
    "06_accelerate.py": "64 steps (0 skipped), world of 2",
    "07_lightning.py": "64 steps (0 skipped), world of 2",
    "08_transformers.py": "30 steps (0 skipped), world of 2",
}
# Other people's trainers, and what they are started with. Their warnings are their own business.
FRAMEWORKS = {
    "06_accelerate.py": ("accelerate", ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]),
    "07_lightning.py": ("lightning", []),
    "08_transformers.py": ("transformers", ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]),
}
# Its callback is tested in tests/trainers; importing transformers twice more takes as long as all that.
LONG = {"08_transformers.py": pytest.mark.study}


def test_no_example_is_forgotten():
    assert {path.name for path in FOLDER.glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", [pytest.param(name, marks=LONG.get(name, ())) for name in sorted(SAYS)])
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
    assert SAYS[name] in done.stdout
