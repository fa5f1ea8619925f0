import json
import os

import pytest
from rich.console import Console
from typer.testing import CliRunner

from gradwire_lab.cli import output
from gradwire_lab.cli.main import app
from gradwire_lab.cli.train import _left, _note_unused
from gradwire_lab.train import checkpoint, recipe_files
from gradwire_lab.train.run_folder import read
from training_fixtures import DIGITS

SMALL = [word for override in DIGITS for word in ("--set", override)]


def run(*words: str, **environment: str):
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200", **environment})


def test_recipes_are_listed_with_what_they_are():
    done = run("recipes")
    assert done.exit_code == 0
    assert "cifar10-resnet9-topk-model" in done.stdout
    assert "Fragments" in done.stdout
    assert "cifar10-resnet9" not in run("recipes", "--fragments").stdout
    names = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("ptb-lstm700")]
    assert names == sorted(names)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["cifar10-resnet20", "dgc", "ramp5"],
            [
                "269,722 parameters, 8 workers",
                "48 steps an epoch",
                "0.1 x 8 for the batch (5 epochs of warm-up, then cosine)",
                "topk(0.001)",
            ],
        ),
        (["ptb-lstm700-topk", "--workers", "4"], ["21,861,200 parameters, 4 workers", "32 examples a worker"]),
        (["ptb-lstm1500-dgc"], ["5 examples a worker", "1,328 steps an epoch"]),  # as with the text at hand
        (
            ["imagenet-resnet50", "--set", "train.epochs=9"],  # of 90
            ["25,557,032 parameters", "0.5 epochs of warm-up, then steps after epochs 3, 6, 8)"],
        ),
        (["imagenet-resnet50"], ["then steps after epochs 30, 60, 80), momentum 0.9 (Nesterov), weight decay 0.0001"]),
        (["digits", "--spec", "powersgd(2)"], ["low rank"]),
    ],
)
def test_a_plan_needs_no_data(words, said):
    done = run("plan", *words)
    assert done.exit_code == 0, done.stderr
    for words in said:
        assert words in done.stdout


def test_a_plan_says_from_which_step_its_lanes_are():
    starved = run("plan", "pydoc-gpt", "--spec", "topk(0.01)").stdout
    assert "AdamW normalizes them" in starved and "AdamW normalizes" not in run("plan", "pydoc-gpt").stdout
    ramped = run("plan", "digits", "--spec", "dgc(0.01)", "--set", "sync.ramp=5").stdout
    assert "lanes from step 100 on" in ramped  # 20 steps an epoch
    short = run("plan", "digits", "--spec", "dgc(0.01)", "--set", "sync.ramp=5", "--set", "train.iterations=50").stdout
    assert "lanes from step 33 on" in short and "topk(0.0625)" in short
    assert "lanes\n" in run("plan", "digits").stdout.replace(" ", "")


def test_a_plan_has_a_line_for_each_lane_of_a_narrow_terminal(monkeypatch):
    monkeypatch.setattr(output, "Console", lambda **_: Console(width=80))
    lines = run("plan", "cifar10-resnet20", "dgc", "ramp5", "fp16").stdout.splitlines()
    first = next(i for i, line in enumerate(lines) if "─" in line) + 1
    assert [line.split()[0] for line in lines[first : first + 2]] == ["dim<=1", "*"]
    assert "topk(0.001) | fp16 | int32" in lines[first + 1] and "1,602" in lines[first + 1]
    assert lines[first + 2].startswith("Not shown in 80 columns: units") and max(map(len, lines)) <= 80


def test_a_plan_tells_equal_stages_once():
    rows = run("plan", "cifar10-resnet20", "dgc", "ramp5", "fp16").stdout.split("from step")[-1].splitlines()
    told = [[cell.strip() for cell in row.split("│")[1:-1]] for row in rows if "│" in row]
    assert [row[0] for row in told] == ["0", "48", "96", "144", "192"]
    assert len({tuple(row[1:]) for row in told}) == len(told)


def test_a_plan_bounds_ratios_where_it_bounds_bytes():
    payload, ratio = run("plan", "digits", "--spec", "topk(0.01)").stdout.splitlines()[-2].split("│")[2:4]
    assert payload.strip().startswith("<= ") and ratio.strip().startswith(">= ")
    payload, ratio = run("plan", "digits", "--spec", "fp16").stdout.splitlines()[-2].split("│")[2:4]
    assert "<" not in payload and ">" not in ratio


