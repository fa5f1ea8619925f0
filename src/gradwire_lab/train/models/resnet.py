"""ResNets: for 32x32 images, 6n + 2 layers deep, and ResNet-18 and ResNet-50 for ImageNet.

Paper: He et al., "Deep residual learning for image recognition", CVPR 2016, table 1 and section 4.2.
https://arxiv.org/abs/1512.03385

For 32x32 images, a shortcut of a block that halves the image skips every other pixel and fills the new channels with
zeros (option A), so it has no parameters: 0.27 million in ResNet-20, 1.73 million in ResNet-110.

The models for ImageNet have the parameter names and shapes of torchvision's: a checkpoint of either loads into the
other. As in torchvision, the bottleneck puts its stride on the 3x3 convolution.
"""

import math
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn
from torch.nn import functional as F

Shortcut = Callable[[int, int, int], nn.Module]  # (channels before, channels after, stride)
Layers = Callable[[int, int], list[tuple[int, int, int]]]  # (width, stride) -> kernel, channels and stride of each


class Block(nn.Module):
    """Convolutions, each with a norm, that are added to a shortcut.

    Args:
        before: Channels of the input.
        layers: Kernel size, channels and stride of each convolution.
        shortcut: Makes the shortcut.
    """

    def __init__(self, before: int, layers: Sequence[tuple[int, int, int]], shortcut: Shortcut) -> None:
        super().__init__()
        self.depth, width = len(layers), before
        for i, (kernel, after, stride) in enumerate(layers, 1):
            self.add_module(f"conv{i}", nn.Conv2d(width, after, kernel, stride, padding=kernel // 2, bias=False))
            self.add_module(f"bn{i}", nn.BatchNorm2d(after))
            width = after
        self.downsample = shortcut(before, width, math.prod(stride for _, _, stride in layers))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for i in range(1, self.depth + 1):
            y = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(y))
            y = F.relu(y) if i < self.depth else y
        return F.relu(y + self.downsample(x))


def basic(width: int, stride: int) -> list[tuple[int, int, int]]:
    """Two 3x3 convolutions."""
    return [(3, width, stride), (3, width, 1)]


def bottleneck(width: int, stride: int) -> list[tuple[int, int, int]]:
    """A 3x3 convolution between two of 1x1; four times as wide after as within."""
    return [(1, width, 1), (3, width, stride), (1, 4 * width, 1)]


class PaddedShortcut(nn.Module):
    """Every ``stride``-th pixel, between new channels of zeros."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.stride, self.new = stride, width - before

    def forward(self, x: Tensor) -> Tensor:
        front = self.new // 2
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, front, self.new - front))


class CifarResNet(nn.Module):
    def __init__(self, blocks: int, classes: int, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1, self.layer2, self.layer3 = _stages(basic, 16, (blocks,) * 3, _padded)
        self.linear = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.linear(x.mean((2, 3)))
        return logits


class ResNet(nn.Module):
    def __init__(self, layers: Layers, depths: tuple[int, int, int, int], classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1, self.layer2, self.layer3, self.layer4 = _stages(layers, 64, depths, _projected)
        self.fc = nn.Linear(layers(512, 1)[-1][1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


def resnet(depth: int, /, classes: int = 10, channels: int = 3, zero_init: bool = False) -> nn.Module:
    """A ResNet of 20, 32, 44, 56, 110 or any other 6n + 2 layers, for 32x32 images.

    With ``zero_init`` the last norm of every block starts at zero, so that each block starts as its shortcut.
    """
    if depth < 8 or depth % 6 != 2:
        raise ValueError(
            f"a CIFAR ResNet has 6n + 2 layers, and {depth} is not such a number; take 20, 32, 44, 56 or 110"
        )
    return _init(CifarResNet((depth - 2) // 6, classes, channels), zero_init)


def resnet18(classes: int = 1000, zero_init: bool = False) -> nn.Module:
    """11.7 million parameters. With ``zero_init`` every block starts as its shortcut."""
    return _init(ResNet(basic, (2, 2, 2, 2), classes), zero_init)


def resnet50(classes: int = 1000, zero_init: bool = False) -> nn.Module:
    """25.6 million parameters. With ``zero_init`` every block starts as its shortcut."""
    return _init(ResNet(bottleneck, (3, 4, 6, 3), classes), zero_init)


def _stages(layers: Layers, width: int, depths: Sequence[int], shortcut: Shortcut) -> Iterator[nn.Sequential]:
    """Stages of blocks, each twice as wide as the one before, on images of half the size."""
    before = width
    for i, depth in enumerate(depths):
        blocks = []
        for j in range(depth):
            shape = layers(width * 2**i, 2 if i > 0 and j == 0 else 1)
            blocks.append(Block(before, shape, shortcut))
            before = shape[-1][1]
        yield nn.Sequential(*blocks)


def _padded(before: int, width: int, stride: int) -> nn.Module:
    return nn.Identity() if before == width else PaddedShortcut(before, width, stride)


def _projected(before: int, width: int, stride: int) -> nn.Module:
    if stride == 1 and before == width:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))


def _init(model: nn.Module, zero_init: bool) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if zero_init and isinstance(module, Block):
            nn.init.zeros_(getattr(module, f"bn{module.depth}").weight)
    return model
