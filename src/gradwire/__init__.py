"""gradwire: training over thin wires."""

from gradwire.adapters import (
    SGD,
    DistributedOptimizer,
    Report,
    VirtualWorkers,
    Wire,
    compress,
    load,
    lockstep,
    save,
)
from gradwire.codecs import Codec, codec
from gradwire.core.payload import Malformed
from gradwire.core.registry import listing, register
from gradwire.core.spec import parse
from gradwire.sync import Method, Rule, method
from gradwire.version import VERSION as __version__

__all__ = [
    "SGD",
    "Codec",
    "DistributedOptimizer",
    "Malformed",
    "Method",
    "Report",
    "Rule",
    "VirtualWorkers",
    "Wire",
    "__version__",
    "codec",
    "compress",
    "listing",
    "load",
    "lockstep",
    "method",
    "parse",
    "register",
    "save",
]
