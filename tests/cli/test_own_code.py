"""A user's own model, data and codec, from every command that trains."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradwire.core import plugins, registry
from gradwire_lab.bench.network import workloads
from gradwire_lab.cli import compare as compare_command
from gradwire_lab.cli.main import app
from gradwire_lab.train.data import load
from gradwire_lab.train.recipe_files import resolve
from gradwire_lab.train.spec_lists import split_specs
from gradwire_lab.train.user_files import named_files

ROOT = Path(__file__).parent.parent.parent
MINE = """
import torch


def make(channels, size, classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(channels * size**2, classes))


def data(num=120):
    images, labels = torch.randn(num, 1, 4, 4), torch.arange(num) % 3
    return images[20:], labels[20:], images[:20], labels[:20]


def flat():
    return torch.zeros(3), torch.zeros(3), torch.zeros(3), torch.zeros(3)
"""


def run(*words: str):
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with mine.py and crowd.py, the quantizer of Contributing; what they register is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))
    monkeypatch.setenv(plugins.VARIABLE, "")
    page = (ROOT / "CONTRIBUTING.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "crowd.py").write_text(next(block for block in blocks if '"crowd"' in block))
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def test_own_model_data_and_codec_are_trained_in_processes(home: Path) -> None:
    words = ["train", "digits", "--model", "mine.py:make", "--set", "data.name=mine.py:data", "--import", "crowd.py"]
    done = run(
        *words, "--spec", "topk(0.5) | crowd", "--workers", "2", "--set", "train.iterations=1", "--folder", "run"
    )
    assert done.exit_code == 0, done.output
    assert "51 parameters" in done.output and "crowd" in (home / "run" / "run.jsonl").read_text()


def test_the_example_of_the_page_on_plots_is_compared_without_a_recipe(home: Path) -> None:
    page = (ROOT / "docs" / "paper.md").read_text()
    (home / "mine.py").write_text(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0])
    words = ["--model", "mine.py:make", "--set", "data.name=mine.py:data", "--set", "train.iterations=2"]
    done = run("compare", *words, "--specs", "int8", "--seeds", "1", "--in-process", "2")
    assert done.exit_code == 0, done.output
    assert (home / "runs" / "mine-int8-0").is_dir() and (home / "runs" / "mine-results.md").is_file()


def test_a_training_without_a_recipe_has_the_name_of_the_models_file(home: Path) -> None:
    words = ["--model", "mine.py:make", "--set", "data.name=mine.py:data", "--set", "train.iterations=1"]
    assert run("train", *words, "--in-process", "2", "--suffix", "quick").exit_code == 0
    assert [folder.name for folder in (home / "runs").iterdir()] == ["mine-quick-0"]


def test_a_class_that_lacks_a_method_is_refused_where_it_is_registered(home: Path) -> None:
    lines = (home / "crowd.py").read_text()
    (home / "crowd.py").write_text(lines[: lines.index("    @property")])
    refused = run("show", "crowd", "--import", "crowd.py")
    assert refused.exit_code == 2
    assert "Crowd'> lacks traits, which every quantizer has; write for example traits = Traits()" in refused.stderr


def test_compare_trains_a_model_of_ones_own(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[list[str]] = []

    class Recorder(compare_command.TrainCommand):
        def __call__(self, recipes: tuple[str, ...], overrides: tuple[str, ...], folder: Path) -> None:
            lines.append(self.line(recipes, overrides, folder))

    monkeypatch.setattr(compare_command, "TrainCommand", Recorder)
    words = ["--specs", "fp32; crowd", "--seeds", "1", "--import", "crowd.py"]
    assert run("compare", "digits", "--model", "mine.py:make", *words).exit_code == 0
    assert len(lines) == 2 and all("model.name=mine.py:make" in line for line in lines)
    assert "crowd.py" in os.environ[plugins.VARIABLE]  # which the trainings inherit
    with_codec, without = (
        named_files(resolve(["digits"], [f"sync.spec={spec}"])) for spec in ("topk(0.1)|crowd", "fp32")
    )
    assert [path.name for path in with_codec] == ["crowd.py"] and not without  # whose change trains what again


def test_a_file_that_registers_names_may_be_imported_again(home: Path) -> None:
    for _ in range(2):
        assert run("show", "crowd", "--import", "crowd.py").exit_code == 0
    (home / "crowd.py").write_text((home / "crowd.py").read_text() + "\n")
    assert run("show", "crowd", "--import", "crowd.py").exit_code == 0  # it has changed, so it is imported again
    (home / "other.py").write_text((home / "crowd.py").read_text())
    refused = run("show", "crowd", "--import", "other.py")
    assert refused.exit_code == 2 and "'crowd'" in refused.stderr
    assert "nofile.py" in run("show", "sign", "--import", "nofile.py").stderr


def test_installed_plugins_are_found(home: Path) -> None:
    (home / "crowded-1.dist-info").mkdir()
    (home / "crowded-1.dist-info" / "METADATA").write_text("Name: crowded\nVersion: 1\n")
    (home / "crowded-1.dist-info" / "entry_points.txt").write_text("[gradwire.plugins]\ncrowded = crowd\n")
    code = "import sys, gradwire; assert 'crowd' not in gradwire.registered()\n"  # which is remembered
    code += f"sys.path.insert(0, {str(home)!r}); print(gradwire.method('topk(0.1)|crowd'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "crowd" in done.stdout, done.stderr


def test_own_data_are_four_tensors_or_a_task(home: Path) -> None:
    task = load("mine.py:data", options={"num": 50})
    assert task.facts == {"classes": 3, "channels": 1, "size": 4} and len(task.train.labels) == 30
    with pytest.raises(ValueError, match="'nmu'"):
        load("mine.py:data", options={"nmu": 50})
    with pytest.raises(ValueError, match=r"mine\.py:flat.*\[:, None, None, :\].*nn\.Flatten"):
        load("mine.py:flat")
    with pytest.raises(ValueError, match="'digits'"):
        resolve(["digits"], ["data.name=digit"])


def test_a_recipe_that_names_a_data_file_needs_leave(home: Path) -> None:
    (home / "foreign.toml").write_text('extends = ["digits"]\n[data]\nname = "mine.py:data"\n')
    refused = run("plan", "foreign.toml")
    assert refused.exit_code == 2 and "mine.py:data" in refused.stderr and "--allow-code" in refused.stderr
    assert run("plan", "foreign.toml", "--allow-code").exit_code == 0
    assert run("plan", "foreign.toml", "--set", "data.name=mine.py:data").exit_code == 0
    (home / "foreign.toml").write_text('extends = ["digits"]\n[data]\nname = "os:system"\n')
    assert "os:system" in run("plan", "foreign.toml", "--allow-code").stderr


def test_a_model_of_ones_own_serves_measurements_too(home: Path) -> None:
    workload = workloads.load("mine.py:make")
    assert workload.loss(workload.model).isfinite() and not workloads.is_workload("mine.py:make")
    (home / "pair.py").write_text(
        textwrap.dedent("""
            import torch
            def make():
                return torch.nn.Linear(2, 2), lambda run: run(torch.ones(2)).sum()
        """)
    )
    assert workloads.is_workload("pair.py:make")


def test_semicolons_separate_specs() -> None:
    expected = ["topk(0.1, exact=True)", "sign; feedback=none", "int8"]
    assert split_specs("topk(0.1, exact=True); sign; feedback=none;int8 ;") == expected
    with pytest.warns(FutureWarning, match="semicolons"):
        assert split_specs("topk(0.1, exact=True), int8", commas=True) == [expected[0], expected[2]]


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        ("codec", ["topk(0.01) | mine"]),
        ("selector", ["mine(16) | sign"]),
        ("transform", ["mine | sign(per=64)"]),
        ("exchange", ["int4", "--exchange", "mine"]),
        ("feedback", ["topk(0.01)", "--feedback", "mine"]),
    ],
)
def test_new_writes_a_file_that_commands_import(home: Path, kind: str, shown: list[str]) -> None:
    written = run("new", kind, "mine", "--folder", "own")
    assert written.exit_code == 0, written.output
    assert "own/mine.py\n" in written.output and "gradwire show" in written.output and "--own" in written.output
    done = run("show", *shown, "--import", "own/mine.py")
    assert done.exit_code == 0 and "mine" in done.output, done.output
    card = "".join(run("codecs", "mine", "--import", "own/mine.py").output.split())
    assert card.endswith("own/mine.py"), "where it lives"
    again, taken, odd = (run("new", kind, name, "--folder", "own") for name in ("mine", "residual", "My"))
    assert all(one.exit_code == 2 for one in (again, taken, odd))
    keyword = run("new", kind, "true")
    assert keyword.exit_code == 2 and "True is a word of Python" in keyword.stderr and not Path("true.py").exists()
    assert "'mine'" in again.stderr and "'residual'" in taken.stderr and "'My'" in odd.stderr


def test_an_exchange_and_a_feedback_of_ones_own_are_trained(home: Path) -> None:
    for kind, name in (("exchange", "middle"), ("feedback", "fading")):
        assert run("new", kind, name).exit_code == 0
    words = ["train", "digits", "--spec", "int4", "--set", "sync.exchange=middle", "--set", "sync.feedback=fading"]
    files = ["--import", "middle.py", "--import", "fading.py"]
    done = run(*words, *files, "--in-process", "3", "--set", "train.iterations=2", "--folder", "run")
    assert done.exit_code == 0, done.output
    assert "middle" in (home / "run" / "run.jsonl").read_text()
