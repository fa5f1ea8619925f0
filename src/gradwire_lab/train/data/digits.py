"""Digits: 1797 handwritten digits of 8x8 pixels inside scikit-learn, so nothing is downloaded."""

import torch

from gradwire_lab.train.data.images import Images, ImageTask

TRAIN = 1200  # the other 597 are to test with


def digits(standardize: bool = False) -> ImageTask:
    """The same split always. Pixels go from 0 to 16; they are scaled to [0, 1], or to mean 0 and deviation 1."""
    from sklearn.datasets import load_digits  # slow to import, and only needed here

    raw = load_digits()
    pixels = torch.tensor(raw.data, dtype=torch.uint8).view(-1, 1, 8, 8)
    labels = torch.tensor(raw.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = (Images(pixels[part], labels[part]) for part in (order[:TRAIN], order[TRAIN:]))
    values = train.pixels.float()
    mean, std = (float(values.mean()), float(values.std())) if standardize else (0.0, 16.0)
    return ImageTask("digits", train, test, classes=10, mean=(mean,), std=(std,))
