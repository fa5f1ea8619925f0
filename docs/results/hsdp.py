"""A GPT of 9 M parameters under HSDP: two hosts with a replica of two ranks each, on shaped links.

gradwire hosts run --hosts 2 --per-host 2 --rate 100mbit -- python docs/results/hsdp.py 100mbit --out rows.jsonl

It appends a line of JSON for each method: FSDP alone inside each replica (`none`), FSDP's own average between replicas
in bfloat16 (`native bf16`), and gradwire's. All reduce in bfloat16 inside a replica. Bytes are of one host and step.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import gradwire
from gradwire.comm import Traffic
from gradwire.comm.alphabeta import framed
from gradwire_lab.bench.network.rank_main import nic_sent, quartiles
from gradwire_lab.train.models.gpt import GPT

METHODS = ("none", "native bf16", "bf16", "int4", "topk(0.01) | sign", "sparseloco(H=10)")
VOCAB, CONTEXT = 4096, 128
Account = Callable[[], Traffic]


def sharded(mesh: DeviceMesh) -> GPT:
    torch.manual_seed(0)
    model = GPT(VOCAB, width=320, layers=6, heads=5, context=CONTEXT)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def build(method: str, mesh: DeviceMesh) -> tuple[GPT, torch.optim.Optimizer, Callable[[], object], Account | None]:
    """A model, its optimizer, what is called after each step, and the account of bytes."""
    model = sharded(mesh if method == "native bf16" else mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    if method in ("none", "native bf16"):
        return model, optimizer, lambda: None, None
    if "H=" in method:
        outer = gradwire.local(model, optimizer, method, across=mesh["replicate"])
        return model, optimizer, outer, lambda: outer.link.traffic
    wire = gradwire.compress(model, method, across=mesh["replicate"])
    return model, optimizer, lambda: None, lambda: wire.link.traffic


def accounts(account: Account | None) -> tuple[Traffic, int]:
    """Of this rank and of its host's interface, once all is quiet."""
    dist.barrier()
    time.sleep(0.1)
    found = Traffic() if account is None else account(), nic_sent() or 0
    dist.barrier()
    return found


def per_host(before: tuple[Traffic, int], after: tuple[Traffic, int], steps: int) -> dict[str, float]:
    """Bytes of a host in a step, of which all ranks have the same share: reported, with headers, at the interface."""
    sent, received, messages = (
        getattr(after[0], name) - getattr(before[0], name) for name in ("sent", "received", "messages")
    )
    mine = torch.tensor([sent, framed(sent, received, messages), (after[1] - before[1]) / 2], dtype=torch.float64)
    dist.all_reduce(mine)
    return dict(zip(("reported", "framed", "nic"), (mine / dist.get_world_size() * 2 / steps).tolist(), strict=True))


def turn(method: str, mesh: DeviceMesh, steps: int, warmup: int, batch: int) -> dict[str, object]:
    model, optimizer, after, account = build(method, mesh)
    tokens = torch.randint(VOCAB, (batch, CONTEXT + 1), generator=torch.Generator().manual_seed(dist.get_rank()))

    def step() -> float:
        began = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        after()
        return time.perf_counter() - began

    for _ in range(warmup):
        step()
    before = accounts(account)
    seconds = [step() for _ in range(steps)]
    bytes_of_host = per_host(before, accounts(account), steps)
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    times = [1e3 * one for one in slowest.tolist()]
    middle = statistics.fmean if "H=" in method else statistics.median  # a round is one long step among short ones
    row: dict[str, object] = {"steps": steps, "step_ms": middle(times), "step_ms_quartiles": quartiles(times)}
    row |= {"nic": bytes_of_host["nic"], "parameters": sum(p.numel() for p in nn.Module.parameters(model))}
    if account is not None:
        row |= bytes_of_host | {"nic_over_framed": bytes_of_host["nic"] / bytes_of_host["framed"]}
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("link", help="as it was given to `gradwire hosts run`; for the record")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--out", default="")
    parser.add_argument("--methods", nargs="*", default=METHODS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    for method in chosen.methods:
        rounds = "H=" in method  # whole ones: after one of them, two
        steps, warmup = (20, 10) if rounds else (chosen.steps, chosen.warmup)
        row = turn(method, mesh, steps, warmup, chosen.batch)
        if dist.get_rank() == 0:
            head = {"link": chosen.link, "ranks": "2 x 2", "method": method, "batch": chosen.batch}
            line = json.dumps({**head, **row, "load": os.getloadavg()[0]})
            print(line, flush=True)
            with open(chosen.out or os.devnull, "a") as file:
                file.write(f"{line}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
