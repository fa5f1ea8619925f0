"""Gathered: the states of all ranks in one place, for checkpoints that are one file, written by rank 0."""

import torch
from safetensors.torch import load, save
from torch import Tensor

from gradwire.comm.collectives import AllGatherOp, AllToAllOp
from gradwire.integrations.wire import Wire


def gathered(wire: Wire) -> list[dict[str, Tensor]]:
    """All ranks' states by rank, as `Wire.load_state_dict` takes them; an empty list on all ranks but the first.

    All ranks must call it. They send one after another, off the account of bytes, so that the first rank's device
    never holds more than one state.
    """
    link = wire.link
    mine = torch.frombuffer(bytearray(save(wire.state_dict())), dtype=torch.uint8).to(link.device)
    lengths = link.move(AllGatherOp(torch.tensor([len(mine)], device=link.device))).flatten().tolist()
    states = [load(_bytes(mine))] if link.rank == 0 else []
    nothing = (0,) * (link.world - 1)
    for sender in range(1, link.world):
        n = lengths[sender]
        out = mine if link.rank == sender else mine[:0]
        into = tuple(n if link.rank == 0 and peer == sender else 0 for peer in range(link.world))
        heard = link.move(AllToAllOp(out, (len(out), *nothing), into))
        states += [load(_bytes(heard))] if link.rank == 0 else []
    return states


def _bytes(x: Tensor) -> bytes:
    return x.cpu().numpy().tobytes()
