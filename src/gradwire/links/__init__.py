"""Who moves bytes."""

from gradwire.links.collectives import Traffic
from gradwire.links.link import Link
from gradwire.links.solo import SoloLink
from gradwire.links.torch import TorchLink, connect

__all__ = ["Link", "SoloLink", "TorchLink", "Traffic", "connect"]
