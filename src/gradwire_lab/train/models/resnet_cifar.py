"""ResNet for 32x32 images: three stages of basic blocks, 6n + 2 layers deep.

Paper: He et al., "Deep residual learning for image recognition", CVPR 2016, section 4.2.
https://arxiv.org/abs/1512.03385

Where a block halves the image, its shortcut skips every other pixel and fills the new channels with zeros (option A),
so a shortcut has no parameters: 0.27 million in ResNet-20, 1.73 million in ResNet-110.
"""

from torch import Tensor, nn
from torch.nn import functional as F


class CifarBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.stride, self.new = stride, width - before

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))

    def shortcut(self, x: Tensor) -> Tensor:
        if self.new == 0:
            return x
        front = self.new // 2
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, front, self.new - front))


class CifarResNet(nn.Module):
    def __init__(self, blocks: int, classes: int, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, 1, blocks)
        self.layer2 = _stage(16, 32, 2, blocks)
        self.layer3 = _stage(32, 64, 2, blocks)
        self.linear = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.linear(x.mean((2, 3)))
        return logits


def resnet(depth: int, /, classes: int = 10, channels: int = 3, zero_init: bool = False) -> CifarResNet:
    """A ResNet of 20, 32, 44, 56, 110 or any other 6n + 2 layers.

    With ``zero_init`` the last norm of every block starts at zero, so that each block starts as the identity.
    """
    if depth < 8 or depth % 6 != 2:
        raise ValueError(
            f"a CIFAR ResNet has 6n + 2 layers, and {depth} is not such a number; take 20, 32, 44, 56 or 110"
        )
    model = CifarResNet((depth - 2) // 6, classes, channels)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if isinstance(module, CifarBlock) and zero_init:
            nn.init.zeros_(module.bn2.weight)
    return model


def _stage(before: int, width: int, stride: int, blocks: int) -> nn.Sequential:
    rest = [CifarBlock(width, width, 1) for _ in range(blocks - 1)]
    return nn.Sequential(CifarBlock(before, width, stride), *rest)
