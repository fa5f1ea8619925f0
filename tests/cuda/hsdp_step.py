"""A step of a sharded GPT on one GPU: what gradwire computes, whether the host waits, time and memory.

    python tests/cuda/hsdp_step.py bits         one rank: shards get the bits of an unsharded wire
    python tests/cuda/hsdp_step.py time         one rank: whether a step waits; steps with and without gradwire, in turn
    python tests/cuda/hsdp_step.py memory       one rank: peaks
    torchrun --standalone --nproc-per-node 2 tests/cuda/hsdp_step.py replicas      two replicas on one GPU, over gloo

Each prints lines of JSON. One rank has no other replica, and gradwire would not compress; here it is made to, so that a
step has all of the work of one, less the network.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import gradwire
from gradwire.integrations import setup
from gradwire.integrations.model import local_part

SPECS = ("int4", "topk(0.01) | sign")
BEGAN = time.monotonic()
WARMUP = 14  # steps until everything is captured


class Block(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, 64)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """GPT-2 with tied embeddings; of 12 layers it has 124 M parameters."""

    def __init__(self, width: int, layers: int, vocab: int = 50304, context: int = 1024) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.position = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embedding.weight
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Training(NamedTuple):
    """A sharded model, and a step of it."""

    net: Gpt
    wire: gradwire.Wire | None
    step: Callable[..., None]  # with so many of the sequences, or all


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def gpt(options: argparse.Namespace) -> Gpt:
    with device():
        return Gpt(options.width, options.layers, options.vocab)


def show(**row: Any) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(row), flush=True)


def shard_(net: Gpt, mesh: DeviceMesh, half: bool) -> Gpt:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
    for block in net.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    return net


def training(
    method: str, options: argparse.Namespace, half: bool = True, hook: Callable[[str, Tensor], None] | None = None
) -> Training:
    """``none``: FSDP inside the replica alone; ``native``: its own average between replicas, too; else a spec."""
    mesh = init_device_mesh(device().type, (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    net = shard_(gpt(options), mesh if method == "native" else mesh["shard"], half)
    for name, p in net.named_parameters():
        if hook is not None:  # before the wire's own
            p.register_post_accumulate_grad_hook(lambda p, name=name: hook(name, p))
    spec = None if method in ("none", "native") else method
    wire = None if spec is None else gradwire.compress(net, spec, across=mesh["replicate"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    draw = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, options.vocab, (options.batch, options.context + 1), generator=draw).to(device())

    def step(batch: int = options.batch) -> None:
        optimizer.zero_grad()
        logits = net(tokens[:batch, :-1])
        F.cross_entropy(logits.float().flatten(0, 1), tokens[:batch, 1:].flatten()).backward()
        optimizer.step()

    return Training(net, wire, step)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# -- what is computed --------------------------------------------------------------------------------------------------


def bits(options: argparse.Namespace) -> None:
    for spec in options.methods or SPECS:
        show(part="bits", spec=spec, **equal_bits(spec, options))


def equal_bits(spec: str, options: argparse.Namespace) -> dict[str, Any]:
    """The same gradients through hooks of shards and through an unsharded wire; one of them is not finite once."""
    found: dict[str, Tensor] = {}
    number, bad = 0, WARMUP - 2

    def note(name: str, p: Tensor) -> None:
        assert p.grad is not None
        if number == bad and name == "blocks.0.up.weight":
            local_part(p.grad)[0, 0] = torch.inf
        found[name] = local_part(p.grad).clone()

    one = training(spec, options, half=False, hook=note)
    other = gpt(options)
    plain = gradwire.compress(other, spec)
    different = []
    for number in range(WARMUP):
        one.step()
        for name, p in other.named_parameters():
            p.grad = found[name]
        plain()
        mine = {name: local_part(p.grad) for name, p in one.net.named_parameters()}
        different += [f"{number} {name}" for name, p in other.named_parameters() if not torch.equal(p.grad, mine[name])]
    assert one.wire is not None
    row = {"steps": WARMUP, "different": different[:5], "skipped": [one.wire.skipped, plain.skipped]}
    return row | {"captured": captured(one.wire)}


def captured(wire: gradwire.Wire) -> dict[str, Any]:
    """How buckets run: replayed from graphs, and whether gradients are copied to buffers first."""
    buckets = wire.executor._buckets
    staged = sum(bucket.staging is not None for bucket in buckets)
    return {"buckets": len(buckets), "replayed": sum(b.replays > 0 for b in buckets), "staged": staged}


def waits(given: Training) -> dict[str, Any]:
    """Whether the host waits for the device in a step, as torch's sync debug mode sees it."""
    if not torch.cuda.is_available():
        return {"waits": "no GPU"}
    if lines := waiting_lines(given):
        return {"waits": lines}
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(5):
        given.step(1)
    torch.cuda.set_sync_debug_mode("default")
    return {"waits": 0, "steps": 5, "debug_mode": "error"}


