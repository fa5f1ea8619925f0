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
from gradwire.adapters.gossip import ElasticNet, GossipReport, Net, VirtualNet, gossip, gossip_lockstep
from gradwire.codecs import Codec, codec
from gradwire.core.payload import Malformed
from gradwire.core.registry import listing, register
from gradwire.core.spec import parse
from gradwire.links.roll_call import LostError
from gradwire.sync import Method, Rule, method
from gradwire.version import VERSION as __version__

__all__ = [
    "SGD",
    "Codec",
    "DistributedOptimizer",
    "ElasticNet",
    "GossipReport",
    "LostError",
    "Malformed",
    "Method",
    "Net",
    "Report",
    "Rule",
    "VirtualNet",
    "VirtualWorkers",
    "Wire",
    "__version__",
    "codec",
    "compress",
    "gossip",
    "gossip_lockstep",
    "listing",
    "load",
    "lockstep",
    "method",
    "parse",
    "register",
    "save",
]
