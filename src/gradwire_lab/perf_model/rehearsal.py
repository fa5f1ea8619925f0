"""Rehearsal: a step of compression without the others, for what it costs here.

One rank's session runs as it would in a world of N, on gradients of the model's own shapes; an echo answers in place of
the other ranks. So encoding, and decoding what N ranks said, take their real time on this machine, and the collectives
that would have carried it are written down.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from gradwire.comm.backend import Backend
from gradwire.comm.collectives import AllGatherOp, AllReduceOp, AllToAllOp, Collective
from gradwire.engine.drive import Clock, drive
from gradwire.engine.plan import Plan
from gradwire.engine.session import Session
from gradwire_lab.perf_model.script import Message

Grads = Mapping[str, Tensor]

WARMUP = 2  # steps that do not count: the first begins with nothing owed, and no hints


class Echo(Backend):
    """A link on which everybody else says what I say, and who notes what was asked of it."""

    def __init__(self, world: int, device: torch.device) -> None:
        super().__init__()
        self.rank, self.world, self.device = 0, world, device
        self.heard: list[Message] = []

    def move(self, collective: Collective) -> Tensor:
        x = collective.tensor
        nbytes = x.numel() * x.element_size()
        if isinstance(collective, AllReduceOp):
            self.heard.append(Message("all_reduce", nbytes, x.dtype))
            return x * self.world if collective.op == "sum" else x.clone()
        if isinstance(collective, AllGatherOp):
            self.heard.append(Message("all_gather", nbytes))
            return x.repeat(self.world, 1)
        if isinstance(collective, AllToAllOp):
            self.heard.append(Message("all_to_all", nbytes - collective.out[0]))
            return x[: collective.out[0]].repeat(self.world)
        raise AssertionError("nothing is broadcast in a step")


@dataclass(frozen=True)
class Rehearsed:
    """Seconds of one rank in one step, the wire aside, and what the wire would carry.

    Attributes:
        encode: Until the first message of a launch is ready, all launches together.
        decode: From what was heard to the update, written back.
        messages: The collectives of the step, in order.
    """

    encode: float
    decode: float
    messages: tuple[Message, ...] = ()


def rehearse(
    plan: Plan,
    grads: Grads,
    *,
    repeats: int | Callable[[float], int] = 3,
    meet: Callable[[], None] = lambda: None,
) -> Rehearsed:
    """What a plan costs on this machine.

    Args:
        plan: For the world that is meant.
        grads: By name; read, never written.
        repeats: Steps that count, after two that warm up; or how many that are, if such a step takes so many seconds.
        meet: Called before each step that counts, so that ranks who measure together start together.
    """
    device = next(iter(grads.values())).device
    session = Session(plan, 0, plan.world, 0, device)
    session.donate()  # as DDP does, and plain loops do
    own = end_to_end(grads)

    def step() -> Rehearsed:
        for name, grad in grads.items():  # a step leaves the mean where the gradient was
            own[name].copy_(grad)
        meet()
        return _step(session, own)

    for _ in range(WARMUP):
        began = time.perf_counter()
        step()
    count = repeats if isinstance(repeats, int) else repeats(time.perf_counter() - began)
    found = [step() for _ in range(count)]
    return Rehearsed(median(one.encode for one in found), median(one.decode for one in found), found[-1].messages)


def end_to_end(grads: Grads) -> dict[str, Tensor]:
    """Room for gradients in one buffer, in the order in which DDP's buckets hold them, so that they are read there."""
    order = list(reversed(list(grads)))
    first = grads[order[0]]
    dtype = first.dtype if all(grad.dtype == first.dtype for grad in grads.values()) else torch.float32
    whole = torch.empty(sum(grads[name].numel() for name in order), device=first.device, dtype=dtype)
    parts = whole.split([grads[name].numel() for name in order])
    return {name: part.view(grads[name].shape) for name, part in zip(order, parts, strict=True)}


def _step(session: Session, grads: Grads) -> Rehearsed:
    device = session.device
    link, clock = Echo(session.world, device), Clock()
    _settle(device)
    began = time.perf_counter()
    heard = [drive(session.launch(i, grads), link, clock) for i in range(len(session.plan.launches))]
    verdict = drive(session.judge(heard, grads), link, clock)
    for name, update in verdict.updates.items():
        if update.data_ptr() != grads[name].data_ptr():
            grads[name].copy_(update)
    _settle(device)
    # A clock of the host does not see what a GPU still has to do; the end of the step does.
    decode = time.perf_counter() - began - clock.encode - clock.wire
    return Rehearsed(clock.encode, decode, tuple(link.heard))


def _settle(device: torch.device) -> None:
    """Wait for the device, so that what was launched before is not counted with what comes after."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
