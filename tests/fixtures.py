"""Shared by tests: small models, batches that differ by rank and step, and training loops."""

import random
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

Case = tuple[str, tuple[str, ...]]  # the text of an error, and the words that it must contain

NO_ERROR = "no error"
STEPS = 6
# Small enough that the model below makes several of each, and that DDP rebuilds its buckets after the first step.
DDP_BUCKET_MB = 0.0005
BUCKET_MB = 0.0008


def model(seed: int = 0) -> nn.Sequential:
    """Three layers, 445 parameters."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 5))


def batch(rank: int, step: int, n: int = 8, width: int = 10) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(n, width, generator=generator)


def loss(net: Callable[[Tensor], Tensor], rank: int, step: int) -> Tensor:
    return net(batch(rank, step)).square().mean()


def sgd(net: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), lr=0.2, **options)


def ddp(net: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(net, bucket_cap_mb=DDP_BUCKET_MB, **options)


def tensors(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    """Bit for bit; NaN equals NaN."""
    return left.keys() == right.keys() and all(
        torch.equal(*(x.contiguous().flatten().view(torch.uint8) for x in (left[name], right[name]))) for name in left
    )


def memories(wire: gradwire.Wire) -> dict[str, Tensor]:
    """The state of a wire, without the entries about the run itself."""
    return {key: value for key, value in wire.state_dict().items() if not key.startswith("gradwire/")}


def plain_loop(net: nn.Module, wire: gradwire.Wire, optimizer: torch.optim.Optimizer, steps: range, rank: int) -> None:
    """Train with an explicit call of the wire."""
    for step in steps:
        optimizer.zero_grad()
        loss(net, rank, step).backward()
        wire()
        optimizer.step()


def replicas(world: int, spec: Any, **options: Any) -> tuple[list[nn.Sequential], gradwire.SimulatedWorkers]:
    """Replicas in this process, and the object that synchronizes them."""
    nets = [model() for _ in range(world)]
    return nets, gradwire.lockstep(nets, spec, **options)


def train_steps(nets: list[nn.Sequential], workers: gradwire.SimulatedWorkers, steps: range, lr: float = 0.2) -> None:
    """Train replicas in lockstep."""
    for step in steps:
        for rank, net in enumerate(nets):
            net.zero_grad()
            loss(net, rank, step).backward()
        workers()
        for net in nets:
            sgd_step(net, lr)


def sgd_step(net: nn.Module, lr: float = 0.2) -> None:
    with torch.no_grad():
        for p in net.parameters():
            if p.grad is not None:
                p -= lr * p.grad


def mean_pending_error(wires: list[gradwire.Wire]) -> dict[str, Tensor]:
    """The update that is still to come: the mean of all ranks' compression errors."""
    debts = [wire.debts() for wire in wires]
    return {name: torch.stack([debt[name].double() for debt in debts]).mean(0) for name in debts[0]}


def same_on_all_ranks(value: Tensor) -> bool:
    """Whether all ranks hold the same bits."""
    values = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(values, value.contiguous())
    return all(torch.equal(other, value) for other in values)


def error_text(attempt: Callable[[], object]) -> str:
    """The type and the message of the error that a call raises."""
    try:
        attempt()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return NO_ERROR


def wrap_optimizer(net: nn.Module, optimizer: Any = None, **options: Any) -> gradwire.DistributedOptimizer:
    inner = sgd(net) if optimizer is None else optimizer
    return gradwire.DistributedOptimizer(inner, net.named_parameters(), **options)


def check_message(answers: Sequence[Case]) -> None:
    """Every rank's error contains its words."""
    missing = [
        f"rank {rank} lacks {word!r} in: {text}"
        for rank, (text, words) in enumerate(answers)
        for word in words
        if word not in text
    ]
    assert not missing, "\n".join(missing)


def free_port() -> int:
    """A port for a server that starts later. It is below those that systems give to anybody's connections."""
    for port in random.SystemRandom().sample(range(20_000, 30_000), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise RuntimeError("no port is free")


def by_name(*several: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `gradwire.compress` under a name that tells them apart."""
    named = {_name(options): dict(options) for options in several}
    assert len(named) == len(several), "two have the same name"
    return named


def _name(options: Mapping[str, Any]) -> str:
    values = {key: "rules" if key == "rules" else str(value) for key, value in options.items() if key != "bucket_mb"}
    spec = values.pop("spec")
    return " ".join((spec, *(value if key != "bundle" else f"bundle={value}" for key, value in values.items())))
