"""Oracles: methods against what others wrote, or against their papers' equations written down once more.

- PowerSGD against torch's `powerSGD_hook`, in a group of two ranks.
- PowerSGD, DGC and CHOCO against the equations in their papers, with dense arithmetic and no code of this package.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import fixtures
import gradwire
from faults.campaign import Campaign
from gradwire_lab.launch import launch

ROWS, COLUMNS = 24, 18


def largest(x: Tensor, k: int) -> Tensor:
    """A mask of the k largest magnitudes; random floats have no ties."""
    return torch.zeros_like(x, dtype=torch.bool).index_fill(0, x.abs().topk(k).indices, True)


def close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()) + 1e-7)


class Matrix(nn.Module):
    """One matrix, whose gradient a test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ROWS, COLUMNS))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def synchronized(workers: Any, nets: list[Matrix], grads: list[Tensor]) -> list[Tensor]:
    for net, grad in zip(nets, grads, strict=True):
        net.weight.grad = grad.clone()
    workers()
    return [net.weight.grad for net in nets]


def dgc(draw: Any) -> bool:
    """u = m u + g; v = v + u; send the largest of v; u and v are zero where something was sent."""
    world, ratio, momentum = draw.choice((1, 2, 3)), draw.choice((0.01, 0.1, 0.5)), draw.choice((0.0, 0.5, 0.9))
    nets = [Matrix() for _ in range(world)]
    workers = gradwire.lockstep(nets, f"dgc({ratio}, momentum={momentum})")
    n = ROWS * COLUMNS
    u, v = [torch.zeros(n) for _ in nets], [torch.zeros(n) for _ in nets]
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    for _ in range(6):
        grads = [torch.randn(n, generator=generator) for _ in nets]
        sent = []
        for rank, grad in enumerate(grads):
            u[rank] = momentum * u[rank] + grad
            v[rank] = v[rank] + u[rank]
            mask = largest(v[rank], max(1, round(ratio * n)))
            sent.append(v[rank] * mask)
            u[rank], v[rank] = u[rank] * ~mask, v[rank] * ~mask
        expected = torch.stack(sent).mean(0)
        found = synchronized(workers, nets, [grad.view(ROWS, COLUMNS) for grad in grads])
        if not all(close(one.flatten(), expected) for one in found):
            return False
    return True


def choco(draw: Any) -> bool:
    """x_i += gamma sum_j w_ij (xhat_j - xhat_i), after xhat_i += topk(x_i - xhat_i), on a ring."""
    ranks, gamma, ratio = draw.choice((3, 4, 6)), draw.choice((0.2, 0.5, 1.0)), draw.choice((0.1, 0.3))
    nets = [nn.Linear(30, 1, bias=False) for _ in range(ranks)]
    n = 30
    handle = gradwire.gossip_lockstep(nets, f"choco(ring, gamma={gamma})", f"topk({ratio})")
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    start = nets[0].weight.detach().flatten().clone()
    x = torch.randn(ranks, n, generator=generator)
    hat = start.expand(ranks, n).clone()
    mixing = torch.zeros(ranks, ranks)
    for i in range(ranks):
        for j in (i - 1, i, i + 1):
            mixing[i, j % ranks] = 1 / 3
    mine = x.clone()
    for _ in range(6):
        for i in range(ranks):
            difference = x[i] - hat[i]
            hat[i] += difference * largest(difference, max(1, round(ratio * n)))
        x = x + gamma * (mixing @ hat - hat)
        mine = handle.mix(mine)
        if not close(mine, x):
            return False
    return True


def powersgd(draw: Any) -> bool:
    """P = mean(M Q), orthonormal; Q = mean(M' P); the update is P Q'; the error is M - P Q_r'."""
    world, rank = draw.choice((1, 2, 3)), draw.choice((1, 2, 4))
    nets = [Matrix() for _ in range(world)]
    workers = gradwire.lockstep(nets, f"powersgd({rank})", seed=draw.randrange(1000))
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    errors = [torch.zeros(ROWS, COLUMNS, dtype=torch.float64) for _ in nets]
    basis = None
    for step in range(6):
        grads = [torch.randn(ROWS, COLUMNS, generator=generator) for _ in nets]
        targets = [grad.double() + error for grad, error in zip(grads, errors, strict=True)]
        found = synchronized(workers, nets, grads)
        if basis is not None:  # the first one is drawn, and is not in the equations
            p = torch.linalg.qr(torch.stack([m @ basis for m in targets]).mean(0)).Q
            own = [m.T @ p for m in targets]
            update = p @ torch.stack(own).mean(0).T
            if not all(close(one.double(), update) for one in found):
                return False
            errors = [m - p @ q.T for m, q in zip(targets, own, strict=True)]
            basis = torch.stack(own).mean(0)
        else:
            errors = [wire.debts()["weight"].double() for wire in workers.wires]
            span = torch.linalg.svd(found[0].double(), full_matrices=False)
            basis = (span.Vh[:rank].T * span.S[:rank]) if step == 0 else basis
    return True


EQUATIONS: dict[str, Callable[[Any], bool]] = {"DGC": dgc, "CHOCO": choco, "PowerSGD": powersgd}


def hook_pair(rank: int, world: int, size: int, seed: int) -> tuple[float, float]:
    """Distances to the best approximation of one fixed mean gradient: of torch's hook, and of ours."""
    generator = torch.Generator().manual_seed(seed)
    low = torch.randn(ROWS, size, generator=generator) @ torch.randn(size, COLUMNS, generator=generator)
    noise = torch.randn(world, ROWS, COLUMNS, generator=generator)
    noise -= noise.mean(0)
    distances = []
    for ours in (False, True):
        outer = DistributedDataParallel(Matrix())
        if ours:
            wire = gradwire.compress(outer, f"powersgd({size})")
        else:
            state = PowerSGDState(None, matrix_approximation_rank=size, start_powerSGD_iter=2, min_compression_rate=0.5)
            outer.register_comm_hook(state, powerSGD_hook)
        for _ in range(8):
            outer.zero_grad()
            outer(low + noise[rank]).backward()
        grad = outer.module.weight.grad
        assert grad is not None and fixtures.same_on_all_ranks(grad)
        distances.append(float((grad - low).norm() / low.norm()))
    del wire
    return distances[0], distances[1]


def run(campaign: Campaign) -> None:
    torch.set_num_threads(1)
    draw = campaign.random
    for size in (1, 2):
        for one, other in launch(hook_pair, 2, size, draw.randrange(1000), limit_seconds=120, threads=1):
            campaign.made("torch's powerSGD_hook")
            campaign.expect(max(one, other) < 1e-3, "wrong result", f"rank {size}: {one} by torch, {other} here")
    while campaign.going():
        name = draw.choice(list(EQUATIONS))
        campaign.made(f"equations of {name}")
        campaign.expect(EQUATIONS[name](draw), "wrong result", f"{name}, fault {campaign.total}")
