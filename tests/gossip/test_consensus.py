"""Gossip on random vectors: replicas converge to the mean they started from, as fast as theorems say."""

import math
from contextlib import nullcontext

import pytest
import torch

import gradwire
from gossip_fixtures import LENGTH, Vector, dense_factor, simulated, spread, vectors
from gradwire.codecs import Codec
from gradwire.core.segments import Segments
from gradwire.engine import lockstep
from gradwire.engine.drive import interleave
from gradwire.engine.lockstep import Lockstep
from gradwire.gossip import auto_gamma, gossip_method
from gradwire.gossip.optimal_gamma import Fidelity
from gradwire.integrations.gossip import BatchedGossip
from gradwire.topology import graph, theory
from strategies import CODECS

CASTS = ("fp32", "fp16", "bf16")
CONTRACTIONS = (
    "fp32",
    "bf16",
    "sign",
    "topk(0.1)",
    "topk(0.1) | sign | int32",
    "randomk(0.1)",
    "qsgd(levels=7, biased=True)",
)
METHODS = {
    "dpsgd(ring)": CASTS,
    "dpsgd(one_peer_exponential)": CASTS,
    "sgp(exponential)": CASTS,
    "sgp(arrows([(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7), (7, 0), (0, 3)]))": ("fp32",),
    "choco(ring)": (*CONTRACTIONS, "hadamard | topk(0.1)", "randomk(0.1, shared=False)", "int8"),
    "choco(torus, gamma=0.1)": CONTRACTIONS,
    "choco(one_peer_exponential)": ("fp32", "sign", "topk(0.1)"),
    "choco(social)": ("sign", "topk(0.1)"),
    "deepsqueeze(ring, gamma=0.02)": CONTRACTIONS,
    "dcd(ring)": ("fp32", "qsgd", "natural"),
    "dcd(ring, allow_biased=True)": ("sign", "topk(0.5)", "bf16"),
    "ecd(ring)": ("fp32", "qsgd(levels=32767)"),
    "powergossip(ring)": (None,),
    "powergossip(torus, iterations=2)": (None,),
    "centralized": CASTS,
}
CASES = [(spec, codec) for spec, codecs in METHODS.items() for codec in codecs]


@pytest.mark.parametrize(("spec", "codec"), CASES)
def test_replicas_converge_to_their_mean(spec: str, codec: str | None) -> None:
    ranks = 32 if "social" in spec else 8
    x = vectors(ranks)
    net, start, mean = simulated(ranks, spec, codec), spread(x), x.mean(0)
    for _ in range(30):
        x = net.mix(x)
    assert spread(x) < 0.6 * start
    if spec[:3] not in ("dcd", "ecd", "sgp"):  # two lose what the codec loses; the third keeps another mean
        loss = 0.02 if spec == "centralized" and codec != "fp32" else 1e-5  # a mean of casts, summed in 16 bits
        assert torch.allclose(x.mean(0), mean, atol=loss)


# The most noise, in units of the signal, with which a method converges; others have error feedback.
MOST_NOISE = {"dcd(ring)": 0.7, "ecd(ring)": 1e-4}
SPECS_WITH_CODECS = (
    "dpsgd(ring)",
    "sgp(ring)",
    "choco(ring)",
    "deepsqueeze(ring, gamma=0.02)",
    "dcd(ring)",
    "ecd(ring)",
    "centralized",
)


@pytest.mark.study
@pytest.mark.parametrize("spec", SPECS_WITH_CODECS)
def test_replicas_converge_with_every_accepted_codec(spec: str) -> None:
    method, accepted = gossip_method(spec), []
    for codec in CODECS.values():
        try:
            method.check(codec, method.graph.on(4))
        except ValueError:
            continue
        if fidelity(codec).noise <= MOST_NOISE.get(spec, math.inf):
            accepted.append(str(codec))
            x = vectors(4)
            net, start = BatchedGossip(Vector(), 4, method, codec), spread(x)
            for _ in range(25):
                x = net.mix(x)
            assert spread(x) < 0.99 * start, codec
    assert len(accepted) > 1, accepted


def fidelity(codec: Codec) -> Fidelity:
    return auto_gamma.noise_fidelity(codec, Segments(("x",), ((LENGTH,),)))


def test_push_sum_finds_the_mean_on_an_uneven_graph() -> None:
    x = vectors(8)
    net, mean = (
        simulated(8, "sgp(arrows([(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7), (7, 0), (0, 3), (5, 1)]))"),
        x.mean(0),
    )
    for _ in range(150):
        x = net.mix(x)
    assert torch.allclose(x, mean.expand_as(x), atol=1e-5)


