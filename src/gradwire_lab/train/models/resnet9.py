"""ResNet-9 and its AlexNet partner: shallow, wide networks that learn CIFAR-10 in a few epochs.

ResNet-9 is the network of David Page's DAWNBench entry ("How to train your ResNet", 2018): 94 % in 24 epochs. The
AlexNet here is five convolutions of the same make (3x3, batch norm, ReLU) and one linear layer. Both multiply their
logits by ``scale``, which tempers the softmax.

There is no zero-init of a block's last norm: that norm is followed by a ReLU, whose gradient at zero is zero, so the
branch would never wake up.
"""

from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional as F


class ResidualBlock(nn.Module):
    """x plus two convolutions of x; nothing after the sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.res1 = _conv(width, width)
        self.res2 = _conv(width, width)

    def forward(self, x: Tensor) -> Tensor:
        branch: Tensor = self.res2(self.res1(x))
        return x + branch


class Head(nn.Module):
    """The largest value of each channel, one linear layer without bias, and the scale."""

    def __init__(self, width: int, classes: int, scale: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, classes, bias=False)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        peak = F.max_pool2d(x, x.shape[-2:]).flatten(1)
        logits: Tensor = self.linear(peak)
        return self.scale * logits


def resnet9(classes: int = 10, channels: int = 3, scale: float = 0.125) -> nn.Sequential:
    """6.6 million parameters for 32x32 images."""
    stages = OrderedDict(
        prep=_conv(channels, 64),
        layer1=nn.Sequential(_conv(64, 128), nn.MaxPool2d(2), ResidualBlock(128)),
        layer2=nn.Sequential(_conv(128, 256), nn.MaxPool2d(2)),
        layer3=nn.Sequential(_conv(256, 512), nn.MaxPool2d(2), ResidualBlock(512)),
        head=Head(512, classes, scale),
    )
    return nn.Sequential(stages)


def alexnet(classes: int = 10, channels: int = 3, scale: float = 0.125) -> nn.Sequential:
    """2.3 million parameters for 32x32 images."""
    stages = OrderedDict(
        prep=nn.Sequential(_conv(channels, 64, stride=2), nn.MaxPool2d(2)),
        layer1=nn.Sequential(_conv(64, 192), nn.MaxPool2d(2)),
        layer2=_conv(192, 384),
        layer3=_conv(384, 256),
        layer4=nn.Sequential(_conv(256, 256), nn.MaxPool2d(2)),
        head=Head(256, classes, scale),
    )
    return nn.Sequential(stages)


def _conv(before: int, width: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
    return nn.Sequential(OrderedDict(conv=conv, bn=nn.BatchNorm2d(width), relu=nn.ReLU(inplace=True)))
