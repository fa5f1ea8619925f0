"""Checkpoints of local steps: this rank's state as tensors by kind and name.

``local/steps`` and ``local/inside`` are the place in the training, ``local/outer/NAME`` and ``local/optimizer/...`` the
outer weights and their optimizer, ``local/number/...`` numbers of its state that are no tensors, ``local/own/NAME`` the
replica itself, ``local/kept/NAME`` by how much it was ahead of the outer weights when the round began, ``local/ages``
inner steps since each fragment was sent, ``local/flight/NAME`` what a message under way led to, ``local/pace`` the
steps of each rank in a round, ``local/H`` those of all, where they were measured, ``local/method`` the numbers of all
rounds, ``local/rounds`` how often a schedule has changed them, ``local/round`` the next one of an elastic group,
``local/inner/...`` tensors of inner optimizers, where these are saved, too. Errors have the names that wires save them
under; those of further fragments come after ``local/fragment/1/``.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwire.engine import StepResult
from gradwire.engine.checkpoint import Saved, is_own, of_shard
from gradwire.integrations.comm_worker import CompletedFuture
from gradwire.integrations.consistency import errors_on_all_ranks
from gradwire.integrations.local.closing import restart
from gradwire.integrations.local.outer import on_host, refuse_unsaved, require_own
from gradwire.integrations.local.round_length import take_rounds
from gradwire.integrations.model import distributed_as, local_part
from gradwire.local.method import LocalMethod

if TYPE_CHECKING:
    from gradwire.integrations.local.handle import LocalSync

_KEY = "local/"
_NUMBERS = ("H", "rate", "momentum", "nesterov", "alpha", "keep", "delay")  # of rounds, which a state must share


def save(handle: "LocalSync") -> dict[str, Tensor]:
    """This rank's state."""
    refuse_unsaved(handle.outer)
    first, *others = handle.wires
    state = {"steps": torch.tensor(handle.steps), "inside": torch.tensor(handle.inside)}
    state["method"] = _numbers_of(handle.schedule)
    if handle.schedule.later:  # the next round may take others, and has not begun
        state["rounds"] = torch.tensor(len(handle.schedule.later) - len(handle.method.later))
    state |= {f"own/{name}": x.cpu().contiguous() for name, x in handle.outer.model_tensors().items()}
    state |= {f"kept/{name}": on_host(x) for name, x in handle.outer.kept.items()}
    state["ages"] = torch.tensor([fragment.age for fragment in handle.fragments])
    for fragment in handle.fragments:
        if fragment.pending_result is not None:
            result = fragment.pending_result.result()
            state[_skipped_key(fragment.number)] = torch.tensor(result.skipped)
            state |= {f"flight/{name}": on_host(x) for name, x in result.updates.items()}
    state |= handle.outer.state_dict()
    if handle.measured is not None and handle.measured.chosen is not None:
        state["H"] = torch.tensor(handle.method.H)  # which `set` may have changed since
    if handle.uneven_steps is not None:
        state["pace"] = torch.tensor(handle.uneven_steps.steps)
    if handle.group is not None:
        state["round"] = torch.tensor(handle.group.rounds.step)
    for number, wire in enumerate(others, 1):
        state |= {f"fragment/{number}/{name}": x for name, x in wire.state_dict().items()}
    if handle.start.wire is not None:
        state |= {f"start/{name}": x for name, x in handle.start.wire.state_dict().items()}
    for number, optimizer in enumerate(handle.inner_optimizers):
        state |= {f"inner/{number}/{name}": x for name, x in _tensors(optimizer).items()}
    return {**first.state_dict(), **{f"{_KEY}{name}": x for name, x in state.items()}}


def load(handle: "LocalSync", states: Sequence[Saved]) -> None:
    """Take over this rank's own state, or those of all ranks of another world."""
    states = of_shard(handle.wire.engine, states)
    with errors_on_all_ranks(handle.link):
        _check(handle, states)
    first, *others = handle.wires
    first.load_state_dict([{key: x for key, x in one.items() if not key.startswith(_KEY)} for one in states])
    for number, wire in enumerate(others, 1):
        wire.load_state_dict([_below(one, f"{_KEY}fragment/{number}/") for one in states])
    if handle.start.wire is not None:
        handle.start.wire.load_state_dict([_below(one, f"{_KEY}start/") for one in states])
    mine = next((one for one in states if is_own(handle.wire.engine, one)), None)
    local = _below(states[0] if mine is None else mine, _KEY)
    handle.steps, handle.inside, handle.start.averaged = int(local["steps"]), int(local["inside"]), False
    handle.loaded_steps, handle.rounds = handle.steps, first.engine.unwrapped.step
    take_rounds(handle, _rounds_of(handle, local))
    handle.outer.load_state_dict(local)
    handle.unfinished.clear()
    if handle.measured is not None and "H" in local:
        handle.measured.chosen = int(local["H"])
        handle.schedule = handle.method = replace(handle.method, H=handle.measured.chosen)
    _load_pending_results(handle, local)
    if mine is not None:
        handle.outer.load_model_tensors(_below(mine, f"{_KEY}own/"))
        handle.outer.kept = {name: x.to(handle.wire.device) for name, x in _below(local, "kept/").items()}
        if handle.uneven_steps is not None and "pace" in local:
            handle.uneven_steps.steps = local["pace"].tolist()
            handle.uneven_steps.restart()
        for number, optimizer in enumerate(handle.inner_optimizers):
            _load_tensors(optimizer, _below(local, f"inner/{number}/"))
        if handle.group is not None:
            handle.group.resume(local)
        return
    restart(handle)


