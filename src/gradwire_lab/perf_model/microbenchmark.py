"""Microbenchmark: a step of compression without other ranks, for what it costs here.

One rank's engine runs as it would in a world of N, on gradients of the model's own shapes; a loopback backend answers
in place of the other ranks. So encoding, and decoding the messages of N ranks, take their real time on this machine,
and the collectives that would have carried them are recorded.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from gradwire.engine.drive import Clock, execute
from gradwire.engine.plan import Plan
from gradwire.engine.step import Engine
from gradwire_lab.perf_model.comm_schedule import SETTLED
from gradwire_lab.perf_model.loopback import CollectiveCall, LoopbackBackend
from gradwire_lab.perf_model.timing import now

Grads = Mapping[str, Tensor]

WARMUP = 2  # steps that do not count: the first begins without an error to add


@dataclass(frozen=True)
class CodingTime:
    """Seconds of one rank in one step, the wire aside, and what the wire would carry.

    Attributes:
        encode: Until the first message of a bucket is ready, all buckets together.
        decode: From the received messages to the update, written back.
        calls: The collectives of the step, in order.
    """

    encode: float
    decode: float
    calls: tuple[CollectiveCall, ...] = ()


def time_coding(
    plan: Plan,
    grads: Grads,
    *,
    repeats: int | Callable[[float], int] = 3,
    meet: Callable[[], None] = lambda: None,
) -> CodingTime:
    """What a plan costs on this machine.

    Args:
        plan: For the world that is meant; its start is taken to be over.
        grads: By name; read, never written.
        repeats: Steps that count, after two that warm up; or how many that are, if such a step takes so many seconds.
        meet: Called before each step that counts, so that ranks who measure together start together.
    """
    device = next(iter(grads.values())).device
    engine = _settled(plan, device)
    own = end_to_end(grads)

    def step() -> CodingTime:
        for name, grad in grads.items():  # a step leaves the mean where the gradient was
            own[name].copy_(grad)
        meet()
        return _step(engine, own)

    for _ in range(WARMUP):
        began = now(device)
        step()
    count = repeats if isinstance(repeats, int) else repeats(now(device) - began)
    found = [step() for _ in range(count)]
    return CodingTime(median(one.encode for one in found), median(one.decode for one in found), found[-1].calls)


def _settled(plan: Plan, device: torch.device) -> Engine:
    """An engine whose start is over, with denominators of one where an optimizer would have given some."""
    engine = Engine(plan, 0, plan.world, 0, device)
    engine.step = SETTLED
    for state in engine.states:
        if "denominator" in state.tensors:
            state.tensors["denominator"].fill_(1.0)
    return engine


def end_to_end(grads: Grads) -> dict[str, Tensor]:
    """Room for gradients in one buffer, in the order in which DDP's buckets hold them, so that they are read there."""
    order = list(reversed(list(grads)))
    first = grads[order[0]]
    dtype = first.dtype if all(grad.dtype == first.dtype for grad in grads.values()) else torch.float32
    whole = torch.empty(sum(grads[name].numel() for name in order), device=first.device, dtype=dtype)
    parts = whole.split([grads[name].numel() for name in order])
    return {name: part.view(grads[name].shape) for name, part in zip(order, parts, strict=True)}


def _step(engine: Engine, grads: Grads) -> CodingTime:
    link, clock = LoopbackBackend(engine.world, engine.device), Clock()
    began = now(engine.device)
    execute(engine.run(grads), link, clock)
    # The host's clock does not see what a GPU still has to do; the end of the step does.
    decode = now(engine.device) - began - clock.encode - clock.wire
    return CodingTime(clock.encode, decode, tuple(link.calls))
