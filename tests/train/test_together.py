"""Workers that pass through their model together compute what they would one after another."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from gradwire_lab.train.batched_pass import Unsupported
from gradwire_lab.train.loop import Training
from gradwire_lab.train.rank_info import simulated_ranks
from gradwire_lab.train.vmap_layers import WideLayers
from training_fixtures import recipe_of

WORLD = 3
SMALL = ("train.batch=8", "train.batch_per=worker")


class Mixed(nn.Module):
    """Everything that workers can do together: biases or none, norms with and without a ReLU after them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(4), nn.BatchNorm2d(6, momentum=0.3, eps=1e-3)
        self.second = nn.Conv2d(4, 6, 3, stride=2, bias=False)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(6, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(self.act(self.norm1(self.first(x))), 2, 1)
        x = self.norm2(self.second(x))
        return self.head((x + torch.relu(x)).mean((2, 3)))


class Padded(Mixed):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding="same")


class Twice(Mixed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.head.weight.sum()


class Again(Mixed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm1(self.first(x))[:, :1])


class Unknown(Mixed):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gain


class Unmappable(Mixed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum().item() > -1e9 else x


def training(model, how, *overrides):
    recipe = recipe_of("digits", *SMALL, f"model.name={model}", "model.options={}", f"train.passes={how}", *overrides)
    return Training(recipe, simulated_ranks(WORLD))


@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        ("train.test_together:Mixed", ()),
        ("train.test_together:Mixed", ("train.channels_last=true", "train.label_smoothing=0.1")),
        *((f"train.test_together:{name}", ()) for name in ("Padded", "Twice", "Again", "Unknown")),
        ("cnn", ("sync.granularity=model",)),
        ("resnet20", ("data.crop=1",)),
    ],
)
def test_gradients_statistics_and_losses_are_those_of_passes_in_turn(model, overrides):
    one, other = (training(model, how, "model.options={}", *overrides) for how in ("together", "sequential"))
    for step, batch in zip(range(2), one.loader.epoch(0), strict=False):
        (grads, loss), (expected, wanted) = one.strategy.passes(batch, step), other.strategy.passes(batch, step)
        torch.testing.assert_close(loss, wanted)
        for mine, theirs in zip(grads, expected, strict=True):
            for name, x in theirs.items():
                torch.testing.assert_close(mine[name], x, rtol=1e-3, atol=1e-5, msg=name)
    for mine, theirs in zip(one.strategy.workers.buffers, other.strategy.workers.buffers, strict=True):
        for name, x in theirs.items():
            torch.testing.assert_close(mine[name], x, msg=name)


def test_steps_are_taken_together():
    one, other = (training("train.test_together:Mixed", how) for how in ("together", "sequential"))
    for each in (one, other):
        each.run(lambda record: None, lambda training, best: None)
    assert one.strategy.score().loss == pytest.approx(other.strategy.score().loss, rel=0.05)


def test_columns_of_recurrent_models_are_read_on_together():
    base = ("model.options={hidden=8, layers=2, dropout=0.0, tied=false}", "optimizer.local_clip=0.05", "data.length=5")
    one, other = (
        Training(recipe_of("pydoc-lstm", *base, f"train.passes={how}"), simulated_ranks(WORLD - 1))
        for how in ("together", "sequential")
    )
    for step, batch in zip(range(3), one.loader.epoch(0), strict=False):
        (grads, loss), (expected, wanted) = one.strategy.passes(batch, step), other.strategy.passes(batch, step)
        torch.testing.assert_close(loss, wanted)
        torch.testing.assert_close(one.strategy.passes.states, other.strategy.passes.states)
        for mine, theirs in zip(grads, expected, strict=True):
            for name, x in theirs.items():
                torch.testing.assert_close(mine[name], x, rtol=1e-3, atol=1e-6, msg=name)
        kept = [[(h.clone(), c.clone()) for h, c in own] for own in one.strategy.passes.states]
        one.strategy.passes.states = kept if step else []  # as after a checkpoint, or at the start of an epoch
        other.strategy.passes.states = kept if step else []


def test_passes_of_a_worker_go_together_where_their_differences_are_asked_for():
    base = ("model.options={hidden=8, layers=2, dropout=0.0, tied=false}", "optimizer.local_clip=0.05", "data.length=5")
    base += ("sync.spec=variance", "train.accumulate=2", "train.batch=3", "train.batch_per=worker")
    one, other = (
        Training(recipe_of("pydoc-lstm", *base, f"train.passes={how}"), simulated_ranks(WORLD))
        for how in ("together", "sequential")
    )
    seen = {id(each): [{} for _ in range(WORLD)] for each in (one, other)}
    for each in (one, other):
        for wire, notes in zip(each.strategy.workers.wires, seen[id(each)], strict=True):
            wire.observe = notes.update
    for step, batch in zip(range(3), one.loader.epoch(0), strict=False):
        (grads, loss), (expected, wanted) = one.strategy.passes(batch, step), other.strategy.passes(batch, step)
        torch.testing.assert_close(loss, wanted)
        torch.testing.assert_close(one.strategy.passes.states, other.strategy.passes.states)
        for mine, theirs in zip([*grads, *seen[id(one)]], [*expected, *seen[id(other)]], strict=True):
            assert mine.keys() == theirs.keys() and mine
            for name, x in theirs.items():
                torch.testing.assert_close(mine[name], x, rtol=1e-3, atol=1e-8, msg=name)


def test_an_unsupported_model_passes_sequentially():
    refused = training("train.test_together:Unmappable", "together")
    batch = next(refused.loader.epoch(0))
    before = {name: x.clone() for name, x in refused.strategy.workers.buffers[1].items()}
    with pytest.raises(Unsupported, match=r"train\.passes"):
        refused.strategy.passes(batch, 0)
    assert all(torch.equal(x, before[name]) for name, x in refused.strategy.workers.buffers[1].items())
    turns = training("train.test_together:Unmappable", "auto")
    turns.strategy.passes._batched = True  # as on a GPU
    expected = training("train.test_together:Unmappable", "sequential").strategy.passes(batch, 0)
    torch.testing.assert_close(turns.strategy.passes(batch, 0), expected)


def test_where_memory_is_short_workers_go_in_turn():
    turns = training("train.test_together:Mixed", "auto")
    batch = next(turns.loader.epoch(0))
    turns.strategy.passes._batched, objective = True, turns.strategy.passes._loss

    def too_large(model, *rest):
        if model is not turns.model:  # all workers at once
            raise torch.OutOfMemoryError
        return objective(model, *rest)

    turns.strategy.passes._loss = too_large
    expected = training("train.test_together:Mixed", "sequential").strategy.passes(batch, 0)
    torch.testing.assert_close(turns.strategy.passes(batch, 0), expected)


def test_it_says_what_keeps_workers_apart():
    with pytest.raises(ValueError, match="accumulate"):
        training("cnn", "together", "train.accumulate=2")


def test_weights_that_are_mapped_over_have_no_address() -> None:
    """On a GPU nn.LSTM asks for addresses, to lay its weights out for cuDNN; vmap raises an error then."""
    seen = []

    def ask(x: Tensor) -> Tensor:
        seen.append(x.data_ptr())
        return x

    with WideLayers():
        vmap(ask)(torch.ones(3, 2))
        assert torch.ones(2).data_ptr() != 0
    assert seen == [0]
