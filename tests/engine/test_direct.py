"""Gradients read where they lie: the same messages, memories and parameters as end to end, bit for bit."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.engine import session
from spawn import run_ranks

pytest.importorskip("numba")


def train(rank: int, spec: str, hooked: bool, **options: Any) -> tuple[list[Tensor], dict[str, Tensor], int, float]:
    """Some steps, one of which is dropped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(800, 450), nn.ReLU(), nn.Linear(450, 500))
    outer = DistributedDataParallel(model, gradient_as_bucket_view=True) if hooked else model
    wire = gradwire.compress(outer, spec, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        x = torch.randn(4, 800, generator=torch.Generator().manual_seed(10 * step + rank))
        if step == 3 and rank == 1:
            x[0, 0] = torch.inf
        optimizer.zero_grad(set_to_none=False)
        outer(x).square().mean().backward()
        if not hooked:
            wire()
        optimizer.step()
    return [p.detach() for p in model.parameters()], wire.state_dict(), wire.skipped, wire.report().sent


def both(rank: int, world: int) -> None:
    find = session.laid
    for spec, options in (("topk(0.01)", {}), ("dgc(0.01)", {}), ("topk(0.01) | fp16", {"bundle": None})):
        for hooked in (False, True):
            found: list[bool] = []

            def spy(*args: Any, found: list[bool] = found) -> Any:
                lies = find(*args)
                found.append(lies is not None)
                return lies

            session.laid = spy  # type: ignore[assignment]
            direct = train(rank, spec, hooked, **options)
            session.laid = lambda *args: None  # type: ignore[assignment]
            plain = train(rank, spec, hooked, **options)
            session.laid = find
            assert sum(found) >= 6, "nothing was read where it lies"
            assert direct[2] == plain[2] == 1 and direct[3] == plain[3]
            assert all(map(torch.equal, direct[0], plain[0]))
            assert direct[1].keys() == plain[1].keys()
            assert all(torch.equal(direct[1][name], plain[1][name]) for name in plain[1])


def test_nobody_can_tell() -> None:
    run_ranks(both, 2)
