"""gamma=auto: all ranks find the same step, near the best one, and lower it when replicas diverge."""

import json
import math
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from gossip_fixtures import LENGTH, simulated, vectors
from gradwire.codecs import codec
from gradwire.core.segments import Segments
from gradwire.engine import interleave, lockstep
from gradwire.engine.lockstep import Lockstep
from gradwire.gossip import Node, auto_gamma
from gradwire.gossip.optimal_gamma import GRID, Fidelity, optimal_step
from gradwire.topology import graph
from gradwire_lab.bench.gamma import CODECS, PROBLEMS, NoisyQuadratic, drive, table
from gradwire_lab.cli import gamma as command
from gradwire_lab.cli.main import app


@pytest.mark.parametrize(
    ("delta", "common", "tuned"),
    # Tuned by hand for ring-8 in the paper's own code (sign, top 1 %), with the contraction typical of its networks.
    [(0.5, False, 0.45), (0.055, True, 0.0375)],
)
def test_near_published_steps_tuned_by_hand(delta: float, common: bool, tuned: float) -> None:
    step = optimal_step(graph("ring").on(8), Fidelity(delta, delta), common)
    assert tuned / 1.35 < step < tuned * 1.35


@pytest.mark.parametrize(("spec", "size", "step"), [("ring", 8, 1.308), ("complete", 8, 1.0), ("ring", 1, 1.0)])
def test_the_best_step_without_compression(spec: str, size: int, step: float) -> None:
    assert auto_gamma.best_dense_step(graph(spec).on(size)) == pytest.approx(step, abs=6e-4)


@pytest.mark.parametrize("spec", ["ring", "torus", "complete", "exponential", "one_peer_exponential"])
def test_worse_codecs_get_smaller_steps(spec: str) -> None:
    topology = graph(spec).on(8)
    steps = [optimal_step(topology, Fidelity(delta, delta), True) for delta in (0.001, 0.01, 0.1, 0.3, 0.6, 1.0)]
    assert steps == sorted(steps) and steps[0] < 0.01 and steps[-1] > 0.7
    assert all(step in GRID for step in steps)


def test_a_codec_that_sends_nothing_gets_the_smallest_step() -> None:
    assert optimal_step(graph("ring").on(8), Fidelity(0.0, 0.0), True) == GRID[-1]
    assert optimal_step(graph("ring").on(1), Fidelity(0.3, 0.3), True) == 1.0


def quadratic(spec: str, codec: str, ranks: int, steps: int) -> tuple[float, set[float]]:
    """Noisy gradient descent on different quadratics; the spread over the last half, and the gammas seen at once."""
    generator = torch.Generator().manual_seed(3)
    curvature = torch.logspace(-1, 0, LENGTH)
    centers = torch.randn(LENGTH, generator=generator) + 0.3 * torch.randn(ranks, LENGTH, generator=generator)
    net = simulated(ranks, spec, codec, granularity="model")
    x, total, seen = torch.zeros(ranks, LENGTH), 0.0, set()
    for step in range(steps):
        noise = 0.5 * torch.randn(ranks, LENGTH, generator=generator)
        x = net.mix(x - 0.1 * (curvature * (x - centers) + noise))
        gammas = {node.gamma for node in net.nodes}
        assert len(gammas) == 1
        seen |= gammas
        if step >= steps // 2:
            total += float((x - x.mean(0)).square().sum())
    return total, seen


@pytest.mark.parametrize(("codec", "grid"), [("sign", (1.0, 0.7, 0.5)), ("topk(0.1)", (0.4, 0.3, 0.2))])
def test_auto_is_as_good_as_the_best_step_by_hand(codec: str, grid: tuple[float, ...]) -> None:
    """Within ten percent of the best distance (a root of the spread); the whole table is in docs/gossip.md."""
    by_hand = min(quadratic(f"choco(ring, gamma={gamma})", codec, 8, 90)[0] for gamma in grid)
    auto, _ = quadratic("choco(ring)", codec, 8, 90)
    assert math.sqrt(auto / by_hand) < 1.1


def test_shared_random_entries_do_not_diverge() -> None:
    """Nothing but noise: no gradient pulls back what a large step throws too far, so only the lag shows it."""
    ring = NoisyQuadratic("ring", 8, 1800, curvature=0.0)
    by_hand = min(drive(ring, "randomk(0.02)", gamma, 0).distance for gamma in (0.01, 0.012))
    assert drive(ring, "randomk(0.02)", None, 0).distance < 1.15 * by_hand


def test_all_ranks_take_the_same_step_on_a_changing_graph() -> None:
    _, seen = quadratic("choco(one_peer_exponential)", "topk(0.05)", 8, 45)
    assert len(seen) > 1  # it was measured anew


def test_a_window_spans_the_graph() -> None:
    assert auto_gamma.window(graph("ring").on(8)) == 10
    assert auto_gamma.window(graph("path").on(30)) == 29
    assert auto_gamma.window(graph("one_peer_exponential").on(8)) == 10


@pytest.mark.parametrize(("lag", "where"), [(1.3, (0.6, 0.8)), (8.0, (0.08, 0.12)), (0.2, (0.99, 1.0))])
def test_the_step_follows_the_lag(lag: float, where: tuple[float, float]) -> None:
    """Replicas whose codec loses nothing, but whose x is ``lag`` pulls ahead of what neighbors have."""
    topology, chosen = graph("ring").on(8), codec("fp16")
    state = auto_gamma.initial_state(chosen, Segments.single(100), topology)
    generator = torch.Generator().manual_seed(0)
    for step in range(400):
        r = torch.randn(100, generator=generator)
        d = lag * auto_gamma.gamma(state) * r
        state = auto_gamma.after_step(state, auto_gamma.Measurement(d, 0.5 * d, r), [], step, topology, chosen)
    assert where[0] <= auto_gamma.gamma(state) <= where[1]


