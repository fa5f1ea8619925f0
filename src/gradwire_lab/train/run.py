"""Run: one training in its folder: started or gone on with, saved, recorded."""

import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradwire.comm import Traffic
from gradwire_lab.train import checkpoint
from gradwire_lab.train.checkpoint import MODEL, OPTIMIZER, PROGRESS
from gradwire_lab.train.data import TextTask
from gradwire_lab.train.decentralized import Decentralized
from gradwire_lab.train.exam import Score
from gradwire_lab.train.gossip_run import keep_gossip, resume_gossip
from gradwire_lab.train.loop import Listener, Training
from gradwire_lab.train.place import Place, alone
from gradwire_lab.train.recipe import Recipe
from gradwire_lab.train.record import Records, read
from gradwire_lab.train.shelf import load as load_recipe

COUNTERS = ("epoch", "at", "step", "seconds", "best", "kept", "ramp_steps")


def sit(
    recipe: Recipe, place: Place, folder: Path, listen: Listener, resume: bool = False, title: str = ""
) -> dict[str, Any]:
    """Train in this process, from the start or from the last checkpoint of the folder, to the end.

    Returns:
        The final record.
    """
    found = checkpoint.find(folder, "last") if resume else None
    progress = checkpoint.progress_of(found) if found else {}
    training = (Decentralized if recipe.gossip.method else Training)(recipe, place, progress.get("ramp_steps"))
    if found is not None and isinstance(training, Decentralized):
        resume_gossip(training, found, progress)
    elif found is not None:
        restore(training, found, progress)
    if training.step > training.last_step:
        raise ValueError(
            f"{folder} has {training.step} steps behind it, and is asked to end after {training.last_step}; ask for "
            "more with train.epochs or train.iterations, or leave them as they were"
        )
    back = place.meeting is not None and training.step > progress.get("step", 0)  # the others went on meanwhile
    with Records(folder, training.position, place.first) as records:
        if place.first and not resume and not training.step:
            checkpoint.clear(folder)  # those of a run that is written over, now that nothing can be refused any more

        def hear(record: dict[str, Any]) -> None:
            if place.first:
                if record["event"] == "start":
                    record = {**record, "recipe": title or folder.name, "command": sys.argv}
                records.write(record)
                listen(record)

        past = read(folder)
        if back:
            training.seconds = max((record.get("seconds", 0.0) for record in past), default=0.0)
            listen({"event": "back", "worker": place.ranks[0], "step": training.step})
        epochs = [record for record in past if record["event"] == "epoch"]
        return training.go(hear, partial(keep, folder), epochs[-1] if epochs else None)


def evaluate(folder: Path, which: str, split: str, device: torch.device | str, root: str = "") -> Score:
    """The score of a run's ``last`` or ``best`` checkpoint."""
    recipe = load_recipe(folder / "recipe.toml")
    if root:
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"root": root})})
    found = checkpoint.find(folder, which)
    if found is None:
        raise ValueError(f"{folder} has no {which} checkpoint; give the folder of a run, such as runs/digits-0")
    training = Training(recipe, alone(1, device))
    splits = ("test", "valid") if isinstance(training.task, TextTask) else ("test",)
    if split not in splits:
        raise ValueError(f"{recipe.data.name} has no split {split!r} to evaluate; choose {' or '.join(splits)}")
    _fill(training.model, recipe, found)
    return training.score(split)


def _fill(model: torch.nn.Module, recipe: Recipe, folder: Path) -> None:
    """Give a model the weights of a checkpoint."""
    try:
        model.load_state_dict(checkpoint.load_tensors(folder / MODEL))
    except RuntimeError as wrong:
        why = " ".join(str(wrong).split())
        raise ValueError(
            f"{folder / MODEL} holds another model than {recipe.model.name} makes now ({why}); name the model and the "
            "options that it was trained with"
        ) from None


# -- keeping -----------------------------------------------------------------------------------------------------------


def keep(folder: Path, training: Training, best: bool) -> None:
    """Save a checkpoint of a training; every process calls it."""
    if isinstance(training, Decentralized):
        keep_gossip(folder, training, best)
        return
    shown = training.crew.shown_buffers(training.recipe.train.buffers)  # all processes take part
    ranks = {rank: _rank_state(training, i) for i, rank in enumerate(training.place.ranks)}
    common = partial(_common, training, shown) if training.place.first else None
    checkpoint.save(folder, training.step, ranks, common, partial(_barrier, training), best)


def _common(training: Training, shown: dict[str, Tensor], folder: Path) -> None:
    checkpoint.save_tensors({**training.model.state_dict(), **shown}, folder / MODEL)
    rest = checkpoint.save_optimizer(training.optimizer, folder / OPTIMIZER)
    progress = {
        **{name: getattr(training, name) for name in COUNTERS},
        "world": training.place.world,
        "hosts": _hosts(training),
        "optimizer": rest,
        "schedule": {k: None if v == math.inf else v for k, v in training.schedule.state_dict().items()},
        "scaler": training.scaler.state_dict() if training.scaler is not None else None,
        "account": _account(training),
    }
    checkpoint.write_text(folder / PROGRESS, json.dumps(progress))


