"""Checkpoints: every rank's state as a file in one folder, or all states in one place."""

from pathlib import Path
from typing import TypeAlias

import safetensors.torch as safetensors
import torch
from torch import Tensor

from gradwire.comm.collectives import AllGatherOp, AllToAllOp
from gradwire.core import byte_tensor, raw_bytes
from gradwire.engine.checkpoint import num_savers
from gradwire.integrations import checksums
from gradwire.integrations.consistency import agree, errors_on_all_ranks
from gradwire.integrations.gossip.elastic import ElasticGossip
from gradwire.integrations.gossip.gossip_sync import GossipSync
from gradwire.integrations.local.handle import LocalSync
from gradwire.integrations.optimizer import DistributedOptimizer
from gradwire.integrations.wire import Wire

Handle: TypeAlias = Wire | GossipSync | ElasticGossip | LocalSync


def save(wire: Handle | DistributedOptimizer, folder: str | Path) -> Path:
    """Write this rank's state into a folder that all ranks share, as safetensors.

    A rank whose state is not valid, since it has just received a corrupt message, raises an error. The others raise it
    in their next step, and `load` refuses a folder that lacks a rank's file or has one of another step.
    """
    wire = handle_of(wire)
    rank = wire.rank if isinstance(wire, ElasticGossip) else wire.link.rank
    path = Path(folder) / f"wire-{rank}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    checksums.write(wire.state_dict(), path)
    return path


def load(wire: Handle | DistributedOptimizer, folder: str | Path) -> None:
    """Read the states that `save` wrote: this rank's own if the number of ranks is the same, else all of them."""
    wire = handle_of(wire)
    own = wire.rank if isinstance(wire, ElasticGossip) else wire.link.rank
    if isinstance(wire, ElasticGossip) or (isinstance(wire, LocalSync) and wire.group is not None):
        wire.load_state_dict(_read(folder, own))  # peers may be away, and rank 0 may have saved nothing
        return
    with errors_on_all_ranks(wire.link):
        first = _read(folder, 0)
        ranks = [own] if wire.fits(first) else range(num_savers(first))
        states = [_read(folder, rank) for rank in ranks]
    wire.load_state_dict(states)


def gather_states(wire: Wire | LocalSync) -> list[dict[str, Tensor]]:
    """All ranks' states by rank, as `Wire.load_state_dict` takes them; an empty list on all ranks but the first.

    All ranks must call it. They send one after another, uncounted, so that the first rank's device
    never holds more than one state.
    """
    link, state = wire.link, agreed_state(wire)
    mine = byte_tensor(safetensors.save(state)).to(link.device)
    lengths = link.move(AllGatherOp(torch.tensor([len(mine)], device=link.device))).flatten().tolist()
    states = [safetensors.load(raw_bytes(mine))] if link.rank == 0 else []
    nothing = (0,) * (link.world - 1)
    for sender in range(1, link.world):
        n = lengths[sender]
        out = mine if link.rank == sender else mine[:0]
        into = tuple(n if link.rank == 0 and peer == sender else 0 for peer in range(link.world))
        received = link.move(AllToAllOp(out, (len(out), *nothing), into))
        states += [safetensors.load(raw_bytes(received))] if link.rank == 0 else []
    return states


def agreed_state(wire: Wire | LocalSync) -> dict[str, Tensor]:
    """This rank's state, if all ranks have a valid one. All ranks must call it."""
    account = wire.link.traffic
    with errors_on_all_ranks(wire.link):  # one rank alone may know of a corrupt message
        state = wire.state_dict()
    agree(wire.link, "", {}, call="state_dict()")
    wire.link.traffic = account  # an agreement belongs to no step
    return state


def handle_of(wire: Handle | DistributedOptimizer) -> Handle:
    """The handle itself, also of a wrapped optimizer."""
    if isinstance(wire, DistributedOptimizer):
        return wire.wire
    if not isinstance(wire, Handle):
        raise TypeError(
            f"{type(wire).__name__} is no handle; pass what gradwire.compress, gradwire.gossip, gradwire.local or "
            "gradwire.DistributedOptimizer returned, and save the model by itself"
        )
    return wire


def _read(folder: str | Path, rank: int) -> dict[str, Tensor]:
    path = Path(folder) / f"wire-{rank}.safetensors"
    if not path.exists():
        raise ValueError(f"{folder} holds no {path.name}; pass the folder that gradwire.save wrote, with all its files")
    try:
        return checksums.read(path)
    except checksums.Unreadable as wrong:
        raise ValueError(f"{path} is damaged ({wrong}); load another checkpoint, or a whole copy of it") from None
