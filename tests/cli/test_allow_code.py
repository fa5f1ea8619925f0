"""Code that a recipe or a run folder names is run only where the command line allows it."""

import pytest
from typer.testing import CliRunner

from gradwire_lab.cli.main import app
from gradwire_lab.train.models import load
from gradwire_lab.train.recipe_files import resolve

SPY = """
from os import system
from pathlib import Path
import torch


def leave_mark():
    Path("{mark}").write_text("code has run")


leave_mark()  # a file is imported once by a process


class Net(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x.flatten(1))


def make():
    leave_mark()
    return Net(64, 10)
"""


def run(*words: str):
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


@pytest.fixture
def mark(tmp_path, monkeypatch):
    """A recipe that names a file, which leaves a mark when it is run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SPY.format(mark=tmp_path / "mark"))
    (tmp_path / "foreign.toml").write_text('extends = ["digits"]\n[model]\nname = "mine.py:make"\n')
    return tmp_path / "mark"


def test_a_recipe_that_names_a_file_needs_leave(mark):
    for words in (["plan"], ["train", "--in-process", "1"], ["compare", "--specs", "dense"]):
        refused = run(words[0], "foreign.toml", *words[1:])
        assert refused.exit_code == 2 and "mine.py:make" in refused.stderr and "--allow-code" in refused.stderr
    assert not mark.exists()
    assert run("plan", "foreign.toml", "--allow-code").exit_code == 0
    assert run("plan", "foreign.toml", "--model", "mine.py:make").exit_code == 0
    assert mark.exists()


@pytest.mark.parametrize("leave", [[], ["--allow-code"]])
def test_a_recipe_names_no_function_of_a_module(mark, tmp_path, leave):
    (tmp_path / "foreign.toml").write_text('[model]\nname = "os:system"\noptions = {command = "touch mark"}\n')
    refused = run("plan", "foreign.toml", *leave)
    assert refused.exit_code == 2 and "os:system" in refused.stderr and not mark.exists()


def test_a_run_folder_runs_nothing_without_leave(mark):
    small = ["--in-process", "1", "--set", "train.iterations=1"]
    assert run("train", "foreign.toml", "--allow-code", "--folder", "run", *small).exit_code == 0
    mark.unlink()
    refused = run("evaluate", "run")
    assert refused.exit_code == 2 and "--allow-code" in refused.stderr
    assert run("report", "run", "--markdown", "-").exit_code == 0
    assert "was trained with" in run("train", "digits", "--folder", "run", "--resume", *small).stderr
    assert not mark.exists()
    score = run("evaluate", "run", "--allow-code")
    assert score.exit_code == 0 and mark.exists()
    assert run("evaluate", "run", "--model", "mine.py:make").stdout == score.stdout


def test_only_functions_that_a_file_defines_can_be_named(mark):
    with pytest.raises(ValueError, match="'system'"):
        load("mine.py:system")


def test_models_of_installed_packages_are_trusted(mark, tmp_path, monkeypatch):
    (tmp_path / "net-1.dist-info").mkdir()
    (tmp_path / "net-1.dist-info" / "METADATA").write_text("Name: net\nVersion: 1\n")
    (tmp_path / "net-1.dist-info" / "entry_points.txt").write_text("[gradwire.models]\nblank = torch.nn:Identity\n")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "foreign.toml").write_text('[model]\nname = "blank"\n')
    assert resolve(["foreign.toml"]).model.name == "blank"
    with pytest.raises(ValueError, match="'blank'"):
        load("blnk")
