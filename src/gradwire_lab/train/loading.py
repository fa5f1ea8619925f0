"""Loading: the batches that a recipe asks for."""

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice

import torch
from torch import nn
from torch.func import functional_call

from gradwire_lab.train.data import Task, load
from gradwire_lab.train.data.augment import Augment
from gradwire_lab.train.data.imagefolder import FolderLoader, FolderTask, folder_evaluation
from gradwire_lab.train.data.images import Batch, ImageLoader, ImageTask, evaluation
from gradwire_lab.train.data.sequences import ColumnLoader, WindowLoader, reading
from gradwire_lab.train.models.regime import transform_of
from gradwire_lab.train.rank_info import RankInfo
from gradwire_lab.train.recipe import Recipe

Loader = ImageLoader | FolderLoader | ColumnLoader | WindowLoader


class Prefetcher:
    """Batches, the next of which can be fetched before it is asked for."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self.restart(batches)

    def restart(self, batches: Iterator[Batch]) -> None:
        """Go on with others."""
        self._batches, self._next = batches, deque[Batch]()

    def fetch(self) -> None:
        if not self._next:
            self._next.extend(islice(self._batches, 1))

    def __iter__(self) -> Iterator[Batch]:
        self.fetch()
        while self._next:
            yield self._next.popleft()
            self.fetch()


def task_of(recipe: Recipe, rank_info: RankInfo) -> Task:
    """The data, on the device if they fit into memory."""
    task = load(recipe.data.name, recipe.data.root or None, recipe.data.options)
    return task if isinstance(task, FolderTask) else task.to(rank_info.device)


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


def loader_of(recipe: Recipe, task: Task, model: nn.Module, rank_info: RankInfo) -> Loader:
    """Training batches; one holds all passes of a step, for every rank of this process."""
    plan, seed = recipe.data, recipe.train.seed
    batch = batch_of(recipe, rank_info.world) * recipe.train.accumulate
    world, ranks = rank_info.world, rank_info.ranks
    check_sizes(recipe, model, task.facts)
    common = (batch, world, ranks, seed, plan.partition, plan.reshuffle, plan.sizes)
    if isinstance(task, ImageTask):
        return ImageLoader(task, *common, Augment(plan.crop, plan.border, plan.flip, plan.cutout))
    if isinstance(task, FolderTask):
        return FolderLoader(task, *common, plan.size, rank_info.device, plan.threads)
    if plan.partition != "shuffled":
        raise ValueError(f"text is cut in order, so data.partition = {plan.partition!r} has no meaning; leave it out")
    if recurrent(model):
        return ColumnLoader(task.train, batch, plan.length, world, ranks)
    return WindowLoader(task.train, batch, plan.length, world, ranks, seed, plan.reshuffle)


def evaluation_batches(recipe: Recipe, task: Task, rank_info: RankInfo, split: str = "test") -> Iterator[Batch]:
    """What to evaluate on: this process's share."""
    rank, world = (0, 1) if rank_info.simulated else (rank_info.ranks[0], rank_info.world)
    plan, batch = recipe.data, recipe.train.eval_batch
    if isinstance(task, ImageTask):
        return evaluation(task, batch, rank, world)
    if isinstance(task, FolderTask):
        return folder_evaluation(task, batch, rank, world, plan.size, rank_info.device, plan.threads)
    return reading(getattr(task, split), plan.columns, plan.length, rank, world)


def check_sizes(recipe: Recipe, model: nn.Module, facts: Mapping[str, object]) -> None:
    """Refuse sizes that the model cannot take, before it has trained for hours with those that it can."""
    if not recipe.data.sizes or transform_of(model, training=True) is not None:
        return  # it is not known what a transform makes of them
    channels = facts.get("channels")
    if not isinstance(channels, int):
        raise ValueError(f"{recipe.data.name} has no images, so data.sizes has no meaning; leave it out")
    weightless = {name: x.to("meta") for name, x in (*model.named_parameters(), *model.named_buffers())}
    for _, side in recipe.data.sizes:
        try:
            functional_call(model, weightless, torch.empty((2, channels, side, side), device="meta"))
        except RuntimeError as error:
            raise ValueError(
                f"the model {recipe.model.name} cannot take the images of {side}x{side} pixels of data.sizes: {error}"
            ) from None
