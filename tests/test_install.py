"""Wheel and sdist of this tree work in an environment that has no other file of the project.

Packages that gradwire needs are lent by the environment of the tests, since torch alone takes minutes to install.
"""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

from gradwire.version import VERSION
from run_folders import write_run

ROOT = Path(__file__).parent.parent
LIBRARY = {"torch", "numpy", "numba", "safetensors", "networkx"}  # what `pip install gradwire` brings
MOST_BYTES = 2_000_000  # of a wheel
USE = """
import sys
from importlib import resources
import torch, gradwire, gradwire_lab
from gradwire.extend import roundtrip
from typer.testing import CliRunner
from gradwire_lab.cli.main import app
assert all(module.__file__.startswith(sys.prefix) for module in (gradwire, gradwire_lab))
decoded, _, ratio = roundtrip("topk(0.01) | sign", torch.randn(1000))
assert decoded.count_nonzero() == 10 and ratio > 50
for words in (["recipes"], ["plan", "digits"], ["codecs"], ["new", "codec", "own"], ["report", sys.argv[1]]):
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, (words, done.output, done.exception)
"""


def run(*words: object, folder: Path) -> str:
    """The output of a command that finds no file of this tree by itself."""
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "GRADWIRE_IMPORT")}
    plain = {**own, "GRADWIRE_KERNELS": "reference"}  # a new place would compile all kernels again
    done = subprocess.run([*map(str, words)], cwd=folder, env=plain, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment(folder: Path) -> Path:
    """The interpreter of a new environment without any package."""
    venv.create(folder, symlinks=True)
    return folder / "bin" / "python"


def pip(python: Path, *words: object) -> None:
    run(sys.executable, "-m", "pip", "--quiet", "--python", python, *words, folder=python.parent)


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel, and a wheel that was made of the sdist alone."""
    folder = tmp_path_factory.mktemp("builds")
    python = environment(folder / "builder")
    try:
        pip(python, "install", "hatchling>=1.27")
    except AssertionError as missing:
        pytest.skip(f"there is no index of packages that has hatchling: {str(missing)[-200:]}")
    run(python, "-m", "hatchling", "build", "-d", folder, folder=ROOT)
    (packed,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    offline = ("--no-deps", "--no-index", "--no-build-isolation")
    pip(python, "wheel", *offline, "--wheel-dir", folder / "unpacked", packed)
    return {"wheel": wheel, "sdist": next((folder / "unpacked").glob("*.whl"))}


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_it_works_where_nothing_else_of_the_project_is(builds: dict[str, Path], kind: str, tmp_path: Path) -> None:
    python = environment(tmp_path / "empty")
    pip(python, "install", "--no-deps", "--no-index", builds[kind])
    (site,) = (tmp_path / "empty").glob("lib/python3*/site-packages")
    (site / "lent.pth").write_text(sysconfig.get_path("purelib"))  # behind its own; .pth files in there are not read
    assert run(python.with_name("gradwire"), "--version", folder=tmp_path).split()[-1] == VERSION
    run(python, "-c", USE, write_run(tmp_path), folder=tmp_path)
    assert (tmp_path / "own.py").is_file() and (tmp_path / "report.html").stat().st_size > 100_000


def test_a_wheel_is_small_and_needs_little(builds: dict[str, Path]) -> None:
    wheel = builds["wheel"]
    assert wheel.stat().st_size < MOST_BYTES
    with zipfile.ZipFile(wheel) as archive:
        (about,) = (name for name in archive.namelist() if name.endswith("dist-info/METADATA"))
        told = message_from_string(archive.read(about).decode())
        names = archive.namelist()
    needed = [text for text in told.get_all("Requires-Dist", []) if "extra ==" not in text]
    assert {text.partition(">")[0] for text in needed} == LIBRARY
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"gradwire", "gradwire_lab"}
    assert any(name.endswith("licenses/NOTICES.md") for name in names)
