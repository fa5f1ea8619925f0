"""Known edges, known spectral gaps, and refused sizes, weights and specs."""

import pickle
import re
from itertools import pairwise

import pytest
import torch

import gradwire.codecs  # noqa: F401 - the spec "sign" must be known to be refused as a quantizer
from gradwire.topology import Edges, ErdosRenyi, Matrix, OnePeerExponential, Topology, Torus, graph
from gradwire.topology.graphs.standard import sides


@pytest.mark.parametrize(
    ("spec", "size", "rho"),
    [
        *(
            ("ring", n, rho)
            for n, rho in ((4, 0.667), (8, 0.1953), (16, 0.0507), (32, 0.0128), (36, 0.0101), (64, 0.0032))
        ),
        *(
            ("torus", n, rho)
            for n, rho in ((4, 0.667), (9, 0.6), (12, 0.4), (16, 0.4), (32, 0.1172), (36, 0.2), (64, 0.1172))
        ),
        *(
            ("margulis(weights='max_degree')", n, rho)
            for n, rho in ((16, 0.461), (25, 0.307), (36, 0.349), (64, 0.312))
        ),
        ("social", 32, 0.0821),
        ("social(weights='max_degree')", 32, 0.0903),
        *(("hypercube", 2**d, 2 / (1 + d)) for d in (1, 2, 3, 5)),
        *(("exponential", n, 2 / (1 + d)) for n, d in ((2, 1), (6, 3), (8, 3), (12, 4), (32, 5))),
        *(("star", n, 1 / n) for n in (3, 10)),
        ("complete", 7, 1.0),
        ("one_peer_exponential", 16, 1.0),
    ],
)
def test_golden_gaps(spec: str, size: int, rho: float) -> None:
    assert graph(spec).on(size).rho == pytest.approx(rho, abs=6e-4 if rho > 0.2 else 6e-5)


@pytest.mark.parametrize(
    ("spec", "size", "beta"),
    [
        ("ring", 8, 1.333),
        ("ring", 64, 1.333),
        ("social", 32, 1.434),
        ("social(weights='max_degree')", 32, 1.608),
        ("complete", 5, 1.0),
        ("complete", 1, 0.0),
    ],
)
def test_golden_betas(spec: str, size: int, beta: float) -> None:
    assert graph(spec).on(size).beta == pytest.approx(beta, abs=6e-4)


def test_weights_of_a_ring_of_four() -> None:
    third = 1 / 3
    ring = graph("ring").on(4)
    assert ring.peers(0) == pytest.approx({1: third, 3: third})
    assert ring.self_weight(0) == pytest.approx(third)
    assert (ring.period, ring.degree, ring.symmetric) == (1, 2, True)


@pytest.mark.parametrize("spec", ["complete", "ring", "path", "star", "torus", "hypercube", "expander"])
def test_two_ranks_have_equal_weights(spec: str) -> None:
    assert graph(spec).on(2).matrix().tolist() == [[0.5, 0.5], [0.5, 0.5]]


@pytest.mark.parametrize(
    "spec", ["complete", "ring", "expander", "margulis", "exponential", "erdos_renyi(0.1)", "edges([])"]
)
def test_a_single_rank_has_all_the_weight(spec: str) -> None:
    alone = graph(spec).on(1)
    assert alone.matrix().tolist() == [[1.0]]
    assert (alone.rho, alone.beta, alone.degree, alone.peers(0), alone.out_peers(0)) == (1.0, 0.0, 0, {}, {})


@pytest.mark.parametrize(
    ("size", "grid", "degree"), [(1, (1, 1), 0), (4, (2, 2), 2), (8, (2, 4), 3), (3, (1, 3), 2), (12, (3, 4), 4)]
)
def test_thin_tori_merge_double_edges(size: int, grid: tuple[int, int], degree: int) -> None:
    assert sides(size) == grid
    assert set(Torus().on(size).degrees) == {degree}


@pytest.mark.parametrize("size", [5, 7, 31])
def test_a_torus_of_prime_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"a torus of {size} ranks would be a ring.* use ring, or a torus of"):
        Torus().on(size)


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32])
def test_one_peer_exponential_averages_exactly_in_a_period(size: int) -> None:
    topology = OnePeerExponential().on(size)
    assert 2**topology.period == size
    assert torch.equal(topology.product(), torch.full((size, size), 1.0 / size, dtype=torch.float64))
    assert topology.degree == 1


