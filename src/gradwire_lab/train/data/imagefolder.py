"""ImageNet, or any folder of images by class: decoded by threads, cropped, and moved to the device.

Layout: train/CLASS/*.JPEG and val/CLASS/*.JPEG, the classes of both in the same alphabetical order. Too large for
memory, so a few batches are decoded ahead of the one in use; Pillow leaves Python's lock while it decodes.
"""

import importlib
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from gradwire_lab.train.data.folder import find
from gradwire_lab.train.data.images import Batch, Normalizer, ShardedLoader
from gradwire_lab.train.data.partition import slices

ENDINGS = frozenset({".jpeg", ".jpg", ".png", ".bmp", ".webp", ".ppm"})
AHEAD = 3  # batches under way
Box = tuple[float, float, float, float]
Work = Callable[[int], Tensor]


@dataclass(frozen=True)
class ClassFolders:
    """Paths of images and their labels, int64 [n]."""

    paths: tuple[Path, ...]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.paths)


@dataclass(frozen=True)
class FolderTask:
    """Image files to train on and to test with; ``mean`` and ``std`` of each channel go from 0 to 255."""

    name: str
    train: ClassFolders
    test: ClassFolders
    classes: int
    mean: tuple[float, ...] = (255 * 0.485, 255 * 0.456, 255 * 0.406)
    std: tuple[float, ...] = (255 * 0.229, 255 * 0.224, 255 * 0.225)

    @property
    def facts(self) -> Mapping[str, object]:
        """What a maker of models may want to know."""
        return {"classes": self.classes, "channels": 3}


@dataclass(frozen=True)
class FolderLoader(ShardedLoader):
    """Batches of image files: random crops of random shape, every other one mirrored."""

    task: FolderTask
    size: int = 224
    device: torch.device | str = "cpu"
    threads: int = 8

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from step ``start`` on."""
        side = self.side(epoch, self.size)

        def work(index: int) -> Tensor:
            dice = random.Random(f"{self.seed}/{epoch}/{index}")  # the same crop in every process, at any time
            pixels = decode(self.task.train.paths[index], side, lambda width, height: crop(width, height, dice))
            return pixels.flip(2) if dice.random() < 0.5 else pixels

        chunks = list(self.indices(epoch, start, "cpu"))
        yield from _decoded(chunks, self.task.train.labels, work, self.task, self.device, self.threads)


def imagenet(root: Path | None, name: str = "imagenet") -> FolderTask:
    """A folder ``name`` of the data folder, or the data folder itself."""
    pillow()
    archive = "ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar, sorted into one folder for each class"
    train = find(root, "ImageNet", (f"{name}/train", "train"), archive)
    classes = sorted(path.name for path in train.iterdir() if path.is_dir())
    if not classes:
        raise ValueError(f"{train} has no folder for a class; sort the images so that train/CLASS/*.JPEG exist")
    return FolderTask(name, _folder(train, classes), _folder(train.parent / "val", classes), len(classes))


def folder_evaluation(
    task: FolderTask,
    batch: int,
    rank: int = 0,
    world: int = 1,
    size: int = 224,
    device: torch.device | str = "cpu",
    threads: int = 8,
) -> Iterator[Batch]:
    """A rank's share of the test images, in order, each cut out of the middle."""
    mine = torch.tensor(slices(len(task.test), world)[rank], dtype=torch.int64)

    def work(index: int) -> Tensor:
        return decode(task.test.paths[index], size, middle)

    yield from _decoded(list(mine.split(batch)), task.test.labels, work, task, device, threads)


def crop(width: int, height: int, dice: random.Random) -> Box:
    """A box of 8 to 100 % of the area and of 3:4 to 4:3 in shape; the middle of the image if ten do not fit."""
    for _ in range(10):
        area = width * height * dice.uniform(0.08, 1.0)
        shape = math.exp(dice.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < w <= width and 0 < h <= height:
            left, top = dice.randint(0, width - w), dice.randint(0, height - h)
            return left, top, left + w, top + h
    return _centered(width, height, min(width, height * 4 / 3), min(height, width * 4 / 3))


def middle(width: int, height: int) -> Box:
    """The square in the middle, with 7/8 of the shorter side: 224 of 256 pixels."""
    side = min(width, height) * 7 / 8
    return _centered(width, height, side, side)


def decode(path: Path, size: int, choose: Callable[[int, int], Box]) -> Tensor:
    """The box that ``choose`` picks of an image, scaled to a square. -> uint8 [3, size, size]."""
    module = pillow()
    try:
        with module.open(path) as image:
            box = choose(*image.size)
            scaled = image.convert("RGB").resize((size, size), module.Resampling.BILINEAR, box=box)
            return torch.from_numpy(np.array(scaled)).permute(2, 0, 1)
    except OSError as error:
        raise ValueError(f"{path} is damaged: {error}. Replace it, or remove it") from error


def pillow() -> ModuleType:
    """Pillow's module Image, or a sentence."""
    try:
        return importlib.import_module("PIL.Image")
    except ImportError:
        raise ValueError("image files are decoded by Pillow, which is not installed: pip install pillow") from None


def _centered(width: int, height: int, w: float, h: float) -> Box:
    left, top = (width - w) / 2, (height - h) / 2
    return left, top, left + w, top + h


def _folder(folder: Path, classes: list[str]) -> ClassFolders:
    paths, labels = [], []
    for label, name in enumerate(classes):
        if not (folder / name).is_dir():
            raise ValueError(f"{folder / name} is missing; sort the images so that it holds those of the class {name}")
        images = sorted(path for path in (folder / name).iterdir() if path.suffix.lower() in ENDINGS)
        paths += images
        labels += [label] * len(images)
    return ClassFolders(tuple(paths), torch.tensor(labels, dtype=torch.int64))


def _decoded(
    chunks: list[Tensor], labels: Tensor, work: Work, task: FolderTask, device: torch.device | str, threads: int
) -> Iterator[Batch]:
    """A batch for each chunk of image numbers, decoded a few batches ahead."""
    normalize = Normalizer(task.mean, task.std, torch.device(device))
    pool = ThreadPoolExecutor(threads)
    under_way: deque[Iterator[Tensor]] = deque()
    left = iter(chunks)
    try:
        for chunk in chunks:
            under_way.extend(pool.map(work, more.tolist()) for more in islice(left, AHEAD + 1 - len(under_way)))
            pixels = torch.stack(list(under_way.popleft()))
            yield Batch(normalize(pixels.to(device)), labels[chunk].to(device))
    finally:
        pool.shutdown(cancel_futures=True)
