"""Precompile: the kernels that a plan needs are compiled or loaded before the first step.

Every kind of lane takes two steps of its own, on tensors of a few elements. What is compiled depends on types alone,
and is cached on disk: only the first attachment on a machine takes long.
"""

import torch

from gradwire.codecs.codec import Codec
from gradwire.core.segments import Segments
from gradwire.engine.lane import Lane
from gradwire.engine.lockstep import Lockstep
from gradwire.engine.plan import Plan
from gradwire.engine.step import Engine
from gradwire.exchanges import Exchange
from gradwire.feedback import Feedback
from gradwire.kernels.dispatch import accelerated, versions

Kind = tuple[Feedback, Codec, Exchange]

_TINY = Segments(("a", "b"), ((12, 8), (5, 3)))
_compiled: set[Kind] = set()


def precompile(plan: Plan, device: torch.device) -> None:
    """Have the kernels of all lanes ready. Kernels of a GPU are made for their sizes, so those wait."""
    if device.type != "cpu" or not accelerated() or versions("cpu") is None:
        return
    for lane in plan.lanes:
        for start, codec, exchange in lane.step_table:
            kind = (lane.encoder(start).feedback, codec, exchange)
            if kind not in _compiled:
                _compiled.add(kind)
                _take_steps(lane, kind, min(plan.world, 2))


def _take_steps(lane: Lane, kind: Kind, world: int) -> None:
    feedback, codec, exchange = kind
    units = _TINY if lane.units == lane.tensors else _TINY.merged()
    # Without a start: its steps would take the place of those whose kernels are wanted.
    tiny = Lane(lane.label, _TINY, units, feedback, ((0, codec, exchange),))
    plan = Plan(((tiny,),), world)
    engines = [Engine(plan, rank, world, 0, torch.device("cpu")) for rank in range(world)]
    for _ in range(2):
        shapes = zip(_TINY.names, _TINY.shapes, strict=True)
        grads = {name: torch.linspace(-1.0, 1.0, shape[0] * shape[1]).view(shape) for name, shape in shapes}
        own = [{name: grad.clone() for name, grad in grads.items()} for _ in engines]
        Lockstep(world).drive([engine.run(grads) for engine, grads in zip(engines, own, strict=True)])
    if codec.indices is not None and codec.indices.warm_up is not None:
        codec.indices.warm_up()
