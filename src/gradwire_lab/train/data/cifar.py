"""CIFAR-10 and CIFAR-100: 60,000 color images of 32x32 pixels.

Krizhevsky, "Learning multiple layers of features from tiny images", 2009. https://www.cs.toronto.edu/~kriz/cifar.html

The "python version" is read, whose pickles are not executed, and CIFAR-10 also in its "binary version". The official
files and their checksums are listed in cifar.md5, as `md5sum` writes it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from gradwire_lab.train.data import pickles
from gradwire_lab.train.data.folder import find, verify
from gradwire_lab.train.data.images import Images, ImageTask

ROW = 3 * 32 * 32
Color = tuple[float, float, float]
Rows = tuple[NDArray[np.uint8], NDArray[np.uint8]]  # pixels [n, ROW] and labels [n]


@dataclass(frozen=True)
class Layout:
    """One official archive, unpacked: a folder of files, and how to read one."""

    archive: str
    folder: str
    read: Callable[[Path], Rows]

    def files(self, test: bool) -> dict[str, str]:
        """The names of the files to train on or to test with, and their MD5."""
        lines = resources.files(__package__).joinpath("cifar.md5").read_text(encoding="utf-8").splitlines()
        entries = [(digest, *place.split("/")) for digest, place in map(str.split, lines)]
        wanted = [(file, digest) for digest, folder, file in entries if folder == self.folder]
        return {file: digest for file, digest in wanted if file.startswith("test") == test}


def read_pickle(path: Path) -> Rows:
    """A batch of the python version."""
    content = pickles.read(path)
    pixels, labels = content.get("data"), content.get("fine_labels", content.get("labels"))
    whole = isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8 and pixels.shape[1:] == (ROW,)
    if not whole or not isinstance(labels, list):
        raise ValueError(f"{path} holds no images of 32x32 and labels. Download it again")
    return np.asarray(pixels), np.array(labels, np.uint8)


def read_binary(path: Path) -> Rows:
    """A batch of CIFAR-10's binary version: rows of a label and the pixels."""
    raw = np.fromfile(path, np.uint8)
    if len(raw) == 0 or len(raw) % (1 + ROW):
        raise ValueError(f"{path} has {len(raw)} bytes, which make no whole number of images. Download it again")
    rows = raw.reshape(-1, 1 + ROW)
    return rows[:, 1:], rows[:, 0]


def cifar_task(
    classes: int, layouts: tuple[Layout, ...], mean: Color, std: Color, /, root: Path | None, strict: bool = True
) -> ImageTask:
    """With ``strict``, only the official files will do; without, any copy in one of their layouts."""
    name = f"CIFAR-{classes}"
    folder = find(root, name, [each.folder for each in layouts], layouts[0].archive)
    layout = next(each for each in layouts if each.folder == folder.name)
    train, test = (_split(folder, layout, layout.files(test), strict) for test in (False, True))
    for part, wanted in ((train, 50_000), (test, 10_000)):
        if strict and len(part) != wanted:
            raise ValueError(
                f"{folder} holds {len(part)} images where {wanted} belong. Download {layout.archive} again"
            )
        if int(part.labels.max()) >= classes:
            raise ValueError(f"{folder} has a label {int(part.labels.max())}, but {name} has {classes} classes")
    return ImageTask(name, train, test, classes, tuple(255 * m for m in mean), tuple(255 * s for s in std))


def _split(folder: Path, layout: Layout, files: dict[str, str], strict: bool) -> Images:
    parts = []
    for file, digest in files.items():
        path = folder / file
        if not path.is_file():
            raise ValueError(f"{path} is missing; unpack {layout.archive} again")
        if strict:
            verify(path, digest)
        parts.append(layout.read(path))
    pixels = torch.from_numpy(np.concatenate([rows for rows, _ in parts])).view(-1, 3, 32, 32)
    labels = torch.from_numpy(np.concatenate([labels for _, labels in parts]).astype(np.int64))
    if len(pixels) != len(labels):
        raise ValueError(f"{folder} holds {len(pixels)} images but {len(labels)} labels. Download it again")
    return Images(pixels, labels)


TEN = (
    Layout("cifar-10-python.tar.gz", "cifar-10-batches-py", read_pickle),
    Layout("cifar-10-binary.tar.gz", "cifar-10-batches-bin", read_binary),
)
HUNDRED = (Layout("cifar-100-python.tar.gz", "cifar-100-python", read_pickle),)  # the fine classes
cifar10 = partial(cifar_task, 10, TEN, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
cifar100 = partial(cifar_task, 100, HUNDRED, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