def waiting_lines(given: Training) -> list[str]:
    """What a step calls when the host waits."""
    found: list[str] = []

    def note(message: object, *_: object, **__: object) -> None:
        if "synchronizing" in str(message):
            found.append(" ".join("".join(traceback.format_stack(limit=7)[:-1]).split()))

    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        given.step(1)
    torch.cuda.set_sync_debug_mode("default")
    return found


# -- time and memory ---------------------------------------------------------------------------------------------------


def time_steps(options: argparse.Namespace) -> None:
    """Steps of all methods in turn, in another order each round."""
    trainings = {}
    for method in options.methods or ("none", "native", *SPECS):
        given = trainings[method] = training(method, options)
        for _ in range(WARMUP):
            given.step(1)
        how = {} if given.wire is None else captured(given.wire)
        show(part="warm", spec=method, since_start=time.monotonic() - BEGAN, **how, **waits(given))
    while options.after and not os.path.exists(options.after):
        time.sleep(0.1)
    rounds: dict[str, list[tuple[float, float]]] = {method: [] for method in trainings}
    draw = random.Random(0)
    for given in trainings.values():
        seconds(given.step, 1)
    for number in range(options.rounds):
        for method in draw.sample(list(trainings), len(trainings)):
            rounds[method].append(seconds(trainings[method].step, options.steps))
        if number % 10 == 9:
            show(part="time", rounds=number + 1, **{m: round(1e3 * median(x), 3) for m, x in rounds.items()})
        if time.monotonic() - BEGAN > options.until:
            break
    for method in trainings:
        show(part="ratio", spec=method, steps=options.steps, batch=options.batch, **ratios(rounds, method))


def median(times: list[tuple[float, float]], place: int = 0) -> float:
    return statistics.median(one[place] for one in times)


def ratios(rounds: dict[str, list[tuple[float, float]]], method: str) -> dict[str, Any]:
    """To the first method's steps of the same rounds."""
    dense = next(iter(rounds.values()))
    found = [mine[0] / other[0] for mine, other in zip(rounds[method], dense, strict=True)]
    row: dict[str, Any] = {"rounds": len(found), "over_none": [round(x, 4) for x in statistics.quantiles(found, n=4)]}
    row["host_ms"] = round(1e3 * median(rounds[method], 1), 3)
    return row | {"milliseconds": [round(1e3 * whole, 3) for whole, _ in rounds[method]]}


def seconds(step: Callable[..., None], steps: int) -> tuple[float, float]:
    """Of a step, in a run of several; and of the host alone, which may run ahead."""
    synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    launched = time.perf_counter()
    synchronize()
    return (time.perf_counter() - began) / steps, (launched - began) / steps


def memory(options: argparse.Namespace) -> None:
    for method in options.methods or ("none", "native", *SPECS):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        given = training(method, options)
        for _ in range(WARMUP + 4):
            given.step()
        synchronize()
        peaks = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        now = torch.cuda.memory_allocated()
        show(part="memory", spec=method, between_steps_gb=now / 1e9, **{f"{k}_gb": x / 1e9 for k, x in peaks.items()})
        del given


# -- two replicas ------------------------------------------------------------------------------------------------------


def replicas(options: argparse.Namespace) -> None:
    """Two replicas on one GPU: whether they stay equal, and how far fp32 is from FSDP's own average."""
    nets = {}
    for method in ("native", "fp32", *SPECS):
        began = time.monotonic()
        given = training(method, options, half=False)
        for _ in range(8):
            given.step()
        synchronize()
        flat = torch.cat([local_part(p.detach()).flatten() for p in given.net.parameters()])
        nets[method] = flat.cpu()
        both = [torch.empty_like(nets[method]) for _ in range(2)]
        dist.all_gather(both, nets[method])
        row = {"spec": method, "replicas_equal": torch.equal(*both), "seconds": time.monotonic() - began}
        show(part="replicas", **row, from_native=float((nets[method] - nets["native"]).abs().max()))


PARTS = {"bits": bits, "time": time_steps, "memory": memory, "replicas": replicas}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--until", type=float, default=600.0, help="seconds after imports; then no round begins")
    parser.add_argument("--after", default="", help="a file that must be there before anything is timed")
    parser.add_argument("--methods", nargs="*", default=[])
    options = parser.parse_args()
    backend = "gloo" if options.part == "replicas" or not torch.cuda.is_available() else "nccl"
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        setup.uncompressed = tuple  # type: ignore[assignment]  # compress, although there is no other replica
        dist.init_process_group(backend, store=dist.FileStore(tempfile.mktemp(), 1), rank=0, world_size=1)
    PARTS[options.part](options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