def _rank_state(training: Training, i: int) -> dict[str, Tensor]:
    crew, states = training.crew, training.passes.states
    hidden = {f"{j}/{k}": x for j, pair in enumerate(states[i]) for k, x in enumerate(pair)} if states else {}
    return {
        **checkpoint.prefixed(crew.wires[i].state_dict(), "wire/"),
        **checkpoint.prefixed(crew.buffers[i], "buffer/"),
        **checkpoint.prefixed(hidden, "state/"),
        "loss": training.loss,
    }


def _account(training: Training) -> dict[str, Any]:
    wire = training.crew.wire
    traffic, inside, clock = wire.link.traffic, wire.link.inside, wire.clock
    return {
        "traffic": [traffic.sent, traffic.received, traffic.collectives],
        "inside": [inside.sent, inside.received, inside.collectives],
        "clock": [clock.encode, clock.wire, clock.decode],
        "said": dict(wire.session.said),
        "meant": dict(wire.session.meant),
        "rings": list(training.rings.items()),
        "skipped": training.skipped,
    }


def _hosts(training: Training) -> list[list[int]] | None:
    """The ranks of each host, where that makes a difference."""
    grouping = training.crew.wire.link.grouping
    return None if grouping is None else [list(host) for host in grouping.hosts]


def _barrier(training: Training) -> None:
    training.crew.total(torch.zeros(1, device=training.place.device)).item()


# -- going on ----------------------------------------------------------------------------------------------------------


def restore(training: Training, folder: Path, progress: dict[str, Any]) -> None:
    """Put a training where a checkpoint left it.

    A world of another size takes over the mean of all debts, starts with the evaluated statistics, and begins the epoch
    anew that it was in.
    """
    place, crew = training.place, training.crew
    _fill(training.model, training.recipe, folder)
    checkpoint.load_optimizer(training.optimizer, folder / OPTIMIZER, progress["optimizer"])
    saved = {name: math.inf if value is None else value for name, value in progress["schedule"].items()}
    training.schedule.load_state_dict(saved)
    if training.scaler is not None and progress["scaler"]:
        training.scaler.load_state_dict(progress["scaler"])
    states = checkpoint.rank_states(folder, place.world, place.ranks)
    same = progress["world"] == place.world
    alike = same and progress.get("hosts") == _hosts(training)
    saved_by_all = states if alike or not same else checkpoint.rank_states(folder, 0, ())
    for i, wire in enumerate(crew.wires):
        held = states[i : i + 1] if alike else saved_by_all
        wire.load_state_dict([checkpoint.part(state, "wire/") for state in held])
        _restore_account(wire, progress["account"])
        if same:
            _restore_own(training, i, states[i])
        elif i:
            crew.buffers[i] = {name: x.clone() for name, x in crew.buffers[0].items()}
    for name in COUNTERS:
        setattr(training, name, progress[name])
    _restore_rings(training, progress)
    if not same:
        _relocate(training, progress["account"])


def _restore_own(training: Training, i: int, state: dict[str, Tensor]) -> None:
    for name, x in checkpoint.part(state, "buffer/").items():
        training.crew.buffers[i][name].copy_(x)
    training.loss.copy_(state["loss"])
    hidden = checkpoint.part(state, "state/")
    if hidden:
        pairs = [(hidden[f"{j}/0"], hidden[f"{j}/1"]) for j in range(len(hidden) // 2)]
        training.passes.states.append([(h.to(training.loss.device), c.to(training.loss.device)) for h, c in pairs])


def _restore_account(wire: Any, account: dict[str, Any]) -> None:
    wire.link.traffic = Traffic(*account["traffic"])
    if wire.link.grouping is not None:
        wire.link.inside = Traffic(*account.get("inside", ()))
    wire.clock.encode, wire.clock.wire, wire.clock.decode = account["clock"]
    wire.session.said.clear()
    wire.session.said.update(account["said"])
    wire.session.meant.clear()
    wire.session.meant.update(account["meant"])


def _restore_rings(training: Training, progress: dict[str, Any]) -> None:
    """What sittings with other rings would have sent goes on being counted as theirs."""
    account = progress["account"]
    then = len(progress.get("hosts") or range(progress["world"]))
    told = dict(account.get("rings") or [(then, sum(account["meant"].values()))])
    (here,) = training.rings
    training.elsewhere = {size: dense for size, dense in told.items() if size != here}
    training.skipped_before = account.get("skipped", 0)


def _relocate(training: Training, account: dict[str, Any]) -> None:
    """Count steps as this world would have: its epochs have another number of them."""
    del account
    # A checkpoint within an epoch has no place in another world's epoch; the epoch is begun again.
    training.at = 0
    training.step = training.epoch * training.loader.steps
    training.loss.zero_()
