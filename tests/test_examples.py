"""Every example runs, and prints what it should."""

import ast
import importlib.util
import io
import os
import runpy
import subprocess
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import pytest

import gradwire
import gradwire.extend
from fixtures import free_port
from gradwire_lab.launch import launch

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
    "09_sharded.py": "50 steps (0 skipped), world of 4 in 2 replicas",
    "10_ray.py": "50 steps (0 skipped), world of 2",
}
# These start no processes and register nothing, so that they need no interpreter of their own, which takes 3 s.
HERE = ("01_one_tensor.py", "02_plain_loop.py", "05_gossip_ring.py")
# As torchrun starts them: in forked ranks, which have imported torch. It takes 20 s to start their own interpreters.
RANKS = {"04_your_own_codec.py": 1, "06_accelerate.py": 2, "07_lightning.py": 2}
# Trainers of other projects, and how they are started. Warnings of those projects are no errors here.
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
FRAMEWORKS = {
    "06_accelerate.py": ("accelerate", TORCHRUN),
    "07_lightning.py": ("lightning", []),
    "08_transformers.py": ("transformers", TORCHRUN),
    "09_sharded.py": ("torch", [*TORCHRUN[:-1], "4"]),
    "10_ray.py": ("ray", []),
}


def needs(name: str) -> None:
    framework, _ = FRAMEWORKS.get(name, ("torch", []))
    if importlib.util.find_spec(framework) is None:
        extra = "'ray[train]'" if framework == "ray" else f"gradwire[{framework}]"
        pytest.skip(f"{framework} is not installed: pip install {extra}")


def test_no_example_is_forgotten():
    assert {path.name for path in FOLDER.glob("*.py")} == set(PRINTS)


# Of docs/stability.md: modules whose names are public, and which names; None: all that have no leading underscore.
PUBLIC = {"gradwire": gradwire.__all__, "gradwire.extend": gradwire.extend.__all__} | {
    f"gradwire.integrations.{name}": None for name in ("accelerate", "lightning", "transformers", "sharded", "dcp")
}


def used(tree: ast.Module) -> list[tuple[str, str]]:
    """Modules of ours, and the names of each that a script uses."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, "__version__") for alias in node.names if alias.name.startswith("gradwire")]
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("gradwire"):
            found += [(str(node.module), alias.name) for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "gradwire":
            found.append(("gradwire", node.attr))
    return found


def private(tree: ast.Module) -> list[tuple[str, str]]:
    def is_public(module: str, name: str) -> bool:
        names = PUBLIC.get(module, ())
        return not name.startswith("_") if names is None else name in names

    return [pair for pair in used(tree) if not is_public(*pair)]


@pytest.mark.parametrize("name", PRINTS)
def test_examples_use_public_names_alone(name):
    tree = ast.parse((FOLDER / name).read_text())
    assert used(tree) and not private(tree)


def test_private_names_would_be_found():
    wrong = ("import gradwire.core", "from gradwire.extend import Wire", "from gradwire_lab.launch import launch")
    assert all(len(private(ast.parse(line))) == 1 for line in (*wrong, "gradwire.engine"))


@pytest.mark.parametrize("name", HERE)
def test_example_in_this_process(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(FOLDER / name)])
    runpy.run_path(str(FOLDER / name), run_name="__main__")
    assert PRINTS[name] in capsys.readouterr().out


def printed(rank: int, world: int, name: str, folder: Path, port: int) -> str:
    """What an example prints on one rank."""
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {key: str(value) for key, value in where.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "example"}
    if name not in FRAMEWORKS:
        warnings.simplefilter("error")
    sys.argv = [str(FOLDER / name), str(folder)]
    with redirect_stdout(io.StringIO()) as out:
        runpy.run_path(sys.argv[0], run_name="__main__")
    return out.getvalue()


@pytest.mark.parametrize("name", RANKS)
def test_example_in_forked_ranks(name, tmp_path):
    needs(name)
    ranks = launch(printed, RANKS[name], name, tmp_path, free_port(), backend="", threads=1, limit_seconds=250)
    assert PRINTS[name] in ranks[0]


# In `make study`, all of them; 08's callback is tested in tests/trainers.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "03_ddp.py" else pytest.mark.study)
        for name in sorted({*PRINTS} - {*HERE})
    ],
)
def test_example(name, tmp_path):
    needs(name)
    _, how = FRAMEWORKS.get(name, ("torch", ["-W", "error"]))
    done = subprocess.run(
        [sys.executable, *how, FOLDER / name, *([tmp_path] if name in FRAMEWORKS else [])],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert PRINTS[name] in done.stdout
