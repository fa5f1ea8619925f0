"""Solo: a world of one. The maths is the same; the wire is not there."""

from torch import Tensor

from gradwire.comm.backend import Backend
from gradwire.comm.collectives import AllGatherOp, Collective


class SingleBackend(Backend):
    """Every collective of one rank is that rank's own tensor."""

    rank = 0
    world = 1
    prompt = True

    def move(self, collective: Collective) -> Tensor:
        x = collective.tensor
        return x[None] if isinstance(collective, AllGatherOp) else x
