"""Fragments that are sent in turn, starts without traffic, and loops that forget a call."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fixtures
import gradwire
from local_fixtures import local_replicas, train

WORLD = 2


def adamw(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def outer_weights(spec: Any, steps: int = 13) -> dict[str, Tensor]:
    nets, optimizers, outer = local_replicas(spec, WORLD, adamw, bundle=None)
    train(nets, optimizers, outer, range(steps))
    return {name: x.detach() for name, x in outer.ranks[0].outer.weights.items()}


@pytest.mark.parametrize("spec", ["sparseloco(H=3, k=4, chunk=32)", "diloco(H=3, alpha=0.5, delay=2)"])
def test_fragments_that_are_sent_together_equal_the_whole_bit_for_bit(spec: str) -> None:
    whole = gradwire.parse(spec)
    expected = outer_weights(whole)
    for fragments in (2, ("0.*", "*")):
        assert fixtures.same(outer_weights(replace(whole, fragments=fragments, stagger=False)), expected)


def test_fragments_are_sent_in_turn_and_applied_after_their_delay() -> None:
    """A restatement: fragment 0 at the end of a round of 4, fragment 1 in the middle; each is applied a step later."""
    nets = [fixtures.model() for _ in range(WORLD)]
    optimizers = [adamw(net) for net in nets]
    parts = [["0.weight", "0.bias"], [name for name, _ in nets[0].named_parameters() if not name.startswith("0.")]]
    w = {name: p.detach().clone() for name, p in nets[0].named_parameters()}
    b = {name: torch.zeros_like(x) for name, x in w.items()}
    sent: dict[str, Tensor] = {}
    for step in range(1, 14):
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            optimizer.zero_grad()
            fixtures.loss(net, rank, step - 1).backward()
            optimizer.step()
        local = [dict(net.named_parameters()) for net in nets]
        for name, g in sent.items():
            b[name] = 0.9 * b[name] + g
            w[name] = w[name] - 0.7 * (g + 0.9 * b[name])
            for one in local:
                one[name].data = 0.5 * one[name].data + 0.5 * w[name]
        due = parts[0] if step % 4 == 0 else parts[1] if step % 4 == 2 else []
        sent = {name: sum(w[name] - one[name].detach() for one in local) / WORLD for name in due}
    mine = outer_weights("streaming_diloco(H=4, fragments=('0.*', '*'), values=fp32)")
    for name, x in w.items():
        torch.testing.assert_close(mine[name], x, rtol=1e-4, atol=1e-5)


def test_layers_are_dealt_to_fragments_and_all_are_counted() -> None:
    nets, optimizers, outer = local_replicas("streaming_diloco(H=4, fragments=2, values=fp32)", WORLD)
    train(nets, optimizers, outer, range(9))
    names = [fragment.names for fragment in outer.ranks[0].fragments]
    assert {name for part in names for name in part} == dict(nets[0].named_parameters()).keys() and all(names)
    report = outer.ranks[0].report()
    size = [sum(p.numel() for p in fragment.wire.parameters.values()) for fragment in outer.ranks[0].fragments]
    assert report.payload == 4 * 2 * sum(size)  # two messages of each
    assert report.dense == 4 * (8 * size[0] + 6 * size[1])  # the first round of the second one has two steps
    assert report.local_steps == 8 and report.skipped == 0


@pytest.mark.parametrize(
    ("fragments", "named"),
    [("0", "fragments=0"), ("99", "fragments=99"), ("('0.*',)", "no pattern"), ("('*', '0.*')", r"'0\.\*'")],
)
def test_fragments_that_do_not_fit_the_model_are_refused(fragments: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        local_replicas(f"streaming_diloco(H=4, fragments={fragments})", WORLD)


def test_a_state_of_other_fragments_is_refused() -> None:
    states = [local_replicas(f"streaming_diloco(H=4, fragments={n})", 1)[2].ranks[0] for n in (1, 2)]
    with pytest.raises(ValueError, match="2 fragments"):
        states[0].load_state_dict(states[1].state_dict())


# -- starts without traffic --------------------------------------------------------------------------------------------


def start_on_same_batches(nudge: float) -> Any:
    nets, optimizers, outer = local_replicas("diloco(H=2, start=3, first=None)", WORLD)
    for step in range(3):
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            fixtures.loss(net, 0, step).backward()
            optimizer.step()
        if step == 2:
            with torch.no_grad():
                nets[1][0].weight.add_(nudge)
        outer()
    return nets, optimizers, outer


def test_a_start_on_the_same_batches_sends_a_checksum_alone() -> None:
    nets, optimizers, outer = start_on_same_batches(0.0)
    assert fixtures.same(fixtures.tensors(nets[0]), fixtures.tensors(nets[1]))
    rank = outer.ranks[0]
    assert 0 < rank.link.traffic.sent <= 64
    train(nets, optimizers, outer, range(3, 7))
    report = rank.report()
    assert report.start_steps == 3 and report.local_steps == 4 and report.start.payload == 32
    assert report.payload_ratio == pytest.approx(2.0)
    assert report.payload_ratio_all_in == pytest.approx(7 / 2, rel=0.05)


def test_replicas_that_rounding_has_moved_apart_take_their_mean() -> None:
    nets, _, outer = start_on_same_batches(1e-3)
    assert fixtures.same(fixtures.tensors(nets[0]), fixtures.tensors(nets[1]))
    assert all(torch.equal(p, outer.ranks[1].outer.weights[name]) for name, p in nets[0].named_parameters())
    assert outer.ranks[0].report().start.payload == 32 + 4 * sum(p.numel() for p in nets[0].parameters())


# -- loops and their optimizers ----------------------------------------------------------------------------------------


def test_a_loop_that_forgets_the_handle_is_refused_at_the_second_step() -> None:
    nets, optimizers, outer = local_replicas("local_sgd(H=4)", 1)
    fixtures.loss(nets[0], 0, 0).backward()
    optimizers[0].step()
    with pytest.raises(RuntimeError, match=r"outer\(\)"):
        optimizers[0].step()
    outer()
    optimizers[0].step()
    gradwire.local_lockstep(nets, optimizers, "local_sgd(H=2)")  # replaces the other
    optimizers[0].step()


def test_muloco_wants_muon_and_takes_two_optimizers() -> None:
    nets = [fixtures.model() for _ in range(WORLD)]
    with pytest.warns(gradwire.OptimizerWarning, match="Muon"):
        gradwire.local_lockstep(nets, [fixtures.sgd(net) for net in nets], "muloco(H=2)")
    pairs = []
    for net in nets:
        matrices = [p for p in net.parameters() if p.dim() == 2]
        others = [p for p in net.parameters() if p.dim() != 2]
        pairs.append([torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)])
    outer = gradwire.local_lockstep(nets, pairs, "muloco(H=2, values=int4, start=2)")
    for step in range(6):
        for rank, net in enumerate(nets):
            net.zero_grad()
            fixtures.loss(net, rank, step).backward()
        outer.average_gradients()
        for pair in pairs:
            for optimizer in pair:
                optimizer.step()
        outer()
    assert fixtures.same(fixtures.tensors(nets[0]), fixtures.tensors(nets[1]))
    assert outer.ranks[0].report().rounds.steps == 2


def test_outer_weights_may_be_kept_elsewhere() -> None:
    """There is one device here, so that a wrong one shows where tensors are placed."""
    nets, optimizers, outer = local_replicas("diloco(H=2, alpha=0.5, delay=1)", WORLD, adamw, outer_device="cpu")
    train(nets, optimizers, outer, range(6))
    expected = local_replicas("diloco(H=2, alpha=0.5, delay=1)", WORLD, adamw)
    train(*expected, range(6))
    assert fixtures.same(outer.ranks[0].state_dict(), expected[2].ranks[0].state_dict())
    _, _, absent = local_replicas("diloco(H=2)", 1, outer_device="meta")
    assert {x.device.type for x in absent.ranks[0].outer.weights.values()} == {"meta"}


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_training_continues_after_a_fragment_that_was_not_finite(delay: int) -> None:
    """The other fragments of that worker would make the first one's gradients NaN again."""
    nets, optimizers, outer = local_replicas(f"streaming_diloco(H=4, fragments=2, delay={delay})", WORLD)
    train(nets, optimizers, outer, range(9))
    with torch.no_grad():
        nets[1][0].weight[0, 0] = float("nan")
    train(nets, optimizers, outer, range(9, 25))
    assert all(bool(p.isfinite().all()) for net in nets for p in net.parameters())
    assert 0 < outer.ranks[0].skipped == outer.ranks[1].skipped < 4


def test_a_state_of_the_first_round_has_the_age_of_each_fragment() -> None:
    """The first round of a fragment may be shorter, and a report counts the steps of each."""
    nets, optimizers, outer = local_replicas("streaming_diloco(H=6, fragments=3, delay=1)", 1)
    train(nets, optimizers, outer, range(3))
    _, _, again = local_replicas("streaming_diloco(H=6, fragments=3, delay=1)", 1)
    again.ranks[0].load_state_dict(outer.ranks[0].state_dict())
    ages = [[fragment.age for fragment in one.ranks[0].fragments] for one in (outer, again)]
    assert ages == [[3, 1, 3], [3, 1, 3]]
