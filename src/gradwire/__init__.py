"""gradwire: training over thin wires.

    integrations   the user's objects: plain loop, DDP hook, optimizer, FSDP, gossip, local steps, trainers, checkpoints
    engine         plan, lane, step, state, overflow, CUDA graphs; presets such as ``dgc`` (`engine/presets.py`)
    feedback       what happens to the error of compression: residual, DGC's momentum correction, EF21, ...
    codecs         tensors to few bytes: transforms, selectors, quantizers, index coders; each file has its wire format
    exchanges      how ranks agree on one mean: all-gather, all-reduce, two-way, PowerSGD, ...
    gossip, local  methods in which ranks average with neighbors, or every few steps
    topology       graphs of gossip
    comm           who moves bytes: torch.distributed, hosts, peers that come and go
    kernels        the hot loops: definitions, Numba (`cpu`), Triton (`cuda`; exact top-k in `cuda/topk`)
    core           specs, registry, segments, payloads, requests, keys of random bits

`docs/tour.md` follows one gradient through these rooms, file by file.
"""

import gradwire.core.renamed as _renamed
from gradwire.codecs import Codec, codec
from gradwire.comm.liveness import PeerLostError
from gradwire.core.payload import CorruptMessageError
from gradwire.core.registry import register, registered
from gradwire.core.spec import parse
from gradwire.engine import Method, Rule, method
from gradwire.integrations import (
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
from gradwire.optim import SGD, AdamW
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
