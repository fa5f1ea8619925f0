"""Who moves bytes."""

from gradwire.comm.backend import Backend
from gradwire.comm.collectives import Traffic
from gradwire.comm.single import SingleBackend
from gradwire.comm.torch_backend import TorchBackend, connect

__all__ = ["Backend", "SingleBackend", "TorchBackend", "Traffic", "connect"]
