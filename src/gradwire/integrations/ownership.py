"""Ownership: a gradient is averaged once, by one wire, between ``backward()`` and the optimizer's step."""

import gc
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradwire.integrations.trainer_warnings import warn_user
from gradwire.integrations.wire import Wire

_CALLED = (
    "the loop calls a DistributedDataParallel around the model that takes local steps, and it averages gradients in "
    "every step; call the module inside of it, ddp.module"
)
_owners: weakref.WeakSet[Wire] = weakref.WeakSet()  # wires that loops and optimizers call
_local: "weakref.WeakKeyDictionary[object, tuple[Mapping[str, nn.Parameter], int]]" = weakref.WeakKeyDictionary()
_ended: weakref.WeakSet[object] = weakref.WeakSet()  # handles that had their parameters in there


def refuse_averaged(parameters: Mapping[str, nn.Parameter], mine: Wire | None = None) -> None:
    """Refuse parameters whose gradients another wire or a DistributedDataParallel averages.

    Args:
        parameters: By name.
        mine: The wire that has them already, if any.
    """
    _refuse(lambda: _averaged(parameters, mine))


def refuse_wires(parameters: Mapping[str, nn.Parameter], world: int) -> None:
    """Refuse local steps of parameters whose gradients a wire averages over as many ranks in every step."""
    _refuse(lambda: _wired(parameters, world))


def refuse_local(parameters: Mapping[str, nn.Parameter], world: int) -> None:
    """The reverse: refuse a wire over at least the ranks that take local steps of the same parameters."""
    _refuse(lambda: _stepped(parameters, world))


def _refuse(reason: Callable[[], str | None]) -> None:
    """Raise the error of a conflict, unless the other object is garbage. Garbage collection may take a second."""
    if reason() is None:
        return
    gc.collect()
    if (found := reason()) is not None:
        raise ValueError(found)


def register_local(handle: object, parameters: Mapping[str, nn.Parameter], world: int) -> None:
    """Note that a handle, as long as it lives, takes local steps of these parameters, in place of an earlier one."""
    for earlier, (theirs, _) in list(_local.items()):
        if _shared(parameters, theirs.values()):
            release_local(earlier)
    _local[handle] = parameters, world
    if world > 1:
        _watch_ddp(handle, parameters, world)


def _watch_ddp(handle: object, parameters: Mapping[str, nn.Parameter], world: int) -> None:
    """Warn once, on rank 0, if a DistributedDataParallel averages in every step what takes local steps."""
    reference, told = weakref.ref(handle), list[str]()

    def note(ddp: DistributedDataParallel, args: Any) -> None:
        if torch.compiler.is_compiling() or told or reference() not in _local:
            return
        stopped = not (ddp.training and ddp.require_backward_grad_sync and torch.is_grad_enabled())
        if not stopped and ddp.process_group.rank() == 0 and not ddp._comm_hooks:
            told.append(_CALLED)
            warn_user(_CALLED)

    for ddp in _ddps():
        if world <= ddp.process_group.size() and _shared(parameters, ddp.parameters()):
            weakref.finalize(handle, ddp.register_forward_pre_hook(note).remove)


def has_local(handle: object) -> bool:
    """Whether a handle has its parameters, and no later one has taken them over."""
    return handle in _local


def release_local(handle: object) -> bool:
    """Take a handle off its parameters, which a wire may have then. Returns whether it had them."""
    if has_local(handle):
        _ended.add(handle)
    return _local.pop(handle, None) is not None


def has_ended(handle: object) -> bool:
    """Whether a handle had parameters, and has none any more. Those of replicas in one process have not ended."""
    return handle in _ended


def _wired(parameters: Mapping[str, nn.Parameter], world: int) -> str | None:
    for wire in _owners:
        if _covers(wire.link.world, world) and (name := _shared(parameters, wire.parameters.values())):
            return (
                f"the gradient of {name!r} is averaged by a wire in every step, so local steps would have no effect; "
                "delete the wire and its calls, or let it average over the ranks of a host with process_group="
            )
    return None


