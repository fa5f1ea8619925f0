"""Local steps of models that a trainer has prepared: its DistributedDataParallel stops averaging."""

import math
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradwire.integrations.ddp import find_ddp
from gradwire.integrations.entry_point import EntryPoint
from gradwire.integrations.local.attach import local
from gradwire.integrations.local.handle import LocalSync
from gradwire.integrations.trainer_warnings import warn_of_start, warn_user
from gradwire.local.method import LocalMethod

_hooks: "WeakKeyDictionary[Optimizer, RemovableHandle]" = WeakKeyDictionary()
_FLAGS = "require_backward_grad_sync", "require_forward_param_sync", "broadcast_buffers"
_stopped: "WeakKeyDictionary[nn.Module, dict[str, bool]]" = WeakKeyDictionary()  # what the flags were


def local_prepared(
    entry: EntryPoint,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    spec: str | LocalMethod,
    scaler: "torch.amp.GradScaler | None" = None,
    **options: Any,
) -> LocalSync:
    """`local`, for a model that may be in a DistributedDataParallel over all ranks.

    The handle is called after each step of the last optimizer, also one that the scaler skips. It saves the states of
    all of them.
    """
    entry.rounds(spec)  # or it would name gradwire.local
    if options.get("uneven"):
        raise ValueError(
            "a trainer gives all ranks equally many steps, and with uneven=True those that end first would be waited "
            "for; leave it out, or write a loop that ends by outer.rounds"
        )
    if not optimizers:
        raise ValueError("there is no prepared optimizer; pass it to accelerator.prepare() first")
    ddp = find_ddp(model)
    stop_averaging(model)
    outer = local(model if ddp is None else ddp.module, optimizers, spec, scaler=scaler, **options)
    outer.inner_optimizers = list(optimizers)
    outer.closing.callback(_resume_averaging, model)
    _call_after_steps(outer, optimizers, scaler)
    return outer


def stop_averaging(model: nn.Module) -> None:
    """Have a model's DistributedDataParallel, if it is in one, average nothing, as inside of its no_sync()."""
    ddp = find_ddp(model)
    if ddp is not None:
        _stopped.setdefault(ddp, {name: getattr(ddp, name) for name in _FLAGS})
        vars(ddp).update(dict.fromkeys(_FLAGS, False))


def _resume_averaging(model: nn.Module) -> None:
    """Have a DistributedDataParallel average as it did before."""
    ddp = find_ddp(model)
    if ddp is not None:
        vars(ddp).update(_stopped.pop(ddp, {}))


def _call_after_steps(outer: LocalSync, optimizers: Sequence[Optimizer], scaler: "torch.amp.GradScaler | None") -> None:
    last = optimizers[-1]
    if last in _hooks:
        _hooks[last].remove()  # of an earlier training
    hook = _hooks[last] = last.register_step_post_hook(lambda *step: outer())
    outer.closing.callback(_end_calls, last, hook)
    if scaler is None:
        return
    step, reference = scaler.step, ref(outer)  # the scaler outlives a handle that another one replaces

    def counted(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        mine = reference()
        if mine is None or optimizer not in optimizers or _hooks.get(last) is not hook:
            return step(optimizer, *args, **kwargs)
        before = mine.steps
        mine.average_gradients()  # so that all ranks skip a step of the start, or none
        result = step(optimizer, *args, **kwargs)
        if optimizer is last and mine.steps == before:
            mine()  # this rank alone may have skipped it, and all take part in a round
        return result

    scaler.step = counted  # type: ignore[method-assign]


def _end_calls(optimizer: Optimizer, hook: RemovableHandle) -> None:
    hook.remove()
    if _hooks.get(optimizer) is hook:  # no other handle has replaced it
        del _hooks[optimizer]


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
    warn_of_start(start, max_steps, spec, measures=False)
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
