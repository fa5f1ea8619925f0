"""VGG-16 with batch norm, for 32x32 images and for ImageNet.

Paper: Simonyan and Zisserman, "Very deep convolutional networks for large-scale image recognition", ICLR 2015,
configuration D. https://arxiv.org/abs/1409.1556

The ImageNet one has the parameter names and shapes of torchvision's ``vgg16_bn``, so their checkpoints are exchanged
freely; the small one keeps the convolutions and has one linear layer in place of three.
"""

from collections import OrderedDict

from torch import nn

WIDTHS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))  # a max pool after each group


def vgg16_cifar(classes: int = 10, channels: int = 3) -> nn.Sequential:
    """14.7 million parameters for 32x32 images."""
    return _vgg(channels, nn.Identity(), nn.Linear(512, classes))


def vgg16(classes: int = 1000, channels: int = 3, dropout: float = 0.5) -> nn.Sequential:
    """138 million parameters for images of 224x224 pixels, or about that."""
    classifier = nn.Sequential(
        nn.Linear(512 * 7 * 7, 4096),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(4096, 4096),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(4096, classes),
    )
    return _vgg(channels, nn.AdaptiveAvgPool2d((7, 7)), classifier)


def _vgg(channels: int, pool: nn.Module, classifier: nn.Module) -> nn.Sequential:
    layers: list[nn.Module] = []
    before = channels
    for group in WIDTHS:
        for width in group:
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            before = width
        layers.append(nn.MaxPool2d(2))
    features = nn.Sequential(*layers)
    parts = OrderedDict(features=features, avgpool=pool, flatten=nn.Flatten(), classifier=classifier)
    return nn.Sequential(parts).apply(_init)


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, 0.0, 0.01)
    if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
