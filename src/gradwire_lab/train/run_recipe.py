"""Run: one training in its folder: started or resumed, saved, recorded.

The way of a recipe: `recipe_files.resolve` reads it, the command (`cli/train.py`) chooses the processes that train it,
`run_modes` starts them, and each of them calls `run_recipe` here, which builds a `loop.Training` and brings it to its
end.
"""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire_lab.launch import usable_cores
from gradwire_lab.launcher_env import launcher_rank
from gradwire_lab.report import machine_load
from gradwire_lab.train import checkpoint
from gradwire_lab.train.data import TextTask
from gradwire_lab.train.evaluation import Score
from gradwire_lab.train.loop import Listener, Training
from gradwire_lab.train.rank_info import RankInfo, simulated_ranks
from gradwire_lab.train.recipe import GossipTable, LocalTable, Recipe
from gradwire_lab.train.record import Records
from gradwire_lab.train.run_folder import read

COUNTERS = ("epoch", "at", "step", "seconds", "best", "kept", "ramp_steps")


class TrainJob(NamedTuple):
    """What to train, and where.

    Attributes:
        devices: Those of this host's workers, in order; none: its GPUs in turn, else the CPU.
        resume: Whether to go on from the last checkpoint of the folder.
        title: What records call the recipe; by default as the folder.
    """

    recipe: Recipe
    folder: Path
    devices: tuple[str, ...] = ()
    resume: bool = False
    title: str = ""


def run_recipe(job: TrainJob, rank_info: RankInfo, listen: Listener) -> dict[str, Any]:
    """Train in this process, from the start or from the last checkpoint of the folder, to the end.

    Returns:
        The final record.
    """
    folder, resume = job.folder, job.resume
    saved = checkpoint.find(folder, "last") if resume else None
    progress = checkpoint.progress_of(saved) if saved else {}
    training = Training(job.recipe, rank_info, progress.get("ramp_steps"))
    if saved is not None:
        restore(training, saved, progress)
    if training.step > training.last_step:
        raise ValueError(
            f"{folder} has taken {training.step} steps, but would end after {training.last_step}; give more "
            "in train.epochs or train.iterations, or leave them as they were"
        )
    rejoined = rank_info.rendezvous is not None and training.step > progress.get("step", 0)  # the others went on
    threads = _ranks_here(rank_info) * torch.get_num_threads()
    with Records(folder, training.position, rank_info.first) as records:
        if rank_info.first and not resume and not training.step:
            checkpoint.clear(folder)  # those of a run that is written over, now that nothing can be refused any more

        def write(record: dict[str, Any]) -> None:
            if rank_info.first:
                if record["event"] == "start":
                    record = {**record, "recipe": job.title or folder.name, "command": sys.argv}
                if record["event"] in ("start", "epoch") and (load := machine_load.measured(usable_cores(), threads)):
                    record = {**record, **load._asdict()}
                records.write(record)
                listen(record)

        past = read(folder)
        if rejoined:
            training.seconds = max((record.get("seconds", 0.0) for record in past), default=0.0)
            listen({"event": "back", "worker": rank_info.ranks[0], "step": training.step})
        epochs = [record for record in past if record["event"] == "epoch"]
        return training.run(write, partial(save, folder), epochs[-1] if epochs else None)


def _ranks_here(rank_info: RankInfo) -> int:
    """Processes of this training on this machine, as far as is known."""
    if rank_info.simulated:
        return 1
    where = launcher_rank(os.environ)
    return rank_info.world if where is None else where.local_world


def evaluate(folder: Path, recipe: Recipe, which: str, split: str, device: torch.device | str) -> Score:
    """The score of a run's ``last`` or ``best`` checkpoint."""
    recipe = recipe.model_copy(update={"gossip": GossipTable(), "local": LocalTable()})  # one model, one worker
    saved = checkpoint.find(folder, which)
    if saved is None:
        raise ValueError(f"{folder} has no {which} checkpoint; give the folder of a run, such as runs/digits-0")
    training = Training(recipe, simulated_ranks(1, device))
    splits = ("test", "valid") if isinstance(training.task, TextTask) else ("test",)
    if split not in splits:
        raise ValueError(f"{recipe.data.name} has no split {split!r} to evaluate; choose {' or '.join(splits)}")
    checkpoint.load_model(training.model, recipe.model.name, saved)
    return training.strategy.score(split)


def save(folder: Path, training: Training, best: bool) -> None:
    """Save a checkpoint of a training; every process calls it."""
    strategy, hidden = training.strategy, training.strategy.passes.states
    saved = checkpoint.open_folder(folder, training.step)
    for i, (rank, state) in enumerate(zip(training.rank_info.ranks, strategy.rank_states(), strict=True)):
        own = {f"state/{j}/{k}": x for j, pair in enumerate(hidden[i]) for k, x in enumerate(pair)} if hidden else {}
        try:
            checkpoint.save_tensors({**state, **own, "loss": training.loss}, saved / f"rank-{rank}.safetensors")
        except FileNotFoundError:  # the first worker has gone on without this one, and swept the folder
            if training.rank_info.rendezvous is None:
                raise
    model = strategy.model_state()
    if training.rank_info.first:
        _write_common(training, model, saved)
    training.strategy.workers.barrier()
    if training.rank_info.first:
        checkpoint.publish(saved, best)


def _write_common(training: Training, model: dict[str, Tensor], folder: Path) -> None:
    checkpoint.save_tensors(model, folder / checkpoint.MODEL)
    progress = {
        **{name: getattr(training, name) for name in COUNTERS},
        "world": training.rank_info.world,
        "schedule": training.schedule.state_dict(),
        **training.strategy.progress(folder),
    }
    checkpoint.write_json(folder / checkpoint.PROGRESS, progress)


def restore(training: Training, folder: Path, progress: dict[str, Any]) -> None:
    """Put a training where a checkpoint left it; a world of another size begins the epoch again that it was in."""
    states = training.strategy.load(folder, progress)
    if states is None:
        return
    training.schedule.load_state_dict(progress["schedule"])
    for name in COUNTERS:
        setattr(training, name, progress[name])
    if not states:  # epochs of this world have another number of steps
        training.at, training.step = 0, training.epoch * training.loader.steps
        return
    training.loss.copy_(states[0]["loss"])
    hidden = [checkpoint.part(state, "state/") for state in states]
    device = training.rank_info.device
    training.strategy.passes.states = [
        [(own[f"{j}/0"].to(device), own[f"{j}/1"].to(device)) for j in range(len(own) // 2)] for own in hidden if own
    ]
    training.catch_up()
