"""Checkpoint: every rank's state as a file in one folder."""

from pathlib import Path

from torch import Tensor

from gradwire.engine.checkpoint import num_savers
from gradwire.integrations import checksums
from gradwire.integrations.consistency import telling
from gradwire.integrations.gossip.elastic import ElasticGossip
from gradwire.integrations.gossip.gossip_sync import GossipSync
from gradwire.integrations.optimizer import DistributedOptimizer
from gradwire.integrations.wire import Wire


def save(wire: "Wire | DistributedOptimizer | GossipSync | ElasticGossip", folder: str | Path) -> Path:
    """Write this rank's state into a folder that all ranks share, as safetensors."""
    wire = _handle(wire)
    rank = wire.rank if isinstance(wire, ElasticGossip) else wire.link.rank
    path = Path(folder) / f"wire-{rank}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    checksums.write(wire.state_dict(), path)
    return path


def load(wire: "Wire | DistributedOptimizer | GossipSync | ElasticGossip", folder: str | Path) -> None:
    """Read the states that `save` wrote: one's own where the world is the same, else all of them."""
    wire = _handle(wire)
    if isinstance(wire, ElasticGossip):  # its peers may be away, and are not asked
        wire.load_state_dict(_read(folder, wire.rank))
        return
    with telling(wire.link):
        first = _read(folder, 0)
        ranks = [wire.link.rank] if wire.fits(first) else range(num_savers(first))
        states = [_read(folder, rank) for rank in ranks]
    wire.load_state_dict(states)


def _handle(wire: "Wire | DistributedOptimizer | GossipSync | ElasticGossip") -> Wire | GossipSync | ElasticGossip:
    if isinstance(wire, DistributedOptimizer):
        return wire.wire
    if not isinstance(wire, Wire | GossipSync | ElasticGossip):
        raise TypeError(
            f"{type(wire).__name__} is no handle; pass what gradwire.compress, gradwire.gossip or "
            "gradwire.DistributedOptimizer returned, and save the model beside it"
        )
    return wire


def _read(folder: str | Path, rank: int) -> dict[str, Tensor]:
    path = Path(folder) / f"wire-{rank}.safetensors"
    if not path.exists():
        raise ValueError(f"{folder} holds no {path.name}; pass the folder that gradwire.save wrote, with all its files")
    try:
        return checksums.read(path)
    except checksums.Unreadable as wrong:
        raise ValueError(f"{path} cannot be read ({wrong}); load another checkpoint, or a whole copy of it") from None
