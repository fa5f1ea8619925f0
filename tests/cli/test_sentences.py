"""What a disk, a damaged file or an odd recipe can do to a command ends in a sentence, never in a traceback."""

import json
import os
import resource
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from gradwire_lab.cli.main import app
from run_folders import write_run
from training_fixtures import DIGITS

SMALL = [word for override in DIGITS for word in ("--set", override)]
BIG = 10**30
ODD = ["x", None, [], {}, [1], {"a": 1}, -1, 10**400, float("nan")]


def sentence(*words: str) -> str:
    """What a refused command prints."""
    done = CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code in (1, 2) and "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("extends = 5", "extends"),
        ("extends = [3]", "extends"),
        ("about = 3", "about"),
        ('fragment = "x"', "fragment"),
        ("[train]\nepochs = inf", "train.epochs"),
        (f"[train]\nseed = {BIG}", "train.seed"),
        ("[sync]\nbucket_mb = inf", "sync.bucket_mb"),
        ("[sync]\nramp = 1e300", "sync.ramp"),
        ("[sync]\ntimeout = inf", "sync.timeout"),
        ("[sync]\ntimeout = 1e18", "sync.timeout"),
        ("[gossip]\nmethod = 'choco'\ntimeout = 1e18", "gossip.timeout"),
        ("[optimizer]\nlr = 1e308", "optimizer.lr"),
        ("[model]\noptions = {width = 1979-05-27}", "model.options.width"),
        (f"[sync]\nspec = 'qsgd({BIG})'", str(BIG)),
        ("x = " + "[" * 20_000, "TOML"),
    ],
)
def test_an_odd_recipe_is_refused_by_name(tmp_path, text, key):
    (tmp_path / "odd.toml").write_text(text)
    for words in (["plan"], ["plan", "--toml"], ["train", "--in-process", "1", "--folder", str(tmp_path / "run")]):
        assert key in sentence(words[0], str(tmp_path / "odd.toml"), *words[1:])


@pytest.mark.parametrize("spec", [f"topk({BIG})", f"qsgd({-BIG})", f"powersgd({BIG})", "topk(1e999)"])
def test_numbers_beyond_64_bits_in_a_spec_are_refused(spec):
    assert "show" in sentence("show", "--", spec)


def test_a_step_beyond_64_bits_is_refused():
    assert str(BIG) in sentence("show", f"{{0: topk(0.1), {BIG}: topk(0.01)}}")


@pytest.mark.parametrize("event", ["start", "step", "epoch", "final"])
def test_a_log_with_odd_fields_is_named(tmp_path, event):
    log = write_run(tmp_path) / "run.jsonl"
    lines = log.read_text().splitlines()
    at = max(i for i, line in enumerate(lines) if json.loads(line)["event"] == event)
    record = json.loads(lines[at])
    for key in record:
        for odd in ODD:
            log.write_text("\n".join([*lines[:at], json.dumps({**record, key: odd}), *lines[at + 1 :], "{}", ""]))
            done = CliRunner().invoke(app, ["report", str(tmp_path), "--markdown", "-"])
            assert done.exception is None or isinstance(done.exception, SystemExit), (key, odd, done.exception)
            assert done.exit_code == 0 or str(log) in done.stderr or "no run has finished" in done.stderr, (key, odd)


@pytest.mark.parametrize("text", ["[" * 100_000, "3", "null", '{"command": 3}', "model = 3", "[[model]]"])
@pytest.mark.parametrize("name", ["run.jsonl", "environment.json", "recipe.toml"])
def test_a_damaged_file_of_a_run_is_named(tmp_path, name, text):
    folder = write_run(tmp_path)
    (folder / name).write_text(f"{text}\n")
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--markdown", "-"])
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert done.exit_code == 0 or str(folder / name) in done.stderr or "no run has finished" in done.stderr


def test_deep_json_in_a_checkpoint_is_damage(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "last.json").write_text("[" * 100_000)
    assert "last.json" in sentence("train", "digits", "--in-process", "1", "--folder", str(run), "--resume")


@pytest.mark.parametrize("mode", ["--in-process", "--workers"])
def test_a_disk_that_is_full_is_named(tmp_path, mode):
    """No file may grow beyond some kilobytes, as on a full disk: no checkpoint fits."""
    words = ["train", "digits", mode, "2", "--folder", str(tmp_path / "run"), *SMALL]
    command = [sys.executable, "-c", "from gradwire_lab.command import run; run()", *words]
    limit = 6 * 1024

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    environment = {**os.environ, "GRADWIRE_KERNELS": "reference"}  # compiled kernels need a place on the disk, too
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=full, env=environment)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert ".safetensors" in done.stderr and "no checkpoint" in done.stderr


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    run = tmp_path / "run"
    (run / "run.lock").mkdir(parents=True)  # not even root can write such a file
    assert str(run) in sentence("train", "digits", "--in-process", "1", "--folder", str(run))
    (run / "run.lock").rmdir()
    (run / "run.jsonl.partial").mkdir()
    assert "run.jsonl.partial" in sentence("train", "digits", "--in-process", "1", "--folder", str(run), *SMALL)
