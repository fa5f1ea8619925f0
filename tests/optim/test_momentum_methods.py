"""EF21 with momentum and DeMo equal their papers' recursions; they resume, and refuse a second momentum."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire
from gradwire.codecs.decoding import Entries
from gradwire.feedback import PreconditionedMomentum

WORLD, STEPS, RATE = 3, 6, 0.05


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False))


def loss(model: nn.Module, rank: int, step: int) -> Tensor:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return (model(torch.randn(16, 12, generator=draw)) - torch.randn(16, 4, generator=draw)).square().mean()


class Training:
    """Replicas in lockstep, with plain SGD."""

    def __init__(self, spec: str) -> None:
        self.models = [net() for _ in range(WORLD)]
        self.optimizers = [torch.optim.SGD(model.parameters(), RATE, weight_decay=0.1) for model in self.models]
        self.workers = gradwire.lockstep(self.models, spec)
        self.step = 0

    def run(self, steps: int) -> "Training":
        for step in range(self.step, self.step + steps):
            for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
                optimizer.zero_grad()
                loss(model, rank, step).backward()
            self.workers()
            for optimizer in self.optimizers:
                optimizer.step()
        self.step += steps
        return self

    def weights(self, rank: int = 0) -> list[Tensor]:
        return [p.detach().clone() for p in self.models[rank].parameters()]


def gradients(model: nn.Module, step: int) -> list[list[Tensor]]:
    """By parameter, then by rank."""
    by_rank = []
    for rank in range(WORLD):
        model.zero_grad()
        loss(model, rank, step).backward()
        by_rank.append([p.grad.clone() for p in model.parameters()])
    return [list(each) for each in zip(*by_rank, strict=True)]


def top(x: Tensor, k: int) -> Tensor:
    flat = x.flatten()
    chosen = flat.abs().topk(k).indices
    return torch.zeros_like(flat).index_copy_(0, chosen, flat[chosen]).view_as(x)


def cosines(n: int) -> Tensor:
    rows = [[torch.cos(torch.tensor(torch.pi * (i + 0.5) * k / n)) for i in range(n)] for k in range(n)]
    return torch.tensor(rows) * torch.tensor([(1.0 if k == 0 else 2.0) / n for k in range(n)]).sqrt()[:, None]


def fast(x: Tensor, side: int, k: int) -> Tensor:
    """The k largest cosine components of every tile, as a matrix."""
    found = torch.zeros_like(x)
    for i in range(0, x.shape[0], side):
        for j in range(0, x.shape[1], side):
            tile = x[i : i + side, j : j + side]
            d = cosines(side)
            found[i : i + side, j : j + side] = d.T @ top(d @ tile @ d.T, k) @ d
    return found


def ef21_sgdm(steps: int) -> list[Tensor]:
    """Algorithm 1 of the paper, with zeros to begin with."""
    model = net()
    v, h = ([[torch.zeros_like(p) for _ in range(WORLD)] for p in model.parameters()] for _ in range(2))
    for step in range(steps):
        grads = gradients(model, step)
        for i, p in enumerate(model.parameters()):
            for rank in range(WORLD):
                v[i][rank] = (1 - 0.2) * v[i][rank] + 0.2 * grads[i][rank]
                h[i][rank] = h[i][rank] + top(v[i][rank] - h[i][rank], p.numel() // 8)
            with torch.no_grad():
                p -= RATE * (sum(h[i]) / WORLD + 0.1 * p)
    return [p.detach() for p in model.parameters()]


def demo(steps: int) -> list[Tensor]:
    """Algorithm 1 of the paper: momentum, its fast components, their mean's sign."""
    model = net()
    m = [[torch.zeros_like(p) for _ in range(WORLD)] for p in model.parameters()]
    for step in range(steps):
        grads = gradients(model, step)
        for i, p in enumerate(model.parameters()):
            sent = []
            for rank in range(WORLD):
                m[i][rank] = 0.9 * m[i][rank] + grads[i][rank]
                sent.append(fast(m[i][rank], 4, 3))
                m[i][rank] = m[i][rank] - sent[-1]
            with torch.no_grad():
                p -= RATE * ((sum(sent) / WORLD).sign() + 0.1 * p)
    return [p.detach() for p in model.parameters()]


SPECS: dict[str, Any] = {"ef21_sgdm(0.125, momentum=0.8)": ef21_sgdm, "demo(3, side=4, momentum=0.9)": demo}


@pytest.mark.parametrize("spec", SPECS)
def test_methods_equal_their_papers_recursions(spec: str) -> None:
    found = Training(spec).run(STEPS)
    for rank in range(WORLD):
        for a, b in zip(found.weights(rank), SPECS[spec](STEPS), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        assert all(map(torch.equal, found.weights(rank), found.weights()))


@pytest.mark.parametrize("spec", SPECS)
def test_a_run_goes_on_bit_for_bit(spec: str) -> None:
    whole, first, second = Training(spec).run(STEPS), Training(spec).run(3), Training(spec)
    for old, new in zip(first.models, second.models, strict=True):
        new.load_state_dict(copy.deepcopy(old.state_dict()))
    for old, new in zip(first.workers.wires, second.workers.wires, strict=True):
        new.load_state_dict(old.state_dict())
    second.step = 3
    assert all(map(torch.equal, second.run(STEPS - 3).weights(), whole.weights()))


@pytest.mark.parametrize(
    ("make", "remedy"),
    [(lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9), "momentum=0,"), (torch.optim.AdamW, "'int4' with AdamW")],
)
@pytest.mark.parametrize("spec", SPECS)
def test_a_second_momentum_is_refused(spec: str, make: Any, remedy: str) -> None:
    model = net()
    with pytest.raises(ValueError, match=remedy):
        gradwire.DistributedOptimizer(make(model.parameters()), model.named_parameters(), spec)


def test_entries_alone_are_multiplied_by_their_denominators() -> None:
    """The update is that of the dense mean, bit for bit, also where several ranks have sent an entry."""
    n, draw = 1000, torch.Generator().manual_seed(0)
    places = [torch.randperm(n, generator=draw)[:300].sort().values for _ in range(3)]
    entries = Entries(torch.randn(900, generator=draw), torch.cat(places), (0, 300, 600, 900))
    memory = {"denominator": torch.rand(n, generator=draw) + 0.1}
    feedback = PreconditionedMomentum()
    dense, _ = feedback.finalize(entries.mean(n), memory)
    found, _ = feedback.finalize_entries(entries, memory, torch.full((n,), torch.nan))
    assert torch.equal(found, dense) and int((found == 0).sum()) > 200
