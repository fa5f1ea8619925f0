"""Loopback: a backend without other ranks, which records the collectives that it is asked for."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.comm.alphabeta import Kind
from gradwire.comm.backend import CountingBackend, copied_to
from gradwire.comm.collectives import AllGatherOp, AllReduceOp, AllToAllOp, Collective


@dataclass(frozen=True)
class CollectiveCall:
    """One collective.

    Attributes:
        kind: Which.
        nbytes: Of the tensor that is reduced; of what each rank sends to all; of what it sends to its peers together.
        dtype: Of what is summed; bytes are only moved.
    """

    kind: Kind
    nbytes: float
    dtype: torch.dtype = torch.uint8


class LoopbackBackend(CountingBackend):
    """Rank 0 of a world in which every other rank sends what this one sends.

    Attributes:
        calls: The collectives so far.
    """

    def __init__(self, world: int, device: torch.device) -> None:
        super().__init__()
        self.rank, self.world, self.device = 0, world, device
        self.calls: list[CollectiveCall] = []

    def move(self, collective: Collective, out: Tensor | None = None) -> Tensor:
        return copied_to(self._result(collective), out)

    def _result(self, collective: Collective) -> Tensor:
        x = collective.tensor
        if isinstance(collective, AllReduceOp):
            self.calls.append(CollectiveCall("all_reduce", x.nbytes, x.dtype))
            return x * self.world if collective.op == "sum" else x.clone()
        if isinstance(collective, AllGatherOp):
            self.calls.append(CollectiveCall("all_gather", x.nbytes))
            return x.repeat(self.world, 1)
        assert isinstance(collective, AllToAllOp), "nothing is broadcast in a step"
        own = collective.out[0]
        self.calls.append(CollectiveCall("all_to_all", x.nbytes - own))
        return x[:own].repeat(self.world)