def _stepped(parameters: Mapping[str, nn.Parameter], world: int) -> str | None:
    for theirs, ranks in _local.values():
        if _covers(world, ranks) and (name := _shared(parameters, theirs.values())):
            return (
                f"gradwire.local takes local steps of {name!r}, and a wire that averages its gradient in every step "
                "would make them useless; call close() of the handle first, or let the wire average over the ranks of "
                "a host with process_group="
            )
    return None


def _covers(averaged: int, stepped: int) -> bool:
    """Whether a wire over so many ranks undoes local steps of so many. One rank alone is refused as all of them are."""
    return 1 < stepped <= averaged or stepped == averaged == 1


def _averaged(parameters: Mapping[str, nn.Parameter], mine: Wire | None) -> str | None:
    for wire in _owners:
        if wire is not mine and (name := _shared(parameters, wire.parameters.values())):
            # The hooks of a sharded model keep its wire.
            other = "" if wire.setup.sharded else ", or delete the other wire and its optimizer first"
            return (
                f"the parameter {name!r} has a wire already, and would be averaged twice; change the spec with "
                f"wire.set(...){other}"
            )
    for ddp in _ddps():
        if name := _shared(parameters, (p for p in ddp.parameters() if p.requires_grad)):
            return (
                f"the gradient of {name!r} is averaged by a DistributedDataParallel already; pass that module to "
                "gradwire.compress, or train without it"
            )
    return None


def _ddps() -> list[DistributedDataParallel]:
    """All that there are. A parameter does not refer to the one that averages it, but every object to its class."""
    kinds = DistributedDataParallel, *DistributedDataParallel.__subclasses__()
    return [x for x in gc.get_referrers(*kinds) if isinstance(x, DistributedDataParallel)]


def _shared(parameters: Mapping[str, nn.Parameter], others: Iterable[Tensor]) -> str | None:
    theirs = {id(p) for p in others}
    return next((name for name, p in parameters.items() if id(p) in theirs), None)


def register_wire(wire: Wire) -> None:
    """Give a wire its parameters, and let it know of backward passes, so that a forgotten call is noticed."""
    _owners.add(wire)
    if wire.link.world == 1 or wire.setup.hooked:
        return
    reference = weakref.ref(wire)

    def note(_: Tensor) -> None:
        if (owner := reference()) is not None:
            owner.last_event = "backward"

    for p in wire.parameters.values():
        weakref.finalize(wire, p.register_post_accumulate_grad_hook(note).remove)


def release(wire: Wire) -> None:
    """Take a wire off its parameters, which may have another one then. Its report and its state stay."""
    wire.is_attached = False
    _owners.discard(wire)
    wire.remove_hooks()


def is_registered(wire: Wire) -> bool:
    """Whether a wire has its parameters for itself; those of replicas in one process do not."""
    return wire in _owners


def check_order(wire: Wire, optimizer: Optimizer) -> None:
    """Refuse a step with gradients that were not averaged, or were averaged twice."""
    event, wire.last_event = wire.last_event, "step"
    if event not in ("backward", "second call") or not _must_be_called(wire):
        return
    own = {id(p) for p in wire.parameters.values()}
    mine = [p for group in optimizer.param_groups for p in group["params"] if id(p) in own and p.grad is not None]
    if mine and event == "backward":
        wire.last_event = event
        raise RuntimeError(
            "gradients were not averaged: backward() has run since the wire was last called; call wire() after "
            "backward() and before optimizer.step()"
        )
    if mine:
        raise RuntimeError(
            "gradients were averaged twice: wire() was called twice since backward(); call it once before "
            "optimizer.step()"
        )
    wire.last_event = event


def _must_be_called(wire: Wire) -> bool:
    """Whether ranks drift apart if an optimizer steps without a call."""
    engine = wire.executor.engine.unwrapped
    return not (wire.setup.hooked or wire.link.world == 1 or engine.sends_nothing)
