"""What `advise` and `auto` choose for a GPT with AdamW has not lost in any training of the project's own."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import gradwire
from gradwire_lab.autotune.wire_costs import WireCosts
from gradwire_lab.cli.main import app
from gradwire_lab.perf_model.calibration import Calibration, CodingCost, save
from gradwire_lab.perf_model.candidates import CANDIDATES, automatic
from gradwire_lab.perf_model.model import ModelProfile

RESULTS = Path(__file__).parents[2] / "docs" / "results"
FILES = ("adamw-h200.jsonl", "adamw-cpu.jsonl")
LOSS = 1.01  # times dense training's


def compared(file: str) -> dict[str, bool]:
    """By spec: whether it lost against dense training, at the rate that suits dense best, over the same seeds."""
    rows = [json.loads(line) for line in (RESULTS / file).read_text().splitlines()]
    rate = "lr" if "lr" in rows[0] else "rate"
    best = min((row for row in rows if row["spec"] == "dense"), key=lambda row: row["test_loss"])[rate]
    losses = {(row["spec"], row["seed"]): row["test_loss"] for row in rows if row[rate] == best}
    found = {}
    for spec in {spec for spec, _ in losses}:
        seeds = [seed for seed in range(9) if (spec, seed) in losses]
        ratio = sum(losses[spec, seed] for seed in seeds) / sum(losses["dense", seed] for seed in seeds)
        found[str(gradwire.method(spec))] = ratio > LOSS
    return found


def lost() -> set[str]:
    """The specs that lost wherever they were compared."""
    found = [compared(file) for file in FILES]
    return {spec for each in found for spec in each if all(other.get(spec, True) for other in found)}


def methods(specs: tuple[str, ...]) -> set[str]:
    return {str(gradwire.method(spec)) for spec in specs}


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)
        self.block = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.block(self.tokens(tokens), mask, is_causal=True))


def test_what_auto_may_try_has_not_lost() -> None:
    model = GPT()
    wire = gradwire.compress(model, "auto", link="10mbit")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model(torch.randint(0, 50, (2, 8))).square().mean().backward()
    wire()
    optimizer.step()
    tried = WireCosts(wire, False, False, None).specs
    assert tried and not methods(tried) & lost()
    assert methods(automatic()) & lost()  # what SGD may have


@pytest.mark.parametrize("link", ["1gbit", "10mbit", "1mbit"])
def test_what_is_advised_has_not_lost(link: str, tmp_path: Path) -> None:
    profile = ModelProfile.of(dict(GPT().named_parameters()))
    costs = {spec: CodingCost(0.0, 0.0) for spec in ("ddp-fp32", "ddp-bf16", *CANDIDATES)}
    save(Calibration(profile, 1e-4, 2e-4, costs, world=4, note="by hand"), tmp_path / "figures.json")
    where = ("--workers", "4", "--link", link, "--calibration", str(tmp_path / "figures.json"), "--json")
    done = CliRunner().invoke(app, ["advise", *where, "--optimizer", "adamw"])
    choice = json.loads(done.output)["choice"]
    assert choice == "onebit_adam(start=450)" and not methods((choice,)) & lost()
