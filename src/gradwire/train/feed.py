"""Feed: the batches that a recipe asks for."""

from collections.abc import Iterator
from typing import Protocol

from torch import nn

from gradwire.train.data import (
    Augment,
    Batch,
    ColumnLoader,
    FolderLoader,
    FolderTask,
    ImageLoader,
    ImageTask,
    Task,
    TextTask,
    WindowLoader,
    evaluation,
    folder_evaluation,
    load,
    reading,
)
from gradwire.train.place import Place
from gradwire.train.recipe import Recipe


class Loader(Protocol):
    """Batches of the ranks in this process, those of the first rank first."""

    @property
    def steps(self) -> int: ...

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]: ...


def task_of(recipe: Recipe, place: Place) -> Task:
    """The data, on the device if they fit into memory."""
    task = load(recipe.data.name, recipe.data.root or None, recipe.data.options)
    return task if isinstance(task, FolderTask) else task.to(place.device)


def recurrent(model: nn.Module) -> bool:
    return hasattr(model, "start")


def batch_of(recipe: Recipe, world: int) -> int:
    """Examples in one backward pass of one worker."""
    plan = recipe.train
    if plan.batch_per == "worker":
        return plan.batch
    share = plan.batch // (world * plan.accumulate)
    if share < 1:
        raise ValueError(
            f"a batch of {plan.batch} is too small for {world} workers of {plan.accumulate} passes; raise train.batch"
        )
    return share


def loader_of(recipe: Recipe, task: Task, model: nn.Module, place: Place) -> Loader:
    """Training batches; one holds all passes of a step, for every rank of this process."""
    plan, seed = recipe.data, recipe.train.seed
    batch = batch_of(recipe, place.world) * recipe.train.accumulate
    world, ranks = place.world, place.ranks
    if isinstance(task, ImageTask):
        augment = Augment(plan.crop, plan.border, plan.flip, plan.cutout)
        return ImageLoader(task, batch, world, ranks, seed, augment, plan.partition, plan.reshuffle)
    if isinstance(task, FolderTask):
        return FolderLoader(
            task, batch, world, ranks, seed, plan.size, place.device, plan.threads, plan.partition, plan.reshuffle
        )
    if plan.partition != "shuffled":
        raise ValueError(f"text is cut in order, so data.partition = {plan.partition!r} cannot be; leave it out")
    if recurrent(model):
        return ColumnLoader(task.train, batch, plan.length, world, ranks)
    return WindowLoader(task.train, batch, plan.length, world, ranks, seed, plan.reshuffle)


def exam_of(recipe: Recipe, task: Task, place: Place, split: str = "test") -> Iterator[Batch]:
    """What to evaluate on: this process's share."""
    rank, world = (0, 1) if place.virtual else (place.ranks[0], place.world)
    plan, batch = recipe.data, recipe.train.eval_batch
    if isinstance(task, ImageTask):
        return evaluation(task, batch, rank, world)
    if isinstance(task, FolderTask):
        return folder_evaluation(task, batch, rank, world, plan.size, place.device, plan.threads)
    assert isinstance(task, TextTask)
    return reading(getattr(task, split), plan.columns, plan.length, rank, world)
