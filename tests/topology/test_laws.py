"""What holds for every registered graph at every size it has, and that other sizes are refused."""

from contextlib import suppress
from functools import cache

import pytest
import torch

from gradwire.core.registry import card, registered
from gradwire.core.spec import parse
from gradwire.topology import Graph, Topology, graph

SPECS = [spec for made in registered("topology").values() for spec in made.examples]
RULED = [name for name, made in registered("topology").items() if "weights" in made.__dataclass_fields__]
ANY_SIZE = {"complete", "ring", "path", "star", "exponential", "one_peer_exponential", "datacenter(1)"}
NOT_EVERY_SIZE = {"hypercube", "expander", "margulis", "social", "torus", "edges", "erdos_renyi"}
SIZES = range(1, 41)


@cache
def sized(spec: str) -> list[Topology]:
    """Every size in 1..40 that the graph has; refusals are sentences with a remedy."""
    made = []
    for size in SIZES:
        try:
            made.append(graph(spec).on(size))
        except ValueError as refused:
            assert len(str(refused).split()) > 5, refused
            assert str(size) in str(refused), refused
    return made


@pytest.mark.parametrize("spec", SPECS)
def test_a_graph_is_a_value_and_prints_as_its_spec(spec: str) -> None:
    made = parse(spec)
    assert isinstance(made, Graph)
    assert parse(str(made)) == made
    assert hash(parse(str(made))) == hash(made)


@pytest.mark.parametrize("spec", SPECS)
def test_sizes(spec: str) -> None:
    sizes = [topology.size for topology in sized(spec)]
    assert sizes
    if spec in ANY_SIZE:
        assert sizes == list(SIZES)


@pytest.mark.parametrize("spec", SPECS)
def test_rows_and_columns_sum_to_one(spec: str) -> None:
    for topology in sized(spec):
        for step in range(topology.period):
            matrix = topology.matrix(step)
            ones = torch.ones(topology.size, dtype=torch.float64)
            assert matrix.dtype == torch.float64
            assert (matrix >= 0).all()
            assert torch.allclose(matrix.sum(0), ones, atol=1e-12, rtol=0), topology
            if topology.promise != "column":
                assert torch.allclose(matrix.sum(1), ones, atol=1e-12, rtol=0), topology
                assert topology.doubly_stochastic
            if topology.promise == "symmetric":
                assert torch.equal(matrix, matrix.T), topology
                assert topology.symmetric


@pytest.mark.parametrize("spec", SPECS)
def test_peers_agree_with_the_matrix_and_with_each_other(spec: str) -> None:
    for topology in sized(spec):
        for step in range(topology.period):
            incoming, outgoing = torch.zeros(2, topology.size, topology.size, dtype=torch.float64)
            for rank in range(topology.size):
                incoming[rank, rank] = outgoing[rank, rank] = topology.self_weight(rank, step)
                for peer, weight in topology.peers(rank, step).items():
                    assert peer != rank and weight > 0.0
                    incoming[rank, peer] = weight
                for peer, weight in topology.out_peers(rank, step).items():
                    assert peer != rank and weight > 0.0
                    outgoing[peer, rank] = weight
                assert len(topology.out_peers(rank, step)) <= topology.degrees[rank] <= topology.degree
            assert torch.equal(incoming, topology.matrix(step))
            assert torch.equal(outgoing, incoming)


@pytest.mark.parametrize("spec", SPECS)
def test_gossip_reaches_every_rank(spec: str) -> None:
    """The period's product, taken often enough, is positive: every rank reaches every other, and averages."""
    for topology in sized(spec):
        mixed = (topology.product() > 0).double()
        for _ in range(12):  # 2^12 periods
            mixed = (mixed @ mixed > 0).double()
        assert mixed.all(), topology
        assert 0.0 < topology.rho <= 1.0, topology
        assert 0.0 <= topology.beta <= 2.0 + 1e-9 or topology.promise == "column", topology


@pytest.mark.parametrize("spec", SPECS)
def test_the_gap_is_that_of_the_matrix(spec: str) -> None:
    symmetric = [topology for topology in sized(spec)[:12] if topology.size > 1 and topology.symmetric]
    assert symmetric or sized(spec)[0].promise != "symmetric" or spec == "edges([])"  # which has one rank
    for topology in symmetric:
        eigenvalues = torch.linalg.eigvalsh(topology.matrix())
        assert topology.rho == pytest.approx(1.0 - float(eigenvalues.abs().sort().values[-2]), abs=1e-9)
        assert topology.beta == pytest.approx(1.0 - float(eigenvalues[0]), abs=1e-9)


@pytest.mark.parametrize("spec", SPECS)
def test_topologies_are_deterministic(spec: str) -> None:
    for topology in sized(spec)[::5]:
        torch.manual_seed(topology.size)  # whatever the global generator has seen
        before = torch.random.get_rng_state()
        again = graph(spec).on(topology.size)
        assert again == topology and hash(again) == hash(topology)
        assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("spec", SPECS)
def test_steps_repeat_after_a_period(spec: str) -> None:
    topology = sized(spec)[-1]
    assert torch.equal(topology.matrix(1), topology.matrix(1 + 3 * topology.period))
    assert topology.peers(0, 1) == topology.peers(0, 1 + topology.period)


@pytest.mark.parametrize("rule", ["metropolis", "uniform", "max_degree"])
@pytest.mark.parametrize("name", RULED)
def test_every_rule_gives_stochastic_weights_or_refuses(name: str, rule: str) -> None:
    example = parse(registered("topology")[name].examples[0])
    made = type(example)(**{**vars(example), "weights": rule})
    topologies = []
    for size in (1, 2, 3, 4, 5, 7, 8, 9, 16, 25, 32):
        with suppress(ValueError):
            topologies.append(made.on(size))
    irregular = rule == "uniform" and name in {"edges", "social"}
    assert bool(topologies) is not irregular
    assert rule != "metropolis" or name in NOT_EVERY_SIZE or len(topologies) == 11
    for topology in topologies:
        ones = torch.ones(topology.size, dtype=torch.float64)
        assert torch.allclose(topology.matrix().sum(0), ones, atol=1e-12), topology
        assert topology.rho > 0.0, topology


@pytest.mark.parametrize("name", registered("topology"))
def test_every_graph_has_a_card(name: str) -> None:
    text = card(registered("topology")[name])
    for label in ("Paper:", "Formula:", "Wire:", "Traits:", "Differs:", "Spec:"):
        assert f"\n{label}" in text, (name, label)
