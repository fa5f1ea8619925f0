"""Gossip run: what a decentralized training leaves in its folder, and how it goes on from there.

model.safetensors    the mean of all workers' models, with the mean of their statistics
rank-0.safetensors   a worker's own model, statistics, momentum, recurrent states, and the gossip's memory
progress.json        all that is no tensor
"""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradwire_lab.train import checkpoint
from gradwire_lab.train.checkpoint import MODEL, PROGRESS
from gradwire_lab.train.decentralized import Decentralized

COUNTERS = ("epoch", "at", "step", "seconds", "best", "kept", "ramp_steps")


def keep_gossip(folder: Path, training: Decentralized, best: bool) -> None:
    """Save a checkpoint; every process calls it."""
    row, buffers = training.hood.mean()  # all processes take part
    states = training.hood.states()
    ranks = {rank: _worker(training, i, states[i]) for i, rank in enumerate(training.place.ranks)}
    common = partial(_common, training, row.clone(), buffers) if training.place.first else None
    checkpoint.save(folder, training.step, ranks, common, partial(_barrier, training), best)


def _common(training: Decentralized, row: Tensor, buffers: dict[str, Tensor], folder: Path) -> None:
    checkpoint.save_tensors(training.hood.replicas.show_(row, buffers).state_dict(), folder / MODEL)
    progress = {
        **{name: getattr(training, name) for name in COUNTERS},
        "world": training.place.world,
        "schedule": {k: None if v == math.inf else v for k, v in training.schedule.state_dict().items()},
    }
    checkpoint.write_text(folder / PROGRESS, json.dumps(progress))


def _worker(training: Decentralized, which: int, gossip: dict[str, Tensor]) -> dict[str, Tensor]:
    hood, states = training.hood, training.passes.states
    hidden = {f"{j}/{k}": x for j, pair in enumerate(states[which]) for k, x in enumerate(pair)} if states else {}
    moments = {name: x[which] if x.dim() else x for name, x in _moments(training).items()}
    return {
        **checkpoint.prefixed(gossip, "gossip/"),
        **checkpoint.prefixed(hood.replicas.own_buffers(which), "buffer/"),
        **checkpoint.prefixed(moments, "optimizer/"),
        **checkpoint.prefixed(hidden, "state/"),
        "row": hood.replicas.rows[which],
        "loss": training.loss,
        "traffic": torch.tensor(hood.traffic(which), dtype=torch.float64),
    }


def _moments(training: Decentralized) -> dict[str, Tensor]:
    """What the optimizer remembers: rows, and counters that all rows share."""
    kept = training.optimizer.state.get(training.hood.replicas.rows, {})
    return {name: x for name, x in kept.items() if isinstance(x, Tensor)}


def _barrier(training: Decentralized) -> None:
    training.hood.total(torch.zeros(1, device=training.place.device)).item()


def resume_gossip(training: Decentralized, folder: Path, progress: dict[str, Any]) -> None:
    """Put a training where a checkpoint left it, in a world of the same size."""
    place, hood = training.place, training.hood
    if progress["world"] != place.world:
        raise ValueError(
            f"the run was left by {progress['world']} workers, and there are {place.world} now; what neighbors know of "
            "each other belongs to one graph, so go on with as many"
        )
    if hood.elastic and not (folder / f"rank-{place.ranks[0]}.safetensors").is_file():
        return  # it was dead when the others saved, and they take it in
    saved = {name: math.inf if value is None else value for name, value in progress["schedule"].items()}
    training.schedule.load_state_dict(saved)
    states = checkpoint.rank_states(folder, place.world, place.ranks)
    for i, state in enumerate(states):
        hood.replicas.rows[i].copy_(state["row"])
        for name, x in checkpoint.part(state, "buffer/").items():
            hood.replicas.buffers[name][i].copy_(x)
        _hidden(training, checkpoint.part(state, "state/"))
    hood.load([checkpoint.part(state, "gossip/") for state in states], [state["traffic"].tolist() for state in states])
    _restore_moments(training, [checkpoint.part(state, "optimizer/") for state in states])
    training.loss.copy_(states[0]["loss"])
    for name in COUNTERS:
        setattr(training, name, progress[name])
    training.follow()


def _restore_moments(training: Decentralized, states: list[dict[str, Tensor]]) -> None:
    rows = training.hood.replicas.rows
    for name, first in states[0].items():
        whole = torch.stack([state[name] for state in states]) if first.dim() else first
        training.optimizer.state[rows][name] = whole.to(rows.device) if first.dim() else whole


def _hidden(training: Decentralized, hidden: dict[str, Tensor]) -> None:
    if hidden:
        device = training.place.device
        pairs = [(hidden[f"{j}/0"].to(device), hidden[f"{j}/1"].to(device)) for j in range(len(hidden) // 2)]
        training.passes.states.append(pairs)
