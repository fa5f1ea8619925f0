"""ResNet-18 and ResNet-50 for ImageNet, with the parameter names and shapes of torchvision's.

Paper: He et al., "Deep residual learning for image recognition", CVPR 2016, table 1. https://arxiv.org/abs/1512.03385

A checkpoint of either loads into the other. As in torchvision, the bottleneck puts its stride on the 3x3 convolution.
"""

from torch import Tensor, nn
from torch.nn import functional as F


class Basic(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(before, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class Bottleneck(nn.Module):
    """A 3x3 convolution between two of 1x1, beside a shortcut; four times as wide after as within."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.downsample = _shortcut(before, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x))


class ResNet(nn.Module):
    def __init__(self, block: type[Basic] | type[Bottleneck], depths: tuple[int, int, int, int], classes: int) -> None:
        super().__init__()
        self.block, self.growth = block, 4 if block is Bottleneck else 1
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = self._stage(64, 64, 1, depths[0])
        self.layer2 = self._stage(64 * self.growth, 128, 2, depths[1])
        self.layer3 = self._stage(128 * self.growth, 256, 2, depths[2])
        self.layer4 = self._stage(256 * self.growth, 512, 2, depths[3])
        self.fc = nn.Linear(512 * self.growth, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits

    def _stage(self, before: int, width: int, stride: int, depth: int) -> nn.Sequential:
        rest = [self.block(width * self.growth, width, 1) for _ in range(depth - 1)]
        return nn.Sequential(self.block(before, width, stride), *rest)


def resnet18(classes: int = 1000, zero_init: bool = False) -> ResNet:
    """11.7 million parameters. With ``zero_init`` every block starts as its shortcut."""
    return _init(ResNet(Basic, (2, 2, 2, 2), classes), zero_init)


def resnet50(classes: int = 1000, zero_init: bool = False) -> ResNet:
    """25.6 million parameters. With ``zero_init`` every block starts as its shortcut."""
    return _init(ResNet(Bottleneck, (3, 4, 6, 3), classes), zero_init)


def _shortcut(before: int, width: int, stride: int) -> nn.Module:
    if stride == 1 and before == width:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))


def _init(model: ResNet, zero_init: bool) -> ResNet:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if zero_init and isinstance(module, Basic | Bottleneck):
            nn.init.zeros_((module.bn2 if isinstance(module, Basic) else module.bn3).weight)
    return model
