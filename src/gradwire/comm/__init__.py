"""Backends: what carries out collectives."""

from gradwire.comm.backend import Backend as Backend
from gradwire.comm.backend import SingleBackend as SingleBackend
from gradwire.comm.collectives import Traffic as Traffic
from gradwire.comm.torch_backend import TorchBackend as TorchBackend
from gradwire.comm.torch_backend import connect as connect