def test_train_evaluate_and_resume(tmp_path):
    folder = tmp_path / "digits-short-3"
    words = ["digits", *SMALL, "--in-process", "2", "--runs", str(tmp_path), "--suffix", "short", "--seed", "3"]
    done = run("train", *words)
    assert done.exit_code == 0, done.output
    assert "test top1" in done.stdout
    assert str(folder) in done.stdout.replace("\n", "")
    assert json.loads((folder / "run.jsonl").read_text().splitlines()[0])["recipe"] == "digits"
    refused = run("train", *words)
    assert refused.exit_code == 2
    assert "--resume" in refused.stderr
    second = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
    refused = run("train", "digits", "--folder", str(folder), **second)  # at once: it must not wait for the first rank
    assert refused.exit_code == 2 and "holds a run already" in refused.stderr
    assert run("train", *words, "--resume").exit_code == 0
    score = run("evaluate", str(folder), "--last")
    assert score.exit_code == 0
    assert "top1" in score.stdout
    refused = run("evaluate", str(folder), "--split", "valid")
    assert refused.exit_code == 2 and "digits has no split 'valid' to evaluate; choose test" in refused.stderr
    told = (folder / "recipe.toml").read_text()
    for more, sentence in (
        (["--set", "train.epochs=1"], "end after 5; give more in train.epochs"),
        (["--set", "optimizer.lr=0.5"], "was trained with optimizer.lr = 0.05, but would continue with 0.5"),
        (["--spec", "sign"], "with 'sign'; leave that as it was, train apart with --suffix"),
    ):
        refused = run("train", *words, *more, "--resume")
        assert refused.exit_code == 2 and sentence in refused.stderr
        assert (folder / "recipe.toml").read_text() == told
    damaged = checkpoint.find(folder, "last") / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    for refused in (run("evaluate", str(folder), "--last"), run("train", *words, "--resume")):
        assert refused.exit_code == 2 and f"{damaged}" in refused.stderr
    assert str(damaged) in _left(folder)
    refused = run("train", *words, "--overwrite", "--set", "model.options.width=-3")
    assert refused.exit_code == 2 and "model.options.width = -3" in refused.stderr
    assert damaged.is_file() and (folder / "recipe.toml").read_text() == told
    assert run("train", *words, "--overwrite", "--set", "train.iterations=1").exit_code == 0
    assert {path.name for path in (folder / "checkpoints").glob("step-*")} == {"step-1"}


CRASHING = """
import torch


class Net(torch.nn.Linear):
    def forward(self, x):
        raise RuntimeError("out of luck")


def make():
    return Net(64, 10)
"""


def test_a_run_that_took_no_step_leaves_its_folder_to_the_next(tmp_path):
    (tmp_path / "mine.py").write_text(CRASHING)
    words = ["digits", "--in-process", "1", "--set", "train.iterations=1", "--folder", str(tmp_path / "run")]
    crashed = run("train", *words, "--model", f"{tmp_path / 'mine.py'}:make")
    assert "out of luck" in str(crashed.exception) and (tmp_path / "run" / "run.jsonl").is_file()
    assert run("train", *words).exit_code == 0
    assert [record["event"] for record in read(tmp_path / "run")] == ["start", "step", "epoch", "final"]
    refused = run("train", *words)
    assert refused.exit_code == 2 and "holds a run already" in refused.stderr
    (tmp_path / "run" / "run.jsonl").unlink()
    assert "holds a run already" in run("train", *words).stderr, "there is a checkpoint"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.jsonl").write_text("what is this?\n")
    words[-1] = str(tmp_path / "other")
    assert "holds a run already" in run("train", *words).stderr, "and there is somebody else's"


