"""Local steps of models that a trainer has prepared: its DistributedDataParallel averages no more."""

import math
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gradwire.integrations.ddp import find_ddp
from gradwire.integrations.entry_point import EntryPoint
from gradwire.integrations.local.attach import local
from gradwire.integrations.local.handle import LocalSync
from gradwire.integrations.trainer_warnings import warn_long_start, warn_user
from gradwire.local.method import LocalMethod


def local_prepared(
    entry: EntryPoint, model: nn.Module, optimizers: Sequence[Optimizer], spec: str | LocalMethod, **options: Any
) -> LocalSync:
    """`local`, for a model that may be in a DistributedDataParallel over all ranks.

    The handle is called after each step of the last optimizer, and saves the states of all of them.
    """
    entry.rounds(spec)  # or it would name gradwire.local
    ddp = find_ddp(model)
    if ddp is not None:
        # As inside of its no_sync(), for good.
        ddp.require_backward_grad_sync = ddp.require_forward_param_sync = ddp.broadcast_buffers = False
    outer = local(model if ddp is None else ddp.module, optimizers, spec, **options)
    outer.inner_optimizers = list(optimizers)
    optimizers[-1].register_step_post_hook(lambda *step: outer())
    return outer


def warn_of_last_steps(outer: LocalSync, spec: object, max_steps: float) -> None:
    """Warn, on rank 0, of a training that will end in its start or inside a round.

    Args:
        outer: Whose training begins, or continues.
        spec: As the user wrote it.
        max_steps: At which the training ends; not above 0, or infinite, if it is not known.
    """
    start = outer.method.start
    if outer.link.rank or not 0 < max_steps < math.inf:
        return
    warn_long_start(start, max_steps, spec)
    if max_steps <= max(outer.steps, start) or not _rounds_are_known(outer):
        return
    _, last = outer.schedule.rounds_within(int(max_steps), max(outer.steps - outer.inside, start))
    if last == int(max_steps):
        return
    H = outer.schedule.after(last).H
    texts = [f"{end:.0f}" for end in (last, last + H) if end > outer.steps]
    warn_user(f"max_steps={max_steps:.0f} ends inside a round of H={H}; set max_steps={' or '.join(texts)}")


def warn_inside_round(outer: LocalSync, handle: str) -> None:
    """Warn, on rank 0, of a training that ends with steps that no round has averaged.

    Args:
        outer: Whose training ends.
        handle: How the user calls it.
    """
    last = max(fragment.age for fragment in outer.fragments)
    under_way = any(fragment.pending_result is not None for fragment in outer.fragments)
    if outer.link.rank or not (last or under_way):
        return
    inside = f"the training ends inside a round, whose {last} step{'s' * (last > 1)} were not averaged"
    before = "the training ends before the message of the last round was applied, whose steps are not averaged yet"
    warn_user(
        f"{before if under_way else inside}, so that every rank has weights of its own; {_end_of_round(outer)}use the "
        f"weights that all ranks share, inside of `with {handle}.averaged():`"
    )


def _end_of_round(outer: LocalSync) -> str:
    """After how many steps all weights are averaged, if that ever is so."""
    if not _rounds_are_known(outer):
        return ""
    H, before = outer.method.H, outer.steps - outer.inside
    return f"end with a round of {H}, after {f'{before} or ' if before else ''}{before + H} steps, or "


def _rounds_are_known(outer: LocalSync) -> bool:
    """Whether it is known at which steps all weights are averaged."""
    chooses = outer.uneven_steps is not None or (outer.measured is not None and outer.measured.chosen is None)
    return not chooses and not outer.method.delay and len(outer.fragments) == 1
