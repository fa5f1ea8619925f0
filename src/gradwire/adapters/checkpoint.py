"""Checkpoint: every rank's state as a file in one folder."""

from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from gradwire.adapters.agreement import telling
from gradwire.adapters.gossip.elastic import ElasticNet
from gradwire.adapters.gossip.net import Net
from gradwire.adapters.optimizer import DistributedOptimizer
from gradwire.adapters.wire import Wire
from gradwire.sync import memory


def save(wire: "Wire | DistributedOptimizer | Net | ElasticNet", folder: str | Path) -> Path:
    """Write this rank's state into a folder that all ranks share, as safetensors."""
    wire = wire.wire if isinstance(wire, DistributedOptimizer) else wire
    rank = wire.rank if isinstance(wire, ElasticNet) else wire.link.rank
    path = Path(folder) / f"wire-{rank}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(wire.state_dict(), partial)
    partial.replace(path)  # a reader sees the old state or the new one, never half of it
    return path


def load(wire: "Wire | DistributedOptimizer | Net | ElasticNet", folder: str | Path) -> None:
    """Read the states that `save` wrote: one's own where the world is the same, else all of them."""
    wire = wire.wire if isinstance(wire, DistributedOptimizer) else wire
    if isinstance(wire, ElasticNet):  # its peers may be away, and are not asked
        wire.load_state_dict(_read(folder, wire.rank))
        return
    with telling(wire.link):
        first = _read(folder, 0)
        ranks = [wire.link.rank] if wire.fits(first) else range(memory.seats(first))
        states = [_read(folder, rank) for rank in ranks]
    wire.load_state_dict(states)


def _read(folder: str | Path, rank: int) -> dict[str, Tensor]:
    path = Path(folder) / f"wire-{rank}.safetensors"
    if not path.exists():
        raise ValueError(f"{folder} holds no {path.name}; pass the folder that gradwire.save wrote, with all its files")
    return load_file(path)
