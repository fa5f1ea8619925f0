"""Batched passes of all workers, captured and with faster kernels, compute what passes one by one compute."""

import pytest
import torch

from gradwire_lab.train.loop import Training
from gradwire_lab.train.rank_info import simulated_ranks
from training_fixtures import recipe_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
IMAGES = ("train.batch=8", "train.batch_per=worker", "model.options={}", "train.channels_last=true")
OBSERVED = ("sync.spec=variance", "train.accumulate=2", "train.batch=3", "train.batch_per=worker")
COLUMNS = ("model.options={hidden=24, layers=2, dropout=0.0, tied=false}", "optimizer.local_clip=0.05", "data.length=9")


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("digits", (*IMAGES, "model.name=resnet20")),
        ("digits", (*IMAGES, "model.name=resnet9", "data.sizes=[[0, 32]]")),
        ("pydoc-lstm", COLUMNS),
        ("pydoc-lstm", (*COLUMNS, *OBSERVED)),
    ],
)
def test_gradients_are_those_of_passes_one_by_one(name, overrides, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    ways = [recipe_of(name, *overrides, f"train.passes={how}") for how in ("together", "sequential")]
    one, other = (Training(recipe, simulated_ranks(2, "cuda:0")) for recipe in ways)
    torch.set_float32_matmul_precision("highest")
    for step, batch in zip(range(3), one.loader.epoch(0), strict=False):
        (grads, loss), (expected, wanted) = one.strategy.passes(batch, step), other.strategy.passes(batch, step)
        torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-5)
        for mine, theirs in zip(grads, expected, strict=True):
            for each, x in theirs.items():
                # Rounding may decide which of equals is the maximum, and where its gradient goes.
                assert (mine[each] - x).norm() <= 0.1 * x.norm() + 1e-6, each
    for mine, theirs in zip(one.strategy.workers.buffers, other.strategy.workers.buffers, strict=True):
        for each, x in theirs.items():
            torch.testing.assert_close(mine[each], x, rtol=1e-3, atol=1e-4, msg=each)


def test_second_moments_are_those_of_passes_one_by_one(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    noted = []
    for how in ("together", "sequential"):
        training = Training(
            recipe_of("pydoc-lstm", *COLUMNS, *OBSERVED, f"train.passes={how}"), simulated_ranks(2, "cuda:0")
        )
        torch.set_float32_matmul_precision("highest")
        seen = [{}, {}]
        for wire, notes in zip(training.strategy.workers.wires, seen, strict=True):
            wire.observe = notes.update
        for step, batch in zip(range(2), training.loader.epoch(0), strict=False):
            training.strategy.passes(batch, step)
        noted += [seen]
    for mine, theirs in zip(*noted, strict=True):
        assert mine.keys() == theirs.keys() and mine
        for name, x in theirs.items():
            assert (mine[name] - x).norm() <= 1e-3 * x.norm(), name
