"""Link: the only door to the network."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.comm.collectives import BroadcastOp, Collective, Traffic, fuse, traffic
from gradwire.comm.host_layout import HostLayout
from gradwire.core.requests import Request


class Backend(ABC):
    """Moves bytes for one rank, and counts them."""

    rank: int
    world: int
    device = torch.device("cpu")  # where small agreements must live
    grouping: HostLayout | None = None  # which ranks share a host, where that makes a difference
    inside = Traffic()  # what stays inside a host; `traffic` is the rest
    prompt = False  # whether collectives of CUDA tensors only queue up on the device, so that no host waits in them

    def __init__(self) -> None:
        self.traffic = Traffic()

    @abstractmethod
    def move(self, collective: Collective) -> Tensor:
        """Carry out one collective; every rank calls the same ones in the same order."""

    def run(self, collective: Collective) -> Tensor:
        """Carry out a collective, and count its bytes."""
        self.traffic += traffic(collective, self.rank, self.world)
        return self.move(collective)

    def again(self, collective: Collective, heard: Tensor) -> None:
        """Carry out a collective that was carried out before, and write its result to where that one's lies."""
        heard.copy_(self.run(collective))

    def answer(self, asks: Sequence[Request]) -> list[Any]:
        """Answer a round of asks with as few collectives as there are kinds."""
        talk = fuse(asks, self.world)
        try:
            collective = next(talk)
            while True:
                collective = talk.send(self.run(collective))
        except StopIteration as done:
            answers: list[Any] = done.value
            return answers

    def broadcast_(self, tensor: Tensor) -> None:
        """Overwrite a tensor with rank 0's."""
        tensor.copy_(self.run(BroadcastOp(tensor)))
