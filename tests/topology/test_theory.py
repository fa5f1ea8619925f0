"""The theorem's step and factor, and gossip that converges as they say."""

import pytest
import torch
from torch import Tensor

from gossip_fixtures import dense_factor
from gradwire.topology import graph, theory


@pytest.mark.parametrize(("delta", "gamma"), [(1.0, 4.1e-3), (0.1, 3.5e-4), (0.01, 3.5e-5)])
def test_gamma_on_the_ring_of_eight(delta: float, gamma: float) -> None:
    assert theory.consensus_step(graph("ring").on(8), delta) == pytest.approx(gamma, rel=0.02)


def test_step_and_factor_on_the_complete_graph() -> None:
    """There rho = beta = 1, so gamma* = 1 / (16 + 1 + 4 + 2 - 8) at delta = 1."""
    complete = graph("complete").on(4)
    assert theory.consensus_step(complete, 1.0) == pytest.approx(1 / 15)
    assert theory.consensus_factor(complete, 0.5) == pytest.approx(1 - 0.5 / 82)


@pytest.mark.parametrize("spec", ["ring", "path", "torus", "complete", "exponential", "one_peer_exponential"])
@pytest.mark.parametrize("size", [1, 2, 6, 8])
def test_dense_gossip_contracts_by_the_factor(spec: str, size: int) -> None:
    topology = graph(spec).on(size)
    factor = dense_factor(topology)
    if topology.symmetric and topology.period == 1:
        assert factor == pytest.approx(1.0 - topology.rho, abs=1e-9)
    x = mixed = start(size)
    for step in range(topology.period):
        mixed = topology.matrix(step) @ mixed
    assert torch.allclose(mixed.mean(0), x.mean(0))
    assert spread(mixed) <= factor**2 * spread(x) + 1e-18


@pytest.mark.parametrize(
    ("spec", "size", "rounds"), [("ring", 8, 4), ("ring", 1, 0), ("complete", 9, 1), ("one_peer_exponential", 8, 3)]
)
def test_rounds_to_halve(spec: str, size: int, rounds: int) -> None:
    assert theory.rounds_to_halve(graph(spec).on(size)) == rounds


@pytest.mark.parametrize("keep", [1, 4, 16])
@pytest.mark.parametrize(("spec", "size"), [("ring", 8), ("torus", 9), ("star", 5), ("social", 32), ("complete", 4)])
def test_compressed_gossip_converges_as_the_theorem_says(spec: str, size: int, keep: int) -> None:
    """CHOCO-Gossip with top-k of 16 entries, delta = k/16."""
    topology = graph(spec).on(size)
    delta = keep / 16
    gamma, factor = theory.consensus_step(topology, delta), theory.consensus_factor(topology, delta)
    x = start(size)
    public, error, mean = torch.zeros_like(x), None, x.mean(0)
    for _ in range(150):
        public = public + top(x - public, keep)
        now = spread(x) + float((x - public).square().sum())
        assert error is None or now <= factor * error * (1 + 1e-9)
        error = now
        x = x + gamma * (topology.matrix() @ public - public)
    assert torch.allclose(x.mean(0), mean)


@pytest.mark.parametrize(
    "spec", ["exponential", "one_peer_exponential", "arrows([(0, 1), (1, 2), (2, 3), (3, 4), (4, 0)])"]
)
def test_graphs_outside_of_the_theorem_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match="choose gamma yourself"):
        theory.consensus_step(graph(spec).on(5), 0.5)


@pytest.mark.parametrize("delta", [0.0, 1.5, float("nan")])
def test_delta_must_be_a_contraction(delta: float) -> None:
    with pytest.raises(ValueError, match="is no contraction"):
        theory.consensus_factor(graph("ring").on(5), delta)


def test_push_sum_averages_where_rows_do_not_sum_to_one() -> None:
    lopsided = graph("arrows([(0, 1), (0, 2), (1, 2), (2, 0)])").on(3)
    assert not lopsided.doubly_stochastic
    x, w = torch.tensor([[3.0], [6.0], [0.0]], dtype=torch.float64), torch.ones(3, 1, dtype=torch.float64)
    for _ in range(60):
        x, w = lopsided.matrix() @ x, lopsided.matrix() @ w
    assert torch.allclose(x / w, torch.full_like(x, 3.0))


def start(size: int) -> Tensor:
    return torch.randn(size, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(size))


def spread(x: Tensor) -> float:
    return float((x - x.mean(0)).square().sum())


def top(x: Tensor, k: int) -> Tensor:
    return torch.zeros_like(x).scatter(1, x.abs().topk(k, 1).indices, 1.0) * x
