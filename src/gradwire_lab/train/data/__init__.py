"""Data: every set that a recipe can name, read from its standard layout and checked.

A task holds its data and knows the ``facts`` that a model needs; ``task.to(device)`` moves data that fit into memory.
Loaders yield batches that are on the device already. Each has ``steps``, the batches in an epoch, and
``epoch(epoch, start)``.

The readers and models are our own, since torchvision has no CPU build that installs with the torch used here.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from gradwire_lab.train.call_with_options import call_with_options, nearest
from gradwire_lab.train.data.cifar import cifar10, cifar100
from gradwire_lab.train.data.digits import digits
from gradwire_lab.train.data.idx import fashion_mnist, kmnist, mnist
from gradwire_lab.train.data.imagefolder import FolderTask, imagenet
from gradwire_lab.train.data.images import ImageTask
from gradwire_lab.train.data.pydoc import pydoc
from gradwire_lab.train.data.text import TextTask, ptb, text, wikitext2

Task = ImageTask | FolderTask | TextTask

TASKS: dict[str, Callable[..., Task]] = {
    "cifar10": cifar10,
    "cifar100": cifar100,
    "mnist": mnist,
    "fashion-mnist": fashion_mnist,
    "kmnist": kmnist,
    "imagenet": imagenet,
    "ptb": ptb,
    "wikitext-2": wikitext2,
    "text": text,
    "digits": digits,
    "pydoc": pydoc,
}
TEXTS = ("ptb", "wikitext-2", "text", "pydoc")  # all others are images


def load(name: str, root: Path | str | None = None, options: Mapping[str, object] | None = None) -> Task:
    """The task of a name, read from below the folder ``root`` unless it needs none."""
    if name not in TASKS:
        raise ValueError(f"there is no data called {name!r}; {nearest(name, TASKS)}")
    maker, folder = TASKS[name], None if root is None else Path(root)
    reads_files = "root" in inspect.signature(maker).parameters
    return call_with_options(partial(maker, folder) if reads_files else maker, "data", name, options or {}, {})
