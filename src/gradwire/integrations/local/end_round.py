"""What ranks exchange at the end of a round, and at the end of a start without traffic."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradwire.engine.drive import RoundGenerator, execute
from gradwire.engine.hosts import among_hosts
from gradwire.engine.step import StepResult
from gradwire.integrations.wire import Wire

if TYPE_CHECKING:
    from gradwire.integrations.local.handle import LocalSync


def end_round(handle: "LocalSync", wire: Wire, differences: dict[str, Tensor], buffers: Tensor | None) -> StepResult:
    """The mean difference of a fragment; then ranks agree on the next round, where that is measured."""
    if handle.group is not None:
        return handle.group.exchange(wire, differences, buffers)
    measured = None if handle.measured is None or handle.measured.chosen is not None else handle.measured
    if measured is not None:
        measured.begin(wire.device)
    skipped = wire.skipped
    updates = wire.sync(differences).updates
    is_skipped = wire.skipped > skipped  # reads what a GPU may know alone
    if buffers is not None and not is_skipped:
        execute(handle.outer.average_buffers(buffers, handle.link.world), handle.link, wire.clock)
    if handle.uneven_steps is not None:
        execute(handle.uneven_steps.agree(wire.device), handle.link, wire.clock)
    if measured is not None:
        execute(measured.agree(wire.device, handle.method.H), handle.link, wire.clock)
        handle.method = replace(handle.method, H=measured.chosen or handle.method.H)
    if handle.method.delay and wire.device.type == "cuda":
        torch.cuda.current_stream(wire.device).synchronize()  # this thread's, which the training does not wait for
    return StepResult(updates, is_skipped)


def compare_weights(handle: "LocalSync") -> RoundGenerator[int]:
    """Replicas compare their weights; of sharded ones, each rank with those that hold the same shards."""
    setup = handle.fragments[0].wire.setup
    if setup.sharded:
        return among_hosts(handle.outer.average_if_different(setup.plan_world))
    return handle.outer.average_if_different(handle.link.world)
