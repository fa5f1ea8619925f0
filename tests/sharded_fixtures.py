"""Shared by tests of sharded models: a model with every odd kind of parameter, and one training loop for all cases."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fixtures
import gradwire

STEPS = 4
IS_TORCH_2_9 = hasattr(FSDPModule, "set_custom_reduce_scatter")
POLICIES = {
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "keep": {"reshard_after_forward": False},
    "bf16_reduced": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "reshard": {"reshard_after_forward": True},
    "reshard_to_two": {"reshard_after_forward": 2},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


class OddNet(nn.Module):
    """Uneven rows, a parameter of one row, tied weights, a frozen layer, and one that is never used."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.idle = nn.Linear(4, 4)  # in the last bucket, so that others need not wait for it
        self.first = nn.Linear(10, 16)
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.tied = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])
        self.tied[1].weight = self.tied[0].weight
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(16, 3)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
            x = x.tanh()
        x = self.frozen(x)
        for layer in self.tied:
            x = layer(x).tanh()
        return self.head(x) * self.scale


def long(cases: Iterable[str], *names: str) -> list[Any]:
    """Cases as parameters of a test; those that are named take part in studies alone."""
    return [pytest.param(case, marks=pytest.mark.study) if case in names else case for case in cases]


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def whole(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.full_tensor().detach().clone() for name, p in net.named_parameters()}


def shards(net: nn.Module) -> dict[str, Tensor]:
    """This rank's part of every gradient, less empty ones."""
    grads = {name: local(p.grad).detach().clone() for name, p in net.named_parameters() if p.grad is not None}
    return {name: x for name, x in grads.items() if x.numel()}


def mesh_of(replicas: int, sharded: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, sharded), mesh_dim_names=("replicate", "shard"))


def shard_(net: OddNet, mesh: DeviceMesh, policy: str = "reshard") -> OddNet:
    """Each block by itself, and the rest together."""
    for block in net.blocks:
        fully_shard(block, mesh=mesh, **POLICIES[policy])
    fully_shard(net, mesh=mesh, **POLICIES[policy])
    return net


def train(
    net: nn.Module,
    rank: int,
    steps: range = range(STEPS),
    accumulate: str = "",
    after: Callable[[], Any] = lambda: None,
) -> None:
    """SGD, of two micro-batches where gradients accumulate; what is named is switched off during the first one."""
    optimizer = fixtures.sgd(net)
    for step in steps:
        optimizer.zero_grad()
        for part in range(2 if accumulate else 1):
            if accumulate:
                getattr(net, f"set_requires_{accumulate}")(part == 1)
            net(fixtures.batch(rank, 2 * step + part)).float().square().mean().backward()
        after()
        optimizer.step()


def recorded(
    net: nn.Module,
    rank: int,
    spec: Any,
    across: DeviceMesh | None,
    accumulate: str = "",
    compiled: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train, and return the shards of all gradients before and after each exchange."""
    before: list[dict[str, Tensor]] = []
    found: dict[str, Tensor] = {}
    for name, p in net.named_parameters():
        if p.requires_grad:  # this hook comes before the wire's
            p.register_post_accumulate_grad_hook(lambda p, name=name: found.update({name: local(p.grad).clone()}))
    wire = gradwire.compress(net, spec, across=across, bucket_mb=fixtures.BUCKET_MB, **options)
    if compiled:
        net.compile(backend="aot_eager")
    after: list[dict[str, Tensor]] = []
    early: list[int] = []  # buckets that left during backward, by step
    submit, sent = wire.worker.submit, 0

    def count(work: Callable[[], Any]) -> Any:
        nonlocal sent
        sent += 1
        return submit(work)

    wire.worker.submit = count

    def note() -> None:
        wire()
        before.append({name: x for name, x in found.items() if x.numel()})
        after.append(shards(net))
        found.clear()
        early.append(sent - sum(early))

    train(net, rank, accumulate=accumulate, after=note)
    shapes = {name: tuple(local(p).shape) for name, p in wire.parameters.items()}
    return {"before": before, "after": after, "state": fixtures.memories(wire), "shapes": shapes, "early": early}