@pytest.mark.parametrize("spec", ["ring", "torus", "star", "exponential", "one_peer_exponential"])
@pytest.mark.parametrize("method", ["dpsgd", "sgp"])
def test_dense_gossip_converges_as_the_theorem_says(method: str, spec: str) -> None:
    topology = graph(spec).on(8)
    factor = dense_factor(topology)
    x = vectors(8)
    net = simulated(8, f"{method}({spec})")
    for _ in range(3):
        before = spread(x)
        for _ in range(topology.period):
            x = net.mix(x)
        assert spread(x) <= factor**2 * before * (1 + 1e-6) + 1e-8


@pytest.mark.parametrize(("codec", "delta"), [("fp32", 1.0), ("topk(0.25)", 0.25), ("randomk(0.5)", 0.5)])
@pytest.mark.parametrize("spec", ["ring", "torus"])
def test_choco_converges_as_the_theorem_says(spec: str, codec: str, delta: float) -> None:
    """The theorem's error, disagreement plus what neighbors do not know yet, shrinks by its factor a round."""
    topology = graph(spec).on(8)
    gamma, factor = theory.consensus_step(topology, delta), theory.consensus_factor(topology, delta)
    x, errors = vectors(8), []
    net = simulated(8, f"choco({spec}, gamma={gamma!r})", codec, granularity="model")
    for _ in range(30):
        before, x = x, net.mix(x)
        known = torch.stack([node.memory["x_hat"] for node in net.nodes])
        errors.append(spread(before) + float((before - known).square().sum()))
    for rounds, error in enumerate(errors):
        assert error <= factor**rounds * errors[0]


@pytest.mark.parametrize("spec", [spec for spec in METHODS if "social" not in spec and "arrows" not in spec])
def test_a_single_rank_keeps_its_parameters(spec: str) -> None:
    x = vectors(1)
    codec = {"dcd": "fp32", "ecd": "fp32"}.get(spec[:3])
    assert torch.allclose(simulated(1, spec, codec).mix(x), x, atol=1e-6)


@pytest.mark.parametrize("spec", [spec for made in gradwire.registered("gossip").values() for spec in made.examples])
def test_a_method_is_read_as_it_is_written(spec: str) -> None:
    assert gossip_method(str(gossip_method(spec))) == gossip_method(spec)


def test_gamma_is_chosen_by_default() -> None:
    assert gossip_method("choco(ring, gamma=auto)") == gossip_method("choco(ring)")


def test_zeros_have_the_same_sign_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact zeros, as in embeddings of absent words, decode to plus at the receivers; senders must count them so."""
    monkeypatch.setattr(lockstep, "cached", nullcontext)  # as ranks that decode what they are sent
    net = simulated(4, "deepsqueeze(ring)", "sign")
    x = vectors(4)
    x[:, ::2] = 0.0
    mean, group = x.mean(0), Lockstep(4)
    for _ in range(10):
        protocols = [interleave([node.run(row)]) for node, row in zip(net.nodes, x, strict=True)]
        x = torch.stack([mixed for (mixed,) in group.drive(protocols)])
    assert torch.allclose(x.mean(0), mean, atol=1e-5)


def test_positions_beyond_float32_integers() -> None:
    """Indices are integers: float32 would move every odd position beyond 2**24 to its neighbor."""
    from gradwire.codecs import codec
    from gradwire.codecs.stage import EncodeInput
    from gradwire.core.keys import Key
    from gradwire.core.segments import Segments

    n = 2**24 + 8
    x = torch.zeros(n)
    x[-7] = 1.0
    table = Segments.single(n)
    encoded = codec("topk(0.0000001)").encode(EncodeInput(x, x, {}, table), Key(0, 0, 0))
    assert encoded.sent.indices is not None
    assert n - 7 in codec("topk(0.0000001)").decoder.entries([encoded.payload], table, [Key(0, 0, 0)]).indices.tolist()


@pytest.mark.parametrize(
    ("spec", "floats"),
    [
        ("dpsgd(ring)", 0),
        ("choco(ring, gamma=0.5)", 2),
        ("choco(complete, gamma=0.5)", 2),
        ("choco(one_peer_exponential, gamma=0.5)", 6),  # three out-neighbors, three in-neighbors
    ],
)
def test_memory_is_two_vectors_whatever_the_degree_of_a_static_graph(spec: str, floats: int) -> None:
    net = simulated(8, spec)
    net.mix(vectors(8))
    assert net.report().memory_floats == floats
    assert net.nodes[0].tensors.total == LENGTH