def test_the_lag_of_a_selector_has_a_floor() -> None:
    """Lasting pushes make x stand still and its measured lag zero; entries that were left out wait all the same."""
    topology, chosen = graph("ring").on(8), codec("topk(0.1)")
    state = auto_gamma.initial_state(chosen, Segments.single(100), topology)
    for step in range(300):
        r = torch.randn(100, generator=torch.Generator().manual_seed(step))
        d = torch.randn(100, generator=torch.Generator().manual_seed(1000 + step))
        state = auto_gamma.after_step(state, auto_gamma.Measurement(d, 0.2 * d, r), [], step, topology, chosen)
    assert 0.1 < auto_gamma.gamma(state) < 0.3


# mu is 2/3 (1 - cos): the slowest, and the fastest
ALIKE = 2 / (1 - math.cos(math.pi / 4) + 2) * 1.5 * 0.1 / 1.9
APART = optimal_step(graph("ring").on(8), Fidelity(0.1, 0.1), common=False)


@pytest.mark.parametrize(("spec", "best"), [("randomk(0.1)", ALIKE), ("randomk(0.1, shared=False) | fp16", APART)])
def test_the_step_for_random_entries_is_known(spec: str, best: float) -> None:
    """Whatever is measured; with noise, or on a graph that changes, the step is measured."""
    assert ALIKE < 0.07 < 0.09 < APART < 0.12  # losses that differ between ranks average out
    topology, chosen = graph("ring").on(8), codec(spec)
    state = auto_gamma.initial_state(chosen, Segments.single(100), topology)
    for step in range(45):
        assert auto_gamma.gamma(state) == pytest.approx(best, rel=1e-4)
        r = torch.randn(100, generator=torch.Generator().manual_seed(step))
        state = auto_gamma.after_step(state, auto_gamma.Measurement(0.01 * r, 0.01 * r, r), [], step, topology, chosen)
    for other in ("randomk(0.1) | qsgd(levels=3, biased=True)", "topk(0.1)", "sign"):
        assert auto_gamma.known_step(topology, codec(other)) is None
    assert auto_gamma.known_step(graph("one_peer_exponential").on(8), chosen) is None


def test_the_table_in_the_docs_is_what_was_measured() -> None:
    docs = Path(__file__).parents[2] / "docs"
    lines = [json.loads(line) for line in (docs / "results" / "gossip-gamma.jsonl").read_text().splitlines()]
    assert len(lines) == len(CODECS) * len(PROBLEMS)
    assert "\n".join(table(lines)) in (docs / "gossip.md").read_text()
    assert max(line["distance"] for line in lines) < 1.15


def test_only_some_entries_of_a_large_model_are_measured() -> None:
    x = torch.arange(1_000_000.0)
    assert auto_gamma.sample(x).numel() == auto_gamma.SAMPLE and float(auto_gamma.sample(x)[-1]) > 990_000
    assert auto_gamma.sample(x[:100]).numel() == 100


def test_equal_replicas_keep_gamma() -> None:
    net = simulated(4, "choco(ring)", "sign")
    for _ in range(25):
        x = net.mix(torch.zeros(4, LENGTH))
    assert bool((x == 0).all()) and net.report().gamma > 0.1


def test_the_command_prints_the_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(problem: NoisyQuadratic, codec: str, seeds: range) -> dict[str, object]:
        found = {"best": 0.5, "best_by_loss": 0.5, "auto": 0.4, "distance": 1.0, "loss": 1.0}
        return {**problem._asdict(), "codec": codec, "seeds": list(seeds), **found}

    monkeypatch.setattr(command, "compare", compare)
    done = CliRunner().invoke(app, ["bench", "gamma", "--results", str(tmp_path / "rows.jsonl"), "--only", "sign"])
    assert done.exit_code == 0 and "| `sign` |" in done.stdout
    assert ["left" in line for line in done.stderr.splitlines()] == [True, True, False]


def test_a_step_after_all_edges_were_new_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are equal then. Their rounding looked like an endless lag, and ranks that had come back mixed no more."""
    monkeypatch.setattr(lockstep, "cached", nullcontext)  # each rank decodes what it is sent
    plain = simulated(4, "choco(ring)", "topk(0.3)")
    nodes = [Node(n.method, n.codec, n.topology, n.rank, n.seed, n.tensors, n.units, elastic=True) for n in plain.nodes]
    x = vectors(4)
    for node in nodes:
        node.begin(x[0])
        node.step = 8
    for new in (True, False):  # the last steps of a window
        live = {node.rank: dict.fromkeys(node.topology.peers(node.rank), new) for node in nodes}
        rounds = [interleave([node.run(row, live=live[node.rank])]) for node, row in zip(nodes, x, strict=True)]
        x = torch.stack([mixed for (mixed,) in Lockstep(4).drive(rounds)]) + 0.1 * vectors(4, seed=1)
    for node in nodes:
        d2, *_, r2 = node.memory["gauge"][auto_gamma.METADATA][:-1].tolist()
        assert d2 > 0.0 and r2 == 0.0
