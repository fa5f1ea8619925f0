"""Time and memory of a step of a sharded GPT, with FSDP's own average between replicas and with ours.

    torchrun --standalone --nproc-per-node 2 tests/cuda/hsdp_step.py --replicas 2 --backend gloo
    torchrun --standalone --nproc-per-node 1 tests/cuda/hsdp_step.py --replicas 1 --backend nccl

Ranks share the GPU where there is one. The first form shows compression between two replicas, the second one what hooks
alone cost. It prints a line of JSON for each way.
"""

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import gradwire


class Gpt(nn.Module):
    """Blocks of a transformer over random tokens."""

    def __init__(self, width: int, layers: int, tokens: int = 8192) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        make = nn.TransformerEncoderLayer
        self.blocks = nn.ModuleList(
            [make(width, width // 64, 4 * width, 0.0, batch_first=True, norm_first=True) for _ in range(layers)]
        )
        self.head = nn.Linear(width, tokens, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def waits(step: Callable[[], object]) -> int:
    """How often the host waits for the device in a step, as torch's sync debug mode counts it."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        step()
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(one.message) for one in seen)


def measure(spec: str | None, options: argparse.Namespace, device: torch.device) -> dict[str, object]:
    """Seconds of a step, and the largest memory."""
    torch.manual_seed(0)
    shards = dist.get_world_size() // options.replicas
    mesh = init_device_mesh(device.type, (options.replicas, shards), mesh_dim_names=("replicate", "shard"))
    model = Gpt(options.width, options.layers).to(device)
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    over = mesh if spec is None else mesh["shard"]
    for block in model.blocks:
        fully_shard(block, mesh=over, mp_policy=bf16)
    fully_shard(model, mesh=over, mp_policy=bf16)
    wire = None if spec is None else gradwire.compress(model, spec, across=mesh["replicate"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 8192, (options.batch, 256), device=device)
    times = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    for _ in range(options.steps):
        began = time.perf_counter()
        loss = step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    row = {"spec": spec or "native", "seconds": statistics.median(times[5:]), "gigabytes": memory / 1e9}
    row |= {"parameters": sum(p.numel() for p in model.parameters()), "loss": float(loss), "waits": waits(step)}
    return row if wire is None else {**row, "sent": wire.report().sent_per_step}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--specs", default="fp32;bf16;int8;topk(0.01) | sign")
    options = parser.parse_args()
    dist.init_process_group(options.backend)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    for spec in [None, *options.specs.split(";")]:
        try:
            row = measure(spec, options, device)
        except (RuntimeError, ValueError) as wrong:  # a backend may not take such tensors
            row = {"spec": spec or "native", "error": str(wrong).splitlines()[0]}
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
