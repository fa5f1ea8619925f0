"""gradwire: training over thin wires."""

import gradwire.core.renamed as _renamed
from gradwire.codecs import Codec, codec
from gradwire.comm.liveness import PeerLostError
from gradwire.core.payload import CorruptMessageError
from gradwire.core.registry import register, registered
from gradwire.core.spec import parse
from gradwire.engine import Method, Rule, method
from gradwire.integrations import (
    SGD,
    DistributedOptimizer,
    OptimizerWarning,
    Report,
    SimulatedWorkers,
    Wire,
    compress,
    load,
    lockstep,
    save,
)
from gradwire.integrations.gossip import (
    ElasticGossip,
    GossipReport,
    GossipSync,
    SimulatedGossip,
    gossip,
    gossip_lockstep,
)
from gradwire.integrations.local import LocalReport, LocalSync, SimulatedLocal, local, local_lockstep
from gradwire.optim import AdamW
from gradwire.version import VERSION as __version__

__all__ = [
    "SGD",
    "AdamW",
    "Codec",
    "CorruptMessageError",
    "DistributedOptimizer",
    "ElasticGossip",
    "GossipReport",
    "GossipSync",
    "LocalReport",
    "LocalSync",
    "Method",
    "OptimizerWarning",
    "PeerLostError",
    "Report",
    "Rule",
    "SimulatedGossip",
    "SimulatedLocal",
    "SimulatedWorkers",
    "Wire",
    "__version__",
    "codec",
    "compress",
    "gossip",
    "gossip_lockstep",
    "load",
    "local",
    "local_lockstep",
    "lockstep",
    "method",
    "parse",
    "register",
    "registered",
    "save",
]

_RENAMED = {  # the old names of one release
    "ElasticNet": "ElasticGossip",
    "LostError": "PeerLostError",
    "Malformed": "CorruptMessageError",
    "Net": "GossipSync",
    "VirtualNet": "SimulatedGossip",
    "VirtualWorkers": "SimulatedWorkers",
    "listing": "registered",
}

__getattr__ = _renamed.renamed(_RENAMED, globals())