def _numbers_of(schedule: LocalMethod) -> Tensor:
    """A row for each of the rounds: after which step they begin, and their numbers."""
    rounds = [(0, schedule), *schedule.later]
    rows = [[first, *(getattr(one, name) for name in _NUMBERS)] for first, one in rounds]
    return torch.tensor(rows, dtype=torch.float64)


def _rounds_of(handle: "LocalSync", local: Saved) -> LocalMethod:
    """The rounds that the state was saved in, whose rate it has."""
    schedule = handle.schedule
    if "rounds" in local and int(local["rounds"]) <= len(schedule.later):
        return schedule.changed(int(local["rounds"]))
    return schedule.after(handle.steps - handle.inside)


def _load_pending_results(handle: "LocalSync", local: Saved) -> None:
    results = _below(local, "flight/")
    ages = local["ages"].tolist() if "ages" in local else [handle.inside] * len(handle.fragments)
    for fragment, age in zip(handle.fragments, ages, strict=True):
        fragment.pending_result, fragment.age, number = None, age, fragment.number
        if _skipped_key(number) in local:
            updates = {name: results[name].to(fragment.wire.device) for name in fragment.names if name in results}
            fragment.pending_result = CompletedFuture([StepResult(updates, bool(local[_skipped_key(number)]))])


def _tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """The tensors of an optimizer's state, by the number of the parameter and their name."""
    slots = optimizer.state_dict()["state"].items()
    tensors = {f"{i}/{key}": x for i, slot in slots for key, x in slot.items() if isinstance(x, Tensor)}
    return {name: on_host(local_part(x)) for name, x in tensors.items()}


def _load_tensors(optimizer: Optimizer, tensors: Saved) -> None:
    state, parameters = optimizer.state_dict(), [p for group in optimizer.param_groups for p in group["params"]]
    for name, x in tensors.items():
        number, _, key = name.partition("/")
        x = distributed_as(parameters[int(number)], x.clone()) if x.ndim else x.clone()  # a count has no dimensions
        state["state"].setdefault(int(number), {})[key] = x
    optimizer.load_state_dict(state)


def _skipped_key(number: int) -> str:
    return f"dropped/{number}" if number else "dropped"


def _below(state: Saved, prefix: str) -> dict[str, Tensor]:
    """The part of a state whose keys begin so, without that."""
    return {key.removeprefix(prefix): x for key, x in state.items() if key.startswith(prefix)}


def _check(handle: "LocalSync", states: Sequence[Saved]) -> None:
    if not states or any(f"{_KEY}steps" not in one for one in states):
        raise ValueError("this is no state of local steps: it lacks local/steps; pass what state_dict() returned")
    outer = handle.outer
    require_own(outer, "outer.load_state_dict()")
    needed = ["rate", *(f"outer/{name}" for name in outer.weights), *(f"buffer/{name}" for name in outer.buffers)]
    missing = [name for name in needed if f"{_KEY}{name}" not in states[0]]
    if handle.group is not None and (len(states) != 1 or not handle.fits(states[0])):
        raise ValueError("a worker of an elastic group continues from its own state; pass that one")
    if missing:
        raise ValueError(f"the state lacks {missing[0]}; is it a checkpoint of another model?")
    _check_rounds(handle, states[0])
    saved = 1 + len({key.split("/")[2] for key in states[0] if key.startswith(f"{_KEY}fragment/")})
    if saved != len(handle.fragments):
        raise ValueError(f"the state has {saved} fragments, and this model {len(handle.fragments)}; take as many")


def _check_rounds(handle: "LocalSync", state: Saved) -> None:
    """Refuse a state of other rounds: their rate and momentum would be continued by these."""
    own, saved = _numbers_of(handle.schedule), state.get(f"{_KEY}method")  # older states have none
    if saved is None:
        return
    given = 0 if handle.measured is None else 2  # the first column; H may have been measured
    if own.shape != saved.shape or not torch.equal(own[:, given:], saved[:, given:]):
        texts = ["; ".join(_row_text(row) for row in table.tolist()) for table in (saved, own)]
        raise ValueError(
            f"the state was saved in rounds of {texts[0]}, and these have {texts[1]}; call outer.set(...) with the "
            "first ones before loading, and with others after it"
        )


def _row_text(row: Sequence[float]) -> str:
    text = ", ".join(f"{name}={number:g}" for name, number in zip(_NUMBERS, row[1:], strict=True) if number)
    return f"{text} from step {row[0]:.0f}" if row[0] else text
