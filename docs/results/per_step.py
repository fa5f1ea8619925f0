"""A GPT on bytes of a text, trained with AdamW and compressed in every step: loss and bytes by spec.

Workers are those of `local.py`, simulated in one process. A run is one JSON object on the command line, or a line of a
file that is named with an @; a row of results is appended to the file of --out. Runs that it has already are skipped.

    python docs/results/per_step.py --text wikitext-2 --out adamw.jsonl \
        '{"name": "dense", "spec": "dense", "lr": 2e-3}' \
        '{"name": "one bit", "spec": "onebit_adam(start=225)", "lr": 2e-3, "seed": 0}'

The folder of --text has train.txt and test.txt. Each worker's gradient is clipped by its own norm before it is sent.
Other keys of a run, with their defaults: "workers" (8), "batch" (16 sequences a worker), "optimizer" ("adamw", "muon"
for the matrices of the blocks, or "sgd" without momentum, for specs that have their own), "warm_up" (steps in which the
learning rate rises; null: 5 % of all), "beta2" (0.95, AdamW's second), "final" (0.1, the share of the learning rate at
the end).
A spec of local steps, such as sparseloco(H=1), runs as in `local.py`.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import gradwire
import local
from local import BETA, DECAY, Inner, Replicas, Shape, _bytes, batches, evaluate, main, rate_at, ratio

RUN = {
    "spec": "dense",
    "lr": 2e-3,
    "seed": 0,
    "workers": 8,
    "batch": 16,
    "optimizer": "adamw",
    "warm_up": None,
    "beta2": 0.95,
    "final": 0.1,
}


def train(
    run: dict[str, Any], text: Path, shape: Shape, steps: int, device: torch.device, limit: int
) -> dict[str, Any]:
    if getattr(gradwire.parse(run["spec"]), "kind", "") == "local":
        return local.train({**local.RUN, **run}, text, shape, steps, device, limit)
    data, held_out = (_bytes(text / f"{part}.txt").to(device) for part in ("train", "test"))
    torch.manual_seed(run["seed"])
    replicas = Replicas(shape, run["workers"], run["seed"], device)
    optimizers, take_step = _optimizers(replicas, run)
    group = gradwire.lockstep(replicas.models, run["spec"], optimizers=optimizers)
    began, curve, feed = time.perf_counter(), [], batches(data, run, shape.context, 0)
    for step in range(steps):
        loss_now = replicas.backward(next(feed))
        group()
        take_step(rate_at(step, steps, run["lr"], run["warm_up"], run["final"]))
        if (step + 1) % 100 == 0:
            curve.append(round(loss_now.item(), 4))
    report = group.wires[0].report()
    return {
        **run,
        "steps": steps,
        "parameters": replicas.size,
        "test_loss": round(evaluate(replicas, held_out, limit), 4),
        "payload_ratio": ratio(report.payload_ratio),
        "wire_ratio": ratio(report.wire_ratio),
        "skipped": report.skipped,
        "train_loss": curve,
        "seconds": round(time.perf_counter() - began, 1),
        "compiled": shape.compile,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }


def _optimizers(replicas: Replicas, run: dict[str, Any]) -> tuple[list[torch.optim.Optimizer], Callable[[float], None]]:
    """What a wire knows of each worker's optimizer, and a step of all of them at a learning rate."""
    if run["optimizer"] == "muon":
        inner = Inner(replicas, {**run, "inner": "muon"})
        return [parts[0] for parts in inner.parts], inner.step
    flags: dict[str, Any] = {"weight_decay": DECAY, "fused": replicas.grads[0].is_cuda}
    make = partial(gradwire.AdamW, betas=(BETA, run["beta2"])) if run["optimizer"] == "adamw" else torch.optim.SGD
    made = [make(model.parameters(), run["lr"], **flags) for model in replicas.models]

    def step(lr: float) -> None:
        for optimizer in made:
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()

    return made, step


if __name__ == "__main__":
    main(train, RUN, __doc__, "adamw.jsonl")
