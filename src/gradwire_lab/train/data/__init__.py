"""Data: every set that a recipe can name, read from its standard layout and checked.

A task holds its data and knows the ``facts`` that a model needs; ``task.to(device)`` moves data that fit into memory.
Loaders yield batches that are on the device already. Each has ``steps``, the batches in an epoch, and
``epoch(epoch, start)``.

A user's own function, ``mine.py:data``, returns a task, or four tensors: images to train on [n, channels, height,
width] and their labels [n], images to test with and their labels. Its keywords are ``data.options``, and ``root`` if it
has one.

The readers and models are our own, since torchvision has no CPU build that installs with the torch used here.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from gradwire_lab.train.call_with_options import call_with_options, load_function, nearest
from gradwire_lab.train.data.cifar import cifar10, cifar100
from gradwire_lab.train.data.digits import digits
from gradwire_lab.train.data.idx import idx_task
from gradwire_lab.train.data.imagefolder import FolderTask, imagenet
from gradwire_lab.train.data.images import Batch, ImageTask, image_task
from gradwire_lab.train.data.text import TextTask, ptb, pydoc, text, wikitext2

__all__ = ["TASKS", "TEXTS", "Batch", "Task", "TextTask", "known", "load", "maker_of"]

Task = ImageTask | FolderTask | TextTask

TASKS: dict[str, Callable[..., Task]] = {
    "cifar10": cifar10,
    "cifar100": cifar100,
    "mnist": partial(idx_task, "MNIST", 0.1307, 0.3081),
    "fashion-mnist": partial(idx_task, "FashionMNIST", 0.2860, 0.3530),
    "kmnist": partial(idx_task, "KMNIST", 0.1918, 0.3483),
    "imagenet": imagenet,
    "ptb": ptb,
    "wikitext-2": wikitext2,
    "text": text,
    "digits": digits,
    "pydoc": pydoc,
}
TEXTS = ("ptb", "wikitext-2", "text", "pydoc")  # all others are images


def known(name: str) -> str:
    """The name itself, if it is one of `TASKS`, or has the form of a user's own: ``file.py:data``.

    Raises:
        ValueError: It is neither.
    """
    if name not in TASKS and ":" not in name:
        raise ValueError(f"there is no data called {name!r}; {nearest(name, TASKS)} (your own: file.py:data)")
    return name


def maker_of(name: str) -> Callable[..., object]:
    """The function that reads data of a name. A user's own file is run."""
    return TASKS.get(known(name)) or load_function(name)


def load(name: str, root: Path | str | None = None, options: Mapping[str, object] | None = None) -> Task:
    """The task of a name, or of a user's own function, read from below the folder ``root`` unless it needs none."""
    maker = maker_of(name)
    facts = {"root": None if root is None else Path(root)} if "root" in inspect.signature(maker).parameters else {}
    made = call_with_options(maker, "data", name, options or {}, facts)
    return made if isinstance(made, Task) else image_task(name, made)
