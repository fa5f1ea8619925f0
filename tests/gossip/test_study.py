"""Stacked replicas equal single ones, and a study trains them."""

import json
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner

from gradwire.gossip import auto_gamma
from gradwire.gossip.lr_scaling import rate_scale
from gradwire.topology import graph
from gradwire_lab.cli.main import app
from gradwire_lab.report.gossip_table import gossip_page
from gradwire_lab.train.data.images import Batch
from gradwire_lab.train.forward_backward import Passes
from gradwire_lab.train.gossip_study import finished, read, run
from gradwire_lab.train.gossip_workers import GossipWorkers
from gradwire_lab.train.rank_info import simulated_ranks
from gradwire_lab.train.recipe_files import resolve


class Small(nn.Module):
    """All that an image model is made of: convolutions with and without bias, norms, a shortcut, dropout-free."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 6, 3, padding=1, groups=2)
        self.plain = nn.BatchNorm2d(6, affine=False)
        self.head = nn.Linear(6 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        return self.head(F.relu(self.plain(self.second(x)) + x).flatten(1))


def make() -> nn.Module:
    torch.manual_seed(0)
    return Small()


@pytest.mark.parametrize("way", ["together", "sequential"])
def test_stacked_replicas_equal_single_ones(way: str) -> None:
    """Losses, gradients and running statistics, after two steps that drive them apart."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(3, 8, 2, 8, 8, generator=generator), torch.randint(0, 10, (3, 8), generator=generator)
    recipe = resolve(["digits"], ["gossip.method=dpsgd"])
    stacked, singles = GossipWorkers(make(), simulated_ranks(3), recipe), [make() for _ in range(3)]
    passes = Passes(recipe, stacked, way)
    for step in range(2):
        _, mean_loss = passes(Batch(inputs.flatten(0, 1), targets.flatten()), step)
        stacked.rows -= 0.1 * stacked.grads
        losses = []
        for rank, model in enumerate(singles):
            model.zero_grad()
            loss = F.cross_entropy(model(inputs[rank]), targets[rank])
            loss.backward()
            losses.append(loss.item())
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
        assert mean_loss.item() == pytest.approx(sum(losses) / 3, abs=1e-5)
    for rank, model in enumerate(singles):
        shown = stacked.show_(stacked.rows[rank], stacked.buffers[rank]).state_dict()
        for name, value in model.state_dict().items():
            assert torch.allclose(shown[name], value, atol=1e-5), name


STUDY = """
recipes = ["digits", "ring8"]
set = ["train.workers=4", "train.epochs=4", "train.batch=80", "optimizer.lr=0.15", "schedule.scale=none"]
[[cell]]
name = "sign"
set = ["gossip.codec=sign"]
seeds = [0, 1]
[[cell]]
name = "noise"
set = ["gossip.method=dcd", "gossip.codec=qsgd(levels=1)"]
"""


def test_a_study_trains_and_resumes(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(STUDY)
    cells, results = read(tmp_path / "study.toml"), tmp_path / "out" / "cells.jsonl"
    assert [cell.seed for cell in cells] == [0, 1, 0]
    messages: list[str] = []
    run(cells[1:], results, log=messages.append)
    assert ["left" in message for message in messages] == [False, True, False]
    messages.clear()
    run(cells, results, log=messages.append)
    assert messages[0].startswith("1 of 3 cells") and len(messages) == 2
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [line["name"] for line in lines] == ["sign", "noise", "sign"]
    assert set(finished(results)) == {cell.key for cell in cells}
    for line in (lines[0], lines[2]):
        final = line["final"]
        assert min(final["workers"]) > 0.7 and final["mean_model"] > 0.7 and 0 < final["consensus"] < 10
        assert final["value"] == pytest.approx(sum(final["workers"]) / 4)
        assert line["steps"] == final["step"] == 4 * 15 and final["sent"] > 0
    noise = lines[1]["final"]  # three levels of noise, and nothing to make up for them
    assert "diverged" in noise or noise["value"] < 0.5


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("recipe = 1", "has a key 'recipe'"),
        ("recipes = ['digits']", "at least one"),
        (STUDY + "[[cell]]\nname = 'sign'\nset = ['gossip.codec=sign']", "a cell twice"),
    ],
)
def test_invalid_study_files_are_refused(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "study.toml").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        read(tmp_path / "study.toml")


