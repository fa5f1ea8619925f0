"""A small GPT trained with AdamW on the sources of Python's standard library, as bytes: loss by spec.

Simulated workers in one process; all options have defaults. One JSON line a run is appended to the file named last:

    python docs/results/adamw.py --seeds 0 1 2 --out docs/results/adamw-cpu.jsonl
"""

import argparse
import json
import math
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

import gradwire
from gradwire.integrations.adamw_moments import steps_alone
from gradwire_lab.train.models.gpt import GPT

SPECS = (
    "dense",
    "int4",
    "onebit_adam(start={start})",
    "onebit_adam(start={start}, divide='after')",
    "onebit_adam(start={start}, alone={alone})",
    "zero_one_adam(start={start})",
    "topk(0.01) | sign",
    "ef_signsgd",
    "dgc_adam(0.01, start={start})",
)
TIME, WARM_UP, CLIP = 64, 0.05, 1.0


def corpus() -> tuple[Tensor, Tensor]:
    """Bytes of the modules at the top of the standard library, in order of their names; the last twentieth tests."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    data = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)
    cut = len(data) * 19 // 20
    return data[:cut], data[cut:]


def loss_of(model: GPT, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))


def evaluate(model: GPT, data: Tensor) -> float:
    model.eval()
    rows = data[: len(data) // (TIME + 1) * (TIME + 1)].view(-1, TIME + 1).long()[:1024]
    with torch.no_grad():
        losses = [loss_of(model, part).item() * len(part) for part in rows.split(64)]
    return sum(losses) / len(rows)


def rate_at(step: int, steps: int, rate: float) -> float:
    warm = WARM_UP * steps
    return rate * (
        step / warm if step < warm else 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))
    )


def train(spec: str, seed: int, rate: float, steps: int, workers: int, batch: int) -> dict[str, object]:
    text, held_out = corpus()
    torch.manual_seed(seed)
    models = [GPT(256, 128, 2, 4) for _ in range(workers)]
    optimizers = [gradwire.AdamW(m.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.1) for m in models]
    group = gradwire.lockstep(models, spec, optimizers=optimizers)
    alone = steps_alone(group.wires[0].engine.unwrapped.plan)
    draw = torch.Generator().manual_seed(1000 + seed)
    began = time.perf_counter()
    for step in range(steps):
        draws = [torch.randint(len(text) - TIME - 1, (batch,), generator=draw) for _ in models]
        if step < alone:  # all workers take the same batches
            draws = draws[:1] * workers
        for model, optimizer, at in zip(models, optimizers, draws, strict=True):
            optimizer.zero_grad()
            loss_of(model, torch.stack([text[i : i + TIME + 1] for i in at]).long()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)  # each worker's own gradient
        group()
        for optimizer in optimizers:
            for options in optimizer.param_groups:
                options["lr"] = rate_at(step, steps, rate)
            optimizer.step()
    report = group.wires[0].report()
    return {
        "spec": spec,
        "seed": seed,
        "rate": rate,
        "steps": steps,
        "workers": workers,
        "parameters": sum(p.numel() for p in models[0].parameters()),
        "test_loss": round(evaluate(models[0], held_out), 4),
        "payload_ratio": round(report.payload_ratio, 1),
        "wire_ratio": round(report.wire_ratio, 1),
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--specs", nargs="+", default=SPECS)
    options.add_argument("--seeds", nargs="+", type=int, default=[0])
    options.add_argument("--rates", nargs="+", type=float, default=[2e-3])
    options.add_argument("--steps", type=int, default=500)
    options.add_argument("--workers", type=int, default=4)
    options.add_argument("--batch", type=int, default=8)
    options.add_argument("--out", type=Path, default=Path("adamw.jsonl"))
    chosen = options.parse_args()
    for seed in chosen.seeds:
        for rate in chosen.rates:
            for spec in chosen.specs:
                spec = spec.format(start=chosen.steps * 3 // 20, alone=chosen.steps // 20)
                row = train(spec, seed, rate, chosen.steps, chosen.workers, chosen.batch)
                print(json.dumps(row), flush=True)
                with chosen.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