def test_ones_own_model_is_found_from_elsewhere(tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    (home / "mine.py").write_text(
        CRASHING.replace('raise RuntimeError("out of luck")', "return super().forward(x.flatten(1))")
    )
    monkeypatch.chdir(home)
    words = ["digits", "--model", "mine.py:make", "--in-process", "1", "--set", "train.iterations=1"]
    assert run("train", *words).exit_code == 0
    score = run("evaluate", "runs/digits-0", "--allow-code")
    assert score.exit_code == 0
    monkeypatch.chdir(tmp_path)
    assert run("evaluate", "home/runs/digits-0", "--allow-code").stdout == score.stdout
    (home / "mine.py").rename(tmp_path / "mine.old")
    lost = run("evaluate", "home/runs/digits-0", "--allow-code")
    assert lost.exit_code == 2 and "or copy mine.py into home/runs/digits-0" in lost.stderr
    assert "--toml" not in lost.stderr
    (tmp_path / "mine.old").rename(home / "runs" / "digits-0" / "mine.py")
    (tmp_path / "mine.py").write_text(CRASHING)  # another of the same name
    assert run("evaluate", "home/runs/digits-0", "--allow-code").stdout == score.stdout
    more = ["--runs", "home/runs", "--resume", "--set", "train.iterations=2"]
    words[2] = "home/runs/digits-0/mine.py:make"
    assert run("train", *words, *more).exit_code == 0, "the same model, though named by another path"


def test_a_graph_that_is_refused_leaves_no_folder(tmp_path):
    graph = ["--set", "gossip.graph=edges([(0,1),(2,3)])"]
    for who in (["--in-process", "4"], ["--workers", "4"]):
        done = run("train", "digits", "ring8", "choco", "sign", *who, *graph, "--runs", str(tmp_path))
        assert done.exit_code == 2 and "disconnected" in done.stderr
        assert list(tmp_path.iterdir()) == []


def test_an_interrupt_ends_all_workers(tmp_path):
    doomed = ["--set", "model.name=training_fixtures:KillsRank1", "--set", f"model.options.pid={os.getpid()}"]
    words = ["digits", *SMALL, *doomed, "--set", "train.epochs=10000", "--workers", "2", "--folder", str(tmp_path)]
    done = run("train", *words)
    assert done.exit_code == 130, done.output
    assert "stopped; the last checkpoint is whole" in done.stderr
    assert checkpoint.find(tmp_path, "last").name == "step-5"


def test_an_emulated_link_of_the_environment_is_read_before_anything_starts(tmp_path):
    done = run("train", "digits", "--workers", "2", "--folder", str(tmp_path / "run"), GRADWIRE_LINK="fast")
    assert done.exit_code == 2 and "cannot read 'fast'" in done.stderr
    assert not (tmp_path / "run").exists()
    assert run("demo", GRADWIRE_LINK="fast").exit_code == 2


def test_a_spec_that_workers_who_gossip_do_not_use_is_told(capsys):
    for overrides in (["gossip.codec=sign"], ["sync.spec=dense"], []):
        assert capsys.readouterr().err == ""
        _note_unused(recipe_files.resolve(["digits", "ring8"], overrides))
    assert "sync.spec = 'topk(0.01) | sign' is not used" in capsys.readouterr().err


def test_data_beside_a_model_that_are_not_trained_on_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def make(): ...\n\n\ndef data(): ...\n")
    (tmp_path / "alone.py").write_text("def make(): ...\n")
    _note_unused(recipe_files.resolve(["digits"], ["model.name=mine.py:make"]))
    assert "trains on digits; mine.py:data is not used" in capsys.readouterr().err
    for used in (["model.name=mine.py:make", "data.name=mine.py:data"], ["model.name=alone.py:make"], []):
        _note_unused(recipe_files.resolve(["digits"], used))
        assert not capsys.readouterr().err


def test_no_checkpoint_is_promised_where_there_is_none(tmp_path):
    assert "there is no checkpoint in" in _left(tmp_path)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train", "digist"], "did you mean 'digits'?"),
        (["train", "digits", "--set", "train.epoch=3"], "did you mean 'epochs'?"),
        (["train", "digits", "--in-process", "2", "--workers", "2"], "give one of --workers"),
        (["train", "dgc"], "as in: gradwire train digits dgc"),
        (["plan", "digits", "ring8", "--spec", "sign"], "write --set 'gossip.codec=sign' instead"),
        (["train", "ptb-lstm700", "--workers", "1", "--runs", "{tmp}"], "pass --data DIR"),
        (["train", "digits", "--model", "mine.py:make"], "there is no file mine.py"),
        (["evaluate", "{tmp}"], "is not a run folder"),
        (["show", "auto"], "`gradwire advise`"),
        (["train", "digits", "--spec", ""], "cannot read the spec ''"),
        (["train", "digits", "--devices", "gpu", "--runs", "{tmp}"], "there is no device 'gpu'"),
        (["train", "digits", "--devices", "4096", "--runs", "{tmp}"], "there is no GPU 4096"),
        (["train", "digits", "--devices", "cpu,cpu", "--in-process", "2"], "2 devices, and only 1 can be used"),
        (["train", "digits", "--runs", "/dev/null"], "cannot make the folder /dev/null/digits-0"),
        (["plan", "digits", "--set", "model.options.widht=3"], "did you mean 'width'?"),
        (["train", "digits", "--workers", "200", "--runs", "/dev/null"], "too small for 200 workers"),
        (
            ["train", "digits", "--set", "data.name=text", "--set", "data.options.file=own.txt", "--runs", "{tmp}"],
            "the model cnn takes images, and the data text are text; name another model, as in --set model.name=lstm",
        ),
        (
            ["plan", "digits", "--set", "model.name=gpt"],
            "the model gpt takes text, and the data digits are images; name another model, as in --set model.name=cnn",
        ),
        (["plan", "pydoc-lstm", "--set", "data.name=text"], "--set data.options.file=FILE"),
    ],
)
def test_what_is_wrong_gets_a_sentence(tmp_path, words, sentence):
    done = run(*(word.replace("{tmp}", str(tmp_path)) for word in words))
    assert done.exit_code == 2, done.output
    assert sentence in done.stderr