def test_the_rate_grows_with_the_degree() -> None:
    scales = [
        rate_scale(graph(spec).on(size))
        for spec, size in (("ring", 8), ("torus", 16), ("complete", 8), ("one_peer_exponential", 8))
    ]
    assert scales == [3.0, 5.0, 8.0, 2.0]
    assert rate_scale(graph("social").on(32)) == pytest.approx(1 + 2 * 89 / 32)
    assert rate_scale(graph("ring").on(1)) == 1.0


def test_the_published_page_equals_its_results(tmp_path: Path) -> None:
    root = Path(__file__).parents[2] / "docs"
    folder = root / "results" / "gossip-cifar10"
    page = tmp_path / "page.md"
    command = ["gossip-study", str(folder / "study.toml"), "--results", str(folder / "cells.jsonl"), "--no-train"]
    done = CliRunner().invoke(app, [*command, "--page", str(page)])
    assert done.exit_code == 0, done.output
    here = os.path.relpath(folder, tmp_path)
    text = page.read_text().replace(here, "results/gossip-cifar10")
    assert text == (root / "results-gossip.md").read_text()


def line_of(name: str, value: float, seed: int = 0, **options: float) -> dict[str, object]:
    final = {"value": value, "workers": [value, value], "mean_model": value, "consensus": 1.0, "gamma": 0.5}
    return {
        "name": name,
        "seed": seed,
        "world": 2,
        "final": {**final, "payload": 8e3, "step": 8},
        "gossip": {"method": "choco", "options": options},
        "environment": {"device": "cpu", "torch": "2", "command": ["gradwire"]},
    }


def test_a_page_lists_missing_cells() -> None:
    study = {"about": "# Digits", "cell": [{"name": "sign", "seeds": [2, 3]}, {"name": "topk"}]}
    line = line_of("sign", 0.1, 2, gamma=0.5)
    line["final"] |= {"diverged": "not finite at step 7; lower it"}
    page = gossip_page(study, [line], ["study.toml"])
    assert "| sign, seed 2 | 0.5 | 1.0 | diverged at step 7 |" in page
    assert "Not trained yet: sign, seed 3, topk." in page


def test_a_page_compares_auto_with_the_best_by_hand() -> None:
    """On the seeds that both have; the best is the one that auto loses most to."""
    by_hand = [{"name": f"choco gamma={gamma}", "set": [f"gossip.options.gamma={gamma}"]} for gamma in (0.5, 0.25)]
    study = {"compared": "Means.", "cell": [{"name": "choco", "published": "99"}, *by_hand]}
    lines = [line_of("choco", value, seed) for seed, value in enumerate((0.7, 0.8, 0.9))]
    lines += [line_of("choco gamma=0.5", value, seed, gamma=0.5) for seed, value in enumerate((0.72, 0.81))]
    lines += [line_of("choco gamma=0.25", 0.69, gamma=0.25)]
    page = gossip_page(study, lines, [])
    assert "|  | 75.00 (2 seeds) | 0.25, 0.5 | 0.5 | 76.50 | -1.50 |" in page
    assert page.index("| choco gamma=0.25 |") < page.index("| choco gamma=0.5 |") and "Means." in page
    assert page.count("| 99 |") == 1


def test_cells_of_another_gamma_rule_are_trained_again(tmp_path: Path) -> None:
    old = {"key": "a", "gossip": {"method": "choco", "options": {}}, "rule": auto_gamma.VERSION - 1}
    given = {"key": "b", "gossip": {"method": "choco", "options": {"gamma": 0.5}}}
    (tmp_path / "cells.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (old, given)))
    assert finished(tmp_path / "cells.jsonl").keys() == {"b"}
