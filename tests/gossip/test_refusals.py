"""Impossible combinations are refused at once, and the error names the remedy."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire
from gossip_fixtures import simulated, vectors
from gradwire.comm.backend import SingleBackend
from gradwire.core.payload import CorruptMessageError
from gradwire.gossip import Diverged

CASES = [
    ("dpsgd(ring)", "sign", "use fp32, fp16 or bf16, or choco"),
    ("sgp(ring)", "topk(0.1)", "or choco with that codec"),
    ("choco(ring)", "qsgd(levels=1)", "biased=True"),
    ("choco(ring)", "randomk(0.1, unbiased=True)", "unbiased=False"),
    ("choco(ring)", "variance", "remembers"),
    ("deepsqueeze(ring)", "terngrad", "contraction"),
    ("dcd(ring)", "sign", "allow_biased=True"),
    ("ecd(ring)", "topk(0.1)", "allow_biased=True"),
    ("powergossip(ring)", "sign", "compresses by itself"),
    ("dcd(one_peer_exponential)", "qsgd", "changes from step to step"),
    ("powergossip(exponential)", None, "is directed"),
    ("dpsgd(arrows([(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)]))", None, "use sgp"),
    ("choco(ring, gamma=0)", "sign", "in (0, 1]"),
    ("choco(ring, gamma=1.5)", "sign", "in (0, 1]"),
    ("choco(ring, gamma='fast')", "sign", "in (0, 1]"),
    ("choco(ring, gamma=True)", "sign", "in (0, 1]"),
    ("deepsqueeze(ring, gamma=-1)", "sign", "in (0, 1]"),
    ("choco(edges([(0, 1), (2, 3)]))", "sign", "disconnected"),
    ("choco(social)", "sign", "32 ranks"),
    ("choco(matrix([[0.5, 0.6, 0, 0], [0.5, 0.4, 0, 0], [0, 0, 0.5, 0.5], [0, 0, 0.5, 0.5]]))", "sign", "sums to 1.1"),
    ("choco(sign)", "sign", "is no graph"),
    ("centralized(ring)", None, "use dpsgd"),
    ("ring", None, "no gossip method"),
    ("powergossip(ring, iterations=0)", None, "from 1"),
    ("choco(ringg)", "sign", "did you mean ring"),
    ("choco", "sign", "choco needs graph, as in choco(ring)"),
    ("choco(gamma=0.5)", "sign", "choco needs graph, as in choco(ring)"),
    ("choco(ring, gamma=foo)", "sign", "gamma=foo"),
]


@pytest.mark.parametrize(("spec", "codec", "words"), CASES)
def test_impossible_specs_are_refused(spec: str, codec: str | None, words: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        simulated(4, spec, codec)
    assert words in str(caught.value)


@pytest.mark.parametrize("spec", ["sgp(ring)", "dcd(ring)", "ecd(ring)"])
def test_overlap_is_refused_for_methods_that_replace_parameters(spec: str) -> None:
    with pytest.raises(ValueError, match="leave overlap=True out"):
        simulated(4, spec, overlap=True)


def test_lockstep_refuses_options_of_processes() -> None:
    with pytest.raises(ValueError, match="no models"):
        gradwire.gossip_lockstep([], "choco(ring)", "sign")
    models = [torch.nn.Linear(2, 2) for _ in range(3)]
    with pytest.raises(ValueError, match=r"not elastic=, .* share a process"):
        gradwire.gossip_lockstep(models, "choco(ring)", "sign", elastic=True)


def test_repr_of_a_handle() -> None:
    net = gradwire.gossip_lockstep([torch.nn.Linear(2, 2) for _ in range(3)], "choco(ring)", "sign")
    net()
    assert str(net) == "<SimulatedGossip: choco(ring), codec=sign, layer; ring on 3 ranks; step 1>"


def test_invalid_granularity_and_elastic_options_are_refused() -> None:
    with pytest.raises(ValueError, match="granularity 'bucket'"):
        simulated(4, "dpsgd(ring)", granularity="bucket")
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="belong to elastic=True"):
        gradwire.gossip(model, "dpsgd(ring)", meeting="/nowhere", rank=0, world=2)
    with pytest.raises(ValueError, match="needs meeting="):
        gradwire.gossip(model, "choco(ring)", "sign", elastic=True)


@pytest.mark.parametrize(
    ("spec", "remedy"), [("dcd(ring)", "choco or dpsgd"), ("choco(one_peer_exponential)", "static graph")]
)
def test_methods_that_cannot_be_elastic_are_refused(spec: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        gradwire.gossip(torch.nn.Linear(2, 2), spec, elastic=True, meeting="/tmp", rank=0, world=4)


@pytest.mark.parametrize("elastic", [None, False, True])
def test_a_parameter_that_begins_to_train_later_is_refused(elastic: bool | None, tmp_path: Path) -> None:
    """By models of one process, by a rank, and by a rank of an elastic group."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].requires_grad_(False)
    options = {"meeting": str(tmp_path), "rank": 0, "world": 1, "elastic": True} if elastic else {}
    if elastic is None:
        net: Any = gradwire.gossip_lockstep([model, deepcopy(model)], "dpsgd(ring)")
    else:
        net = gradwire.gossip(model, "dpsgd(ring)", link=None if elastic else SingleBackend(), **options)
    net()
    model[0].weight.requires_grad_()
    with pytest.raises(RuntimeError, match=r"'0\.weight' began to train after"):
        net()
    net.close()


def test_a_message_of_another_step_is_refused() -> None:
    net = simulated(4, "dpsgd(ring)")
    net.nodes[2].step = 5
    with pytest.raises(
        CorruptMessageError, match="rank 2 sent message 0 of step 5, where message 0 of step 0 was expected"
    ):
        net.mix(vectors(4))
    net = simulated(4, "dpsgd(ring)")
    net.nodes[2].number = 7
    with pytest.raises(CorruptMessageError, match="message 7 of step 0"):
        net.mix(vectors(4))


@pytest.mark.parametrize(
    ("spec", "codec"), [("choco(ring)", "topk(0.1)"), ("dpsgd(ring)", "bf16"), ("centralized", "fp16")]
)
def test_nonfinite_parameters_raise(spec: str, codec: str) -> None:
    x = vectors(4)
    x[1, 3] = float("nan")
    with pytest.raises(Diverged, match="lower the learning rate"):
        simulated(4, spec, codec).mix(x)