def test_one_peer_exponential_sends_ahead() -> None:
    topology = OnePeerExponential().on(5)
    assert [topology.out_peers(4, step) for step in range(3)] == [{0: 0.5}, {1: 0.5}, {3: 0.5}]
    assert topology.peers(0, 1) == {3: 0.5}


@pytest.mark.parametrize("size", [5, 7, 11, 13, 31])
def test_expander_chords_are_inverses(size: int) -> None:
    """Where a chord falls on the ring (5, 11, 31) it is merged with it."""
    topology = graph("expander").on(size)
    for i in range(1, size):
        inverse = next(j for j in range(size) if i * j % size == 1)
        assert inverse == i or inverse in topology.peers(i)
    assert topology.degree <= 3


def test_social_has_the_degrees_of_the_data_set() -> None:
    topology = graph("social").on(32)
    assert topology.degrees[:18] == (8, 7, 8, 7, 4, 4, 4, 3, 4, 4, 4, 6, 7, 8, 5, 2, 2, 2)
    assert topology.degrees[18:] == (3, 3, 6, 4, 8, 8, 10, 14, 12, 5, 4, 6, 3, 3)
    assert sum(topology.degrees) == 2 * 89
    assert (min(topology.degrees), max(topology.degrees)) == (2, 14)
    assert not any(peer < 18 for rank in range(18) for peer in topology.peers(rank))


def test_erdos_renyi_is_seeded_and_pinned() -> None:
    edges = [(0, 1), (0, 2), (0, 3), (0, 5), (1, 4), (1, 5), (2, 3), (2, 4), (2, 5), (3, 4), (4, 5)]
    assert list(ErdosRenyi(0.5, seed=1).edges(6)) == edges != list(ErdosRenyi(0.5, seed=2).edges(6))
    drawn = [len(list(ErdosRenyi(0.5, seed=seed).edges(30))) for seed in range(20)]
    assert abs(sum(drawn) / 20 - 0.5 * 435) < 4 * (435 / 4 / 20) ** 0.5
    assert ErdosRenyi(1.0).on(9).matrix().tolist() == graph("complete").on(9).matrix().tolist()


def test_datacenter_is_complete_inside_and_thin_between() -> None:
    topology = graph("datacenter(3)").on(10)  # groups 0-3, 4-6, 7-9
    assert [sorted(topology.peers(rank)) for rank in (0, 1, 3, 4, 5, 9)] == [
        [1, 2, 3, 9],
        [0, 2, 3],
        [0, 1, 2, 4],
        [3, 5, 6],
        [4, 6],
        [0, 7, 8],
    ]


def test_edges_listed_by_the_user() -> None:
    topology = Edges(((0, 1), (1, 0), (1, 2))).on(3)
    assert topology.rounds == Edges([[2, 1], [1, 0]]).on(3).rounds
    assert torch.equal(topology.matrix(), graph("path").on(3).matrix())


def test_arrows_split_what_they_send() -> None:
    topology = graph("arrows([(0, 1), (0, 2), (1, 2), (2, 0)])").on(3)
    third = 1 / 3
    assert topology.out_peers(0) == {1: third, 2: third}
    assert topology.peers(2) == {0: third, 1: 0.5}
    assert not topology.doubly_stochastic
    assert graph("arrows([(0, 1), (1, 2), (2, 0)])").on(3).doubly_stochastic


def test_matrix_takes_a_tensor() -> None:
    ring = graph("ring").on(5)
    own = Matrix(ring.matrix()).on(5)
    assert torch.equal(own.matrix(), ring.matrix())
    assert own.symmetric


def test_topology_from_matrices_per_round() -> None:
    swap = torch.tensor([[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5], [0, 0, 0.5, 0.5]], dtype=torch.float64)
    cross = swap[[0, 2, 1, 3]][:, [0, 2, 1, 3]]
    topology = Topology.of("butterfly", "symmetric", [swap, cross])
    assert (topology.period, topology.rho, topology.degree) == (2, 1.0, 1)
    assert torch.equal(topology.product(), torch.full((4, 4), 0.25, dtype=torch.float64))
    assert pickle.loads(pickle.dumps(topology)) == topology
    assert str(topology) == "butterfly on 4 ranks"


