"""A start in phases: steps without traffic on the same batches, and gradients by several codecs."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import fixtures
import gradwire
from local_fixtures import local_replicas, train

PHASES = "diloco(H=2, start=5, first={0: None, 2: int8, 4: int4})"


def adamw(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def same(nets: Any) -> bool:
    return all(fixtures.same(fixtures.tensors(net), fixtures.tensors(nets[0])) for net in nets)


def test_the_text_names_all_phases() -> None:
    method = gradwire.parse(PHASES)
    again = replace(method)  # is made of parts that are made already
    assert method == again and hash(method) == hash(again)
    assert str(method).endswith(
        "the first 5 steps on the same batches, from step 2 by gradients as int8, from step 4 by gradients as int4"
    )


@pytest.mark.parametrize(
    ("first", "start", "named"),
    [
        ("{1: int4}", 4, "^first={1: int4} must be a codec"),
        ("{0: int8, 4: int4}", 4, "start=4"),
        ("{0: None, 2: int4, 1: int8}", 4, "first="),
    ],
)
def test_a_table_rises_from_zero_and_ends_in_the_start(first: str, start: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        gradwire.parse(f"diloco(H=2, start={start}, first={first})")


def test_batches_are_the_same_only_where_nothing_is_sent() -> None:
    nets, optimizers, outer = local_replicas(PHASES, 3, adamw)
    found, equal = [], []
    for step in range(7):
        found.append((outer.ranks[0].same_batches, outer.ranks[0].starting, outer.ranks[0].link.traffic.sent))
        train(nets, optimizers, outer, range(step, step + 1), same=True)
        equal.append(same(nets))
    batches, starting, sent = zip(*found, strict=True)
    assert batches == (True, True, False, False, False, False, False)
    assert starting == (True, True, True, True, True, False, False)
    assert sent[1] == 0 < sent[2] < sent[3] < sent[4] < sent[5] == sent[6]
    assert equal == [True, True, True, True, True, False, True]  # a round ends with step 6


def test_weights_that_moved_apart_agree_when_gradients_are_sent_and_when_rounds_begin() -> None:
    """Workers that take batches of their own differ in weights and in momentum."""
    nets, optimizers, outer = local_replicas(PHASES, 3, adamw)
    before = torch.zeros(())
    for step in range(5):
        if step == 1:
            before = torch.stack([net[0].weight.detach() for net in nets])
        train(nets, optimizers, outer, range(step, step + 1))
        assert same(nets) == (step in (1, 4))
    assert not torch.equal(before[0], before[1])
    shared = [rank.outer.weights["0.weight"] for rank in outer.ranks]
    assert all(torch.equal(shared[0], other) for other in shared)


def test_phases_have_one_account() -> None:
    nets, optimizers, outer = local_replicas("post_local_sgd(H=2, start=4, first={0: None, 2: fp32})", 2)
    train(nets, optimizers, outer, range(8), same=True)
    report, n = outer.ranks[0].report(), 4 * sum(p.numel() for p in nets[0].parameters())
    assert report.start is not None and report.start.steps == report.start_steps == 4
    assert report.start.payload == 2 * n + 2 * 32  # two gradients, and two checksums
    assert report.start.dense == 4 * n and report.payload_ratio == 2.0
    assert report.payload_ratio_all_in == pytest.approx(8 * n / (4 * n + 64))
    assert report.sent == outer.ranks[0].link.traffic.sent


def normed() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(10, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 5))


def test_a_model_is_evaluated_with_its_own_statistics_until_a_round_has_averaged_them() -> None:
    nets, optimizers, outer = local_replicas("diloco(H=2, start=3)", 2, adamw, net=normed)
    train(nets, optimizers, outer, range(3))
    own = [net[1].running_mean.clone() for net in nets]
    assert not torch.equal(own[0], own[1])
    for steps in (range(0), range(3, 4)):
        train(nets, optimizers, outer, steps)
        for rank, net, mean in zip(outer.ranks, nets, own, strict=True):
            with rank.averaged():
                assert torch.equal(net[1].running_mean, mean)


def test_gradients_are_sent_as_the_table_says() -> None:
    nets, optimizers, outer = local_replicas("diloco(H=2, start=4, first={0: fp32, 1: None, 2: int8})", 1, bundle=None)
    n = sum(p.numel() for p in nets[0].parameters())
    payloads = []
    for step in range(4):
        train(nets, optimizers, outer, range(step, step + 1))
        payloads.append(outer.ranks[0].report().start.payload)
    first, second, third, fourth = payloads
    assert first == 4 * n and second == first + 32
    assert n < third - second < 2 * n and fourth - third == third - second + 32  # the start ends with a checksum
