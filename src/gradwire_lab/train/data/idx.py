"""MNIST and its relatives: idx files, gzipped or not.

Format: two zero bytes, a byte for the type (8: unsigned byte), a byte for the number of axes, the length of each axis
as a big-endian 32-bit number, then the values.
"""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradwire_lab.train.data.folder import find
from gradwire_lab.train.data.images import Images, ImageTask

FILES = (
    "train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz and t10k-labels-idx1-ubyte.gz"
)
COUNTS = {"train": 60_000, "t10k": 10_000}


def idx_task(name: str, mean: float, std: float, /, root: Path | None, strict: bool = True) -> ImageTask:
    """The images of ``name/raw``, with the mean and deviation of pixels from 0 to 1; ``strict`` demands all of them."""
    folder = find(root, name, (f"{name}/raw",), f"the four files {FILES} of {name}")
    train, test = _split(folder, "train", strict), _split(folder, "t10k", strict)
    return ImageTask(name, train, test, classes=10, mean=(255 * mean,), std=(255 * std,))


def read(path: Path) -> Tensor:
    """The uint8 values of one idx file, in the shape it states; the file without .gz is taken where it exists."""
    plain = path.with_suffix("")
    try:
        raw = plain.read_bytes() if plain.is_file() else gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}. Download it again") from error
    if len(raw) < 4 or raw[:3] != b"\0\0\x08" or len(raw) < 4 + 4 * raw[3]:
        raise ValueError(f"{path} is not an idx file of unsigned bytes. Download it again")
    head = 4 + 4 * raw[3]
    shape = struct.unpack(f">{raw[3]}I", raw[4:head])
    if len(raw) - head != math.prod(shape):
        raise ValueError(f"{path} announces {shape} values but holds {len(raw) - head}. Download it again")
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=head).copy()).view(shape)


def _split(folder: Path, part: str, strict: bool) -> Images:
    pixels, labels = read(folder / f"{part}-images-idx3-ubyte.gz"), read(folder / f"{part}-labels-idx1-ubyte.gz")
    if pixels.dim() != 3 or labels.shape != pixels.shape[:1] or (strict and len(labels) != COUNTS[part]):
        raise ValueError(
            f"{folder} has images {list(pixels.shape)} and labels {list(labels.shape)} for {part}, "
            f"where {COUNTS[part]} of both belong. Download them again"
        )
    return Images(pixels[:, None], labels.long())