@pytest.mark.parametrize(
    ("spec", "size", "sentence"),
    [
        ("hypercube", 12, "use 8 or 16 ranks"),
        ("expander", 9, "use 7 or 11 ranks"),
        ("margulis", 12, "use 9 or 16 ranks"),
        ("social", 16, "has 32 ranks, not 16"),
        ("datacenter(4)", 3, "use 4 ranks or more"),
        ("erdos_renyi(0.05)", 30, "change the seed, or raise p well above"),
        ("edges([(0, 1), (2, 3)])", 4, "no path to rank 0 from rank 2"),
        ("edges([(0, 5)])", 4, "it has 6 ranks, not 4"),
        ("arrows([(0, 1), (1, 2)])", 3, "no path to rank 0 from rank 1"),
        ("arrows([(1, 0), (2, 1)])", 3, "no path to rank 1 from rank 0"),
        ("star(weights='uniform')", 5, "degrees 1 to 4"),
        ("ring(weights='max_degree')", 6, "without ever averaging"),
        ("matrix([[0.0, 1.0], [1.0, 0.0]])", 2, "without ever averaging"),
        ("matrix([[0.5, 0.4], [0.4, 0.5]])", 2, "row 0 of the weights sums to 0.9, not to 1"),
        ("matrix([[0.5, 0.5], [0.4, 0.6]])", 2, "column 0 of the weights sums to 0.9, not to 1"),
        ("matrix([[0.5, 0.5], [0.4, 0.5]], directed=True)", 2, "column 0 of the weights sums to 0.9"),
        ("matrix([[1.5, -0.5], [-0.5, 1.5]])", 2, "weight -0.5; weights are at least 0"),
        ("matrix([[1.0]])", 2, "1 rows, so it has as many ranks, not 2"),
        ("ring", 0, "at least 1"),
        ("ring", True, "at least 1"),
    ],
)
def test_impossible_sizes_and_weights_are_refused(spec: str, size: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=r"\w") as refused:
        graph(spec).on(size)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("ring(weights='equal')", "no weights='equal'; write weights='metropolis'"),
        ("erdos_renyi(0.0)", "in (0, 1]"),
        ("erdos_renyi(1.5)", "in (0, 1]"),
        ("erdos_renyi(0.5, seed='a')", "write a whole number"),
        ("datacenter(0)", "at least 1"),
        ("edges([(0, 0)])", "joins a rank to itself"),
        ("edges([(0, 1, 2)])", "is no pair of ranks"),
        ("edges([(0, -1)])", "is no pair of ranks"),
        ("edges(3)", "is no list of pairs"),
        ("matrix([[1.0, 2.0]])", "it must be square"),
        ("matrix([['a']])", "rows of numbers"),
        ("ringg", "did you mean ring"),
        ("sign", "is no graph but a quantizer; write one of"),
    ],
)
def test_invalid_specs_are_refused(spec: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        graph(spec)


@pytest.mark.parametrize("rank", [-1, 8])
def test_unknown_ranks_are_refused(rank: int) -> None:
    ring = graph("ring").on(8)
    for method in (ring.peers, ring.out_peers, ring.self_weight):
        with pytest.raises(ValueError, match=f"ring on 8 ranks has no rank {rank}; ranks run from 0 to 7"):
            method(rank)


def test_promises_are_checked_in_every_round() -> None:
    ring, lopsided = graph("ring").on(3).matrix(), torch.eye(3, dtype=torch.float64).roll(1, 0) * 0.5
    lopsided += torch.eye(3, dtype=torch.float64) * 0.5
    assert Topology.of("mine", "doubly", [ring, lopsided]).period == 2
    with pytest.raises(ValueError, match=r"rank 0 gives rank 2 the weight 0\.5 and gets 0"):
        Topology.of("mine", "symmetric", [ring, lopsided])
    with pytest.raises(ValueError, match="rounds have 1 or 3 ranks; give every round one row for each rank"):
        Topology.of("mine", "doubly", [ring, ring[:1, :1] * 3])
    for empty in ((), ((),)):
        with pytest.raises(ValueError, match="needs a round of weights"):
            Topology("mine", "doubly", empty)


def test_rounds_that_undo_each_other_are_refused() -> None:
    """The union of the rounds is connected, yet a period gives every rank its own back."""
    turn = torch.eye(3, dtype=torch.float64).roll(1, 0)
    with pytest.raises(ValueError, match="without ever averaging"):
        Topology.of("carousel", "doubly", [turn, turn.T])


def test_time_varying_gap_is_per_round() -> None:
    topology = OnePeerExponential().on(6)
    second = torch.linalg.eigvals(topology.product()).abs().sort().values[-2]
    assert topology.rho == pytest.approx(1.0 - float(second) ** (1 / 3), abs=1e-9)
    gaps = [OnePeerExponential().on(n).rho for n in (8, 16, 32)]
    assert all(a == b == 1.0 for a, b in pairwise(gaps))
