"""Images in memory: a task, and batches of it that lie on the device already."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from gradwire_lab.train.data.augment import Augment
from gradwire_lab.train.data.partition import generator, shards, slices


class Batch(NamedTuple):
    """What goes into the model, and what should come out."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Images:
    """Pixels uint8 [n, channels, height, width] and labels int64 [n]."""

    pixels: Tensor
    labels: Tensor

    def to(self, device: torch.device | str) -> "Images":
        return Images(self.pixels.to(device), self.labels.to(device))

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class ImageTask:
    """Images to train on and to test with; ``mean`` and ``std`` of each channel are in the units of the pixels."""

    name: str
    train: Images
    test: Images
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def to(self, device: torch.device | str) -> "ImageTask":
        return replace(self, train=self.train.to(device), test=self.test.to(device))

    @property
    def facts(self) -> Mapping[str, object]:
        """What a maker of models may want to know."""
        _, channels, _, width = self.train.pixels.shape
        return {"classes": self.classes, "channels": channels, "size": width}


def image_task(name: str, parts: object) -> ImageTask:
    """A task of four tensors: images and labels to train on, images and labels to test with.

    Raises:
        ValueError: They are not four tensors whose shapes fit.
    """
    if not (isinstance(parts, tuple | list) and len(parts) == 4 and all(isinstance(x, Tensor) for x in parts)):
        raise ValueError(f"{name} must return a task, or images and labels to train on and to test with: four tensors")
    train, test = (Images(pixels, labels.long()) for pixels, labels in (parts[:2], parts[2:]))
    for images in (train, test):
        if images.pixels.dim() != 4 or images.labels.shape != images.pixels.shape[:1]:
            shapes = f"{list(images.pixels.shape)} and {list(images.labels.shape)}"
            raise ValueError(
                f"{name}: images must be [n, channels, height, width] and labels [n], not {shapes}; "
                "return rows of features as rows[:, None, None, :], and begin the model with nn.Flatten()"
            )
    values = train.pixels.float()
    deviation, mean = torch.std_mean(values, dim=(0, 2, 3))
    scale = deviation.where(deviation > 0, 1.0)
    classes = int(max(train.labels.max(), test.labels.max())) + 1
    return ImageTask(name, train, test, classes, tuple(mean.tolist()), tuple(scale.tolist()))


class Normalizer:
    """Pixels of any type -> float32 of mean zero and deviation one."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> None:
        self.shift = torch.tensor(mean, device=device).view(-1, 1, 1)
        self.scale = 1.0 / torch.tensor(std, device=device).view(-1, 1, 1)

    def __call__(self, pixels: Tensor) -> Tensor:
        return (pixels - self.shift) * self.scale


def resized(images: Tensor, side: int) -> Tensor:
    """Square images [b, c, h, h] in another size, averaged over what a pixel now covers."""
    if images.shape[-1] == side:
        return images
    return F.interpolate(images, (side, side), mode="bilinear", antialias=True, align_corners=False)


@dataclass(frozen=True)
class ShardedLoader:
    """Training batches of one rank, or of several simulated ranks.

    A batch holds ``len(ranks) * batch`` images, those of the first rank first. What a rank gets depends on (seed,
    epoch, rank, world) only, not on the process or the device; how an image is augmented, on (seed, epoch, image).
    Images that fill no batch are left out of the epoch.

    Attributes:
        sizes: Pairs of epoch and pixels on a side from that epoch on, by rising epoch from 0: small images make early
            epochs cheap. Without any, images stay as they are.
    """

    task: Any  # an `ImageTask` or a `FolderTask`
    batch: int
    world: int = 1
    ranks: tuple[int, ...] = (0,)
    seed: int = 0
    partition: str = "shuffled"
    reshuffle: bool = True
    sizes: Sequence[Sequence[int]] = ()

    def __post_init__(self) -> None:
        if self.steps < 1:
            share = len(self.task.train) // self.world
            raise ValueError(
                f"each of {self.world} ranks has {share} images, which fill no batch of {self.batch}; lower "
                "train.batch or train.accumulate, or use fewer workers"
            )

    @property
    def steps(self) -> int:
        """Batches in an epoch, the same on every rank."""
        return len(self.task.train) // self.world // self.batch

    def side(self, epoch: int, otherwise: int) -> int:
        """Pixels on a side in an epoch."""
        return next((side for start, side in reversed(self.sizes) if start <= epoch), otherwise)

    def order(self, epoch: int) -> Tensor:
        """Which images the ranks see, in order. -> [ranks, steps * batch]."""
        when, labels = epoch if self.reshuffle else 0, self.task.train.labels
        parts = shards(len(labels), self.world, self.seed, when, self.partition, labels)
        return torch.stack([parts[rank][: self.steps * self.batch] for rank in self.ranks])

    def indices(self, epoch: int, start: int, device: torch.device | str) -> Iterator[Tensor]:
        """The images of each batch of an epoch, from step ``start`` on."""
        for part in self.order(epoch).to(device).split(self.batch, dim=1)[start:]:
            yield part.reshape(-1)


@dataclass(frozen=True)
class ImageLoader(ShardedLoader):
    """Batches of images in memory, augmented on the device."""

    task: ImageTask
    augment: Augment = field(default_factory=Augment)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from step ``start`` on."""
        pixels, labels = self.task.train.pixels, self.task.train.labels
        height, width = pixels.shape[2:]
        moves = self.augment.draw(len(labels), height, width, generator(self.seed, "augment", epoch)).to(pixels.device)
        normalize = Normalizer(self.task.mean, self.task.std, pixels.device)
        side = self.side(epoch, width)
        for index in self.indices(epoch, start, pixels.device):
            mine = moves[index]
            images = normalize(self.augment.take(pixels, index, mine))
            yield Batch(resized(self.augment.cut(images, mine), side), labels[index])


def evaluation(task: ImageTask, batch: int, rank: int = 0, world: int = 1) -> Iterator[Batch]:
    """A rank's share of the test images, in order; all ranks together see each image once."""
    mine = slices(len(task.test), world)[rank]
    normalize = Normalizer(task.mean, task.std, task.test.pixels.device)
    for first in range(mine.start, mine.stop, batch):
        part = slice(first, min(first + batch, mine.stop))
        yield Batch(normalize(task.test.pixels[part]), task.test.labels[part])
