"""Resolution: images that grow while a training goes on. Small ones make the early epochs cheap."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Resolution:
    """Pixels on a side, from an epoch on; an empty table leaves images as they are.

    Attributes:
        table: Pairs of epoch and pixels, by rising epoch from 0.
    """

    table: tuple[tuple[int, int], ...] = ()

    def at(self, epoch: int, otherwise: int) -> int:
        """The side in an epoch."""
        return next((side for start, side in reversed(self.table) if start <= epoch), otherwise)


def resized(images: Tensor, side: int) -> Tensor:
    """Square images [b, c, h, h] in another size, averaged over what a pixel now covers."""
    if images.shape[-1] == side:
        return images
    return F.interpolate(images, (side, side), mode="bilinear", antialias=True, align_corners=False)
