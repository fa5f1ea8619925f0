"""Augmentation: random crops, flips and cutouts of whole batches in memory, on any device.

Random numbers are drawn for many images at once, on the CPU, and are moved to the device together with the order of the
images: a batch then costs one gather, and nothing waits for the device. The same generator gives the same images on
every device.
"""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

MOVES = 5  # random numbers for an image: down, right, mirrored, and the corner of the cutout


@dataclass(frozen=True)
class Augment:
    """What to do to the images; nothing, by default.

    Attributes:
        crop: How many pixels to pad on each side before cutting out a random window of the old size.
        border: What the padding holds: ``zero``, or the image reflected (``reflect``).
        flip: Mirror every other image, left to right.
        cutout: The side of a square, somewhere inside the image, to blank.
    """

    crop: int = 0
    border: str = "zero"
    flip: bool = False
    cutout: int = 0

    def __post_init__(self) -> None:
        if self.border not in ("zero", "reflect"):
            raise ValueError(f"there is no border called {self.border!r}; choose 'zero' or 'reflect'")
        if self.crop < 0 or self.cutout < 0:
            raise ValueError(f"crop={self.crop}, cutout={self.cutout} are not numbers of pixels; give 0 or more")

    def draw(self, n: int, height: int, width: int, generator: Generator) -> Tensor:
        """The moves [n, MOVES] of n images; each kind draws its own numbers, whether the others are in use or not."""
        if self.cutout > min(height, width) or self.crop >= min(height, width):
            raise ValueError(f"crop={self.crop}, cutout={self.cutout} are too large for images of {height}x{width}")
        ends = (2 * self.crop + 1, 2 * self.crop + 1, 2, height - self.cutout + 1, width - self.cutout + 1)
        return torch.stack([torch.randint(end, (n,), generator=generator) for end in ends], dim=1)

    def take(self, pixels: Tensor, index: Tensor, moves: Tensor) -> Tensor:
        """Images ``index`` of [n, c, h, w], cropped and flipped by their moves."""
        if not self.crop and not self.flip:
            return pixels[index]
        _, channels, height, width = pixels.shape
        rows = torch.arange(height, device=pixels.device) + moves[:, :1] - self.crop  # [b, h]
        columns = torch.arange(width, device=pixels.device) + moves[:, 1:2] - self.crop  # [b, w]
        if self.flip:
            columns = torch.where(moves[:, 2:3] == 1, columns.flip(1), columns)
        channel = torch.arange(channels, device=pixels.device)[:, None, None]
        near_rows, near_columns = _reflect(rows, height), _reflect(columns, width)
        taken = pixels[index[:, None, None, None], channel, near_rows[:, None, :, None], near_columns[:, None, None, :]]
        if self.border == "reflect" or not self.crop:
            return taken
        inside = (rows == near_rows)[:, None, :, None] & (columns == near_columns)[:, None, None, :]
        return taken * inside

    def cut(self, images: Tensor, moves: Tensor) -> Tensor:
        """Blank a square of every image, with zeros: the mean, if the images are normalized."""
        if not self.cutout:
            return images
        rows = torch.arange(images.shape[2], device=images.device) - moves[:, 3:4]
        columns = torch.arange(images.shape[3], device=images.device) - moves[:, 4:5]
        hidden = _within(rows, self.cutout)[:, None, :, None] & _within(columns, self.cutout)[:, None, None, :]
        return images * ~hidden


def _reflect(position: Tensor, size: int) -> Tensor:
    """Positions beyond an edge, mirrored at the outermost pixel."""
    return size - 1 - (size - 1 - position.abs()).abs()


def _within(position: Tensor, size: int) -> Tensor:
    return (position >= 0) & (position < size)
