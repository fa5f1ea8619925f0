"""Precompile: the kernels that a plan needs are compiled or loaded before the first step.

Every kind of lane takes two steps of its own, on tensors of a few elements. What is compiled depends on types alone,
and is cached on disk: only the first attachment on a machine takes long. Then a warning says why.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gradwire.codecs import Codec
from gradwire.core import Segments
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
_log = logging.getLogger("gradwire")


def precompile(plan: Plan, device: torch.device, first: bool = False) -> None:
    """Have the kernels of all lanes ready. Kernels of a GPU are made for their sizes, so those wait.

    Args:
        plan: Which has the lanes.
        device: Where they compute.
        first: Whether this is the first rank, which logs that kernels are being compiled.
    """
    if not _compiles(device):
        return
    with compile_notice(device, first):
        for lane in plan.lanes:
            for start, codec, exchange in lane.step_table:
                kind = (lane.encoder(start).feedback, codec, exchange)
                if kind not in _compiled:
                    _compiled.add(kind)
                    _take_steps(lane, kind, min(plan.world, 2))


def _compiles(device: torch.device) -> bool:
    """Whether kernels are compiled when they are first used."""
    return device.type == "cpu" and accelerated() and versions("cpu") is not None


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


@contextmanager
def compile_notice(device: torch.device, first: bool) -> Iterator[None]:
    """On the first rank, log once that Numba compiles kernels that are not on disk, and how long it took."""
    if not first or not _compiles(device):
        yield
        return
    from numba.core import event

    class Notice(event.TimingListener):
        shown = False

        def on_start(self, event: Any) -> None:
            super().on_start(event)  # type: ignore[no-untyped-call]
            if not self.shown:
                self.shown = True
                _log.warning(
                    "gradwire: compiling CPU kernels, which takes up to a minute, or longer on a busy machine; it "
                    "happens once for each kind of kernel, since they are kept on disk"
                )

    notice = Notice()  # type: ignore[no-untyped-call]
    with event.install_listener("numba:compile", notice):
        yield
    if notice.done:
        _log.warning("gradwire: CPU kernels were compiled in %.0f s", notice.duration)
