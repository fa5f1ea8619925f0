"""Stacked rows equal ranks that exchange messages, bit for bit, and report the same bytes."""

import pytest
import torch

from gossip_fixtures import Vector, simulated, vectors
from gradwire.gossip import Diverged
from gradwire.integrations.gossip import BatchedGossip

SPECS = [
    ("choco(ring)", "sign"),
    ("choco(ring)", "topk(0.1) | int32"),
    ("choco(torus)", "topk(0.3) | bitmap"),
    ("choco(ring)", "randomk(0.2)"),
    ("choco(torus)", "randomk(0.2, shared=False)"),
    ("choco(star)", "qsgd(levels=7, bucket=None, biased=True)"),
    ("choco(ring, gamma=0.3)", "int4"),
    ("choco(ring, gamma=0.3)", "hadamard | sign"),
    ("dpsgd(one_peer_exponential)", "fp16"),
    ("dcd(ring)", "qsgd(levels=15, bucket=None)"),
    ("ecd(ring)", "qsgd"),
    ("deepsqueeze(ring)", "sign"),
    ("centralized", "bf16"),
]
SLOW = [("choco(one_peer_exponential)", "sign"), ("choco(ring)", "topk(0.1)"), ("powergossip(ring)", None)]


def ranks_of(spec: str) -> int:
    return 9 if "torus" in spec else 6


@pytest.mark.parametrize(
    ("spec", "codec", "overlap"),
    [*((*pair, False) for pair in SPECS + SLOW), *((*pair, True) for pair in (SPECS[0], SPECS[8], SLOW[2]))],
)
def test_rows_equal_ranks(spec: str, codec: str | None, overlap: bool) -> None:
    """Parameters, memories and reports, through more than three windows of gamma=auto."""
    n = ranks_of(spec)
    ranks, stacked = (
        simulated(n, spec, codec, overlap=overlap),
        BatchedGossip(Vector(), n, spec, codec, overlap=overlap),
    )
    assert (stacked._stack is not None) == ((spec, codec) in SPECS)
    a = b = vectors(n)
    for step in range(32):
        a, b = ranks.mix(a), stacked.mix(b)
        assert torch.equal(a, b), step
        a = b = a + 0.01 * vectors(n, seed=step + 1)
    for one, other in zip(ranks.state_dict(), stacked.state_dict(), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), [
            n for n in one if not torch.equal(one[n], other[n])
        ]
    for rank in (0, n - 1):
        one, other = ranks.report(rank), stacked.report(rank)
        assert (one.sent, one.received, one.collectives, one.gamma) == (
            other.sent,
            other.received,
            other.collectives,
            other.gamma,
        )
        assert one.consensus == pytest.approx(other.consensus, rel=1e-6)


@pytest.mark.parametrize(("spec", "codec"), [SPECS[0], SPECS[3], SPECS[5], SLOW[0]])
def test_states_move_between_rows_and_ranks(spec: str, codec: str | None) -> None:
    """Saved in mid-window by rows, loaded by ranks that exchange messages, and back."""
    n = ranks_of(spec)
    stacked = BatchedGossip(Vector(), n, spec, codec)
    x = vectors(n)
    for step in range(24):
        x = stacked.mix(x) + 0.01 * vectors(n, seed=step)
    ranks, again = simulated(n, spec, codec), BatchedGossip(Vector(), n, spec, codec)
    ranks.load_state_dict(stacked.state_dict())
    again.load_state_dict(ranks.state_dict())
    a = b = c = x
    for step in range(24):
        noise = 0.01 * vectors(n, seed=step)
        a, b, c = stacked.mix(a) + noise, ranks.mix(b) + noise, again.mix(c) + noise
    assert torch.equal(a, b) and torch.equal(a, c)
    for one, other in zip(stacked.state_dict(), again.state_dict(), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_diverging_row_raises() -> None:
    net = BatchedGossip(Vector(), 4, "choco(ring)", "sign")
    x = vectors(4)
    x = net.mix(x)
    x[2, 5] = float("inf")
    with pytest.raises(Diverged, match="no longer finite at step 1"):
        net.mix(x)
