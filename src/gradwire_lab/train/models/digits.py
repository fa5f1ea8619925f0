"""A small CNN for gray images of digits: 8x8 as in scikit-learn, 28x28 as in MNIST."""

from torch import nn


def cnn(classes: int = 10, channels: int = 1, size: int = 8, width: int = 32) -> nn.Sequential:
    """Two convolutions, a pool and two linear layers; 151 thousand parameters for 8x8 images."""
    side = size // 2
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * side * side, 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )
