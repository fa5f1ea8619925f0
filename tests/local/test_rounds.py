"""Rounds of local steps: identities, the presets against their recursions, and what is owed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fixtures
import gradwire
import local_fixtures
from local_fixtures import train

WORLD = 4


def local_replicas(spec: str, world: int = WORLD, *others: Any, **options: Any) -> tuple[Any, ...]:
    return local_fixtures.local_replicas(spec, world, *others, **options)


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def muon(net: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, others = ([p for p in net.parameters() if (p.dim() == 2) is wanted] for wanted in (True, False))
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]


def momentum(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def flat(tensors: Any) -> Tensor:
    return torch.cat([x.detach().flatten() for x in tensors])


def weights(net: nn.Module) -> Tensor:
    return flat(net.parameters())


# -- identities --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [adamw, momentum])
def test_one_worker_with_exact_rounds_trains_as_without_any(make: Any) -> None:
    nets, optimizers, outer = local_replicas("local_sgd(H=3)", 1, make)
    plain = fixtures.model()
    optimizer = make(plain)
    for step in range(12):
        optimizer.zero_grad()
        fixtures.loss(plain, 0, step).backward()
        optimizer.step()
    train(nets, optimizers, outer, range(12))
    torch.testing.assert_close(weights(nets[0]), weights(plain), rtol=0, atol=1e-6)


def test_exact_rounds_after_every_step_are_synchronous_sgd() -> None:
    nets, optimizers, outer = local_replicas("local_sgd(H=1)")
    plain = fixtures.model()
    optimizer = fixtures.sgd(plain)
    for step in range(8):
        optimizer.zero_grad()
        (sum(fixtures.loss(plain, rank, step) for rank in range(WORLD)) / WORLD).backward()
        optimizer.step()
    train(nets, optimizers, outer, range(8))
    for net in nets:
        torch.testing.assert_close(weights(net), weights(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [adamw, momentum])
def test_inner_optimizers_keep_their_own_state(make: Any) -> None:
    """A round changes weights alone; the moments are those of this worker's own gradients."""
    nets, optimizers, outer = local_replicas("diloco(H=2)", 2, make)
    train(nets, optimizers, outer, range(1))
    before = [flat(s for state in opt.state_dict()["state"].values() for s in state.values()) for opt in optimizers]
    assert not torch.equal(before[0], before[1])
    outer()  # a round without a step
    after = [flat(s for state in opt.state_dict()["state"].values() for s in state.values()) for opt in optimizers]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert torch.equal(weights(nets[0]), weights(nets[1]))


# -- recursions --------------------------------------------------------------------------------------------------------


def restated(
    H: int, rounds: int, agree: Any, steps_before: int = 0, kept: Any = lambda rank: 0.0, make: Any = adamw
) -> Tensor:
    """Outer weights after so many rounds of inner steps, by ``agree(weights, differences by worker)``.

    Workers begin a round at the outer weights less what they have ``kept``.
    """
    nets = [fixtures.model() for _ in range(WORLD)]
    optimizers = [part for net in nets for part in (make(net) if make is muon else [make(net)])]
    w = weights(nets[0])
    for step in range(steps_before + H * rounds):
        for rank, net in enumerate(nets):
            net.zero_grad()
            fixtures.loss(net, rank, step).backward()
        if step < steps_before:
            for ps in zip(*(net.parameters() for net in nets), strict=True):
                mean = torch.stack([p.grad for p in ps]).mean(0)
                for p in ps:
                    p.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
        if step < steps_before:
            w = weights(nets[0])
        elif (step + 1 - steps_before) % H == 0:
            w = agree(w, torch.stack([w - kept(rank) - weights(net) for rank, net in enumerate(nets)]))
            for rank, net in enumerate(nets):
                nn.utils.vector_to_parameters(w - kept(rank), net.parameters())
    return w


def outer_weights(spec: str, steps: int, make: Any = adamw, **options: Any) -> Tensor:
    nets, optimizers, outer = local_replicas(spec, WORLD, make, **options)
    train(nets, optimizers, outer, range(steps))
    assert all(torch.equal(weights(net), weights(nets[0])) for net in nets)
    assert torch.equal(flat(outer.ranks[0].outer.weights.values()), weights(nets[0]))
    return weights(nets[0])


def test_local_sgd_is_the_mean_of_the_weights() -> None:
    expected = restated(3, 4, lambda w, d: w - d.mean(0))
    torch.testing.assert_close(outer_weights("local_sgd(H=3)", 12), expected, rtol=1e-5, atol=1e-6)


def test_post_local_sgd_averages_gradients_first() -> None:
    expected = restated(3, 2, lambda w, d: w - d.mean(0), steps_before=4)
    torch.testing.assert_close(outer_weights("post_local_sgd(H=3, start=4)", 10), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "mu", "make", "atol"), [("diloco", 0.9, adamw, 1e-5), ("muloco", 0.6, muon, 5e-4)])
def test_diloco_and_muloco_are_nesterov_on_the_mean_difference(name: str, mu: float, make: Any, atol: float) -> None:
    """Muon computes in bfloat16, which rounds differences up."""
    buffer = torch.zeros(())

    def agree(w: Tensor, d: Tensor) -> Tensor:
        nonlocal buffer
        g = d.mean(0)
        buffer = mu * buffer + g
        return w - 0.7 * (g + mu * buffer)

    expected = restated(3, 4, agree, make=make)
    torch.testing.assert_close(outer_weights(f"{name}(H=3)", 12, make), expected, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
def test_sparseloco_sends_signs_of_the_largest_and_averages_over_senders(keep: float) -> None:
    k, chunk, decay = 4, 32, 0.95
    sizes = [p.numel() for p in fixtures.model().parameters()]
    errors = [torch.zeros(sum(sizes)) for _ in range(WORLD)]

    def sent(target: Tensor) -> Tensor:
        out = torch.zeros_like(target)
        for layer, o in zip(target.split(sizes), out.split(sizes), strict=True):
            for x, y in zip(layer.split(chunk), o.split(chunk), strict=True):
                chosen = x.abs().topk(min(k, x.numel())).indices
                y[chosen] = x[chosen].sign() * x[chosen].abs().mean()
        return out

    def agree(w: Tensor, d: Tensor) -> Tensor:
        targets = [decay * e + one for e, one in zip(errors, d, strict=True)]
        messages = torch.stack([sent(target) for target in targets])
        errors[:] = [target - one for target, one in zip(targets, messages, strict=True)]
        return w - messages.sum(0) / (messages != 0).sum(0).clamp(min=1)

    expected = restated(3, 4, agree, kept=lambda rank: keep * errors[rank])
    nets, optimizers, outer = local_replicas(
        f"sparseloco(H=3, k={k}, chunk={chunk}, keep={keep})", WORLD, adamw, bundle=None
    )
    train(nets, optimizers, outer, range(12))
    for net, error, rank in zip(nets, errors, outer.ranks, strict=True):
        (fragment,) = rank.fragments
        mine = fragment.errors()  # of each rank, what it has put in less what it has sent
        torch.testing.assert_close(flat(mine[name] for name, _ in net.named_parameters()), error, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(weights(net), expected - keep * error, rtol=1e-4, atol=1e-5)
        with rank.averaged():
            torch.testing.assert_close(weights(net), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(weights(net), expected - keep * error, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("other", ["alpha=0.5", "delay=1"])
def test_kept_errors_refuse_rounds_that_do_not_end_at_once(other: str) -> None:
    with pytest.raises(ValueError, match=f"keep=1.0 .* ends; leave {other} out$"):
        gradwire.parse(f"sparseloco(H=3, keep=1.0, {other})")


def test_the_rate_is_applied_once() -> None:
    expected = restated(2, 3, lambda w, d: w - 0.5 * d.mean(0))
    mine = outer_weights("local_sgd(H=2, rate=0.5)", 6)
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


def test_a_delayed_message_is_applied_after_some_steps_of_the_next_round() -> None:
    nets = [fixtures.model() for _ in range(WORLD)]
    optimizers = [adamw(net) for net in nets]
    w, buffer, g = weights(nets[0]), torch.zeros(()), torch.zeros(())
    for step in range(12):
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            optimizer.zero_grad()
            fixtures.loss(net, rank, step).backward()
            optimizer.step()
        if step >= 4 and (step - 4) % 3 == 0:  # two steps after a message
            buffer = 0.9 * buffer + g
            w = w - 0.7 * (g + 0.9 * buffer)
            for net in nets:
                nn.utils.vector_to_parameters(0.25 * weights(net) + 0.75 * w, net.parameters())
        if step % 3 == 2:
            g = torch.stack([w - weights(net) for net in nets]).mean(0)
    mine, own, outer = local_replicas("diloco(H=3, alpha=0.25, delay=2)", WORLD, adamw)
    train(mine, own, outer, range(12))
    for net, expected in zip(mine, nets, strict=True):
        torch.testing.assert_close(weights(net), weights(expected), rtol=1e-4, atol=1e-5)


def test_any_optimizer_may_step_the_outer_weights() -> None:
    outer = lambda parameters: torch.optim.Adam(parameters, lr=0.02)  # noqa: E731
    w = nn.Parameter(weights(fixtures.model()))
    adam = torch.optim.Adam([w], lr=0.02)

    def agree(_: Tensor, d: Tensor) -> Tensor:
        w.grad = d.mean(0)
        adam.step()
        return w.detach().clone()

    expected = restated(3, 3, agree)
    torch.testing.assert_close(outer_weights("local_sgd(H=3)", 9, outer=outer), expected, rtol=1e-4, atol=1e-5)


def test_workers_keep_a_share_of_their_own_weights() -> None:
    nets, optimizers, outer = local_replicas("local_sgd(H=2, alpha=0.5)", 2)
    train(nets, optimizers, outer, range(1))
    for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
        optimizer.zero_grad()
        fixtures.loss(net, rank, 1).backward()
        optimizer.step()
    before = [weights(net) for net in nets]
    outer()
    mean = (before[0] + before[1]) / 2
    for net, own in zip(nets, before, strict=True):
        torch.testing.assert_close(weights(net), (own + mean) / 2, rtol=1e-5, atol=1e-6)


# -- errors, overflow, buffers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("codec", "feedback"), [("topk(0.1) | sign", "residual"), ("int2", "residual")])
def test_what_was_sent_and_what_is_owed_is_what_was_put_in(codec: str, feedback: str) -> None:
    nets, optimizers, outer = local_replicas("local_sgd(H=2)", 1, codec=codec, feedback=feedback, bundle=None)
    (rank,) = outer.ranks
    put_in, before = torch.zeros(()), flat(rank.outer.weights.values())
    differences = rank.outer.differences

    def recorded(names: Any) -> Any:
        nonlocal put_in
        found = differences(names)
        put_in = put_in + flat(found.values())
        return found

    rank.outer.differences = recorded
    train(nets, optimizers, outer, range(8))
    sent = before - flat(rank.outer.weights.values())  # one worker: the mean is what it sent
    owed = flat(rank.wire.debts()[name] for name, _ in nets[0].named_parameters())
    assert float(owed.abs().max()) > 0
    torch.testing.assert_close(sent + owed, put_in, rtol=1e-4, atol=1e-5)


def test_a_difference_that_is_not_finite_drops_the_round_on_all_ranks() -> None:
    nets, optimizers, outer = local_replicas("sparseloco(H=2, k=4, chunk=32)")
    train(nets, optimizers, outer, range(4))
    before = flat(outer.ranks[0].outer.weights.values())
    owed = [fixtures.memories(rank.wire) for rank in outer.ranks]
    with torch.no_grad():
        nets[2][0].weight[1, 1] = float("nan")
    outer()
    outer()
    assert [rank.skipped for rank in outer.ranks] == [1] * WORLD
    for net, rank, error in zip(nets, outer.ranks, owed, strict=True):
        assert torch.equal(weights(net), before)
        assert fixtures.same(fixtures.memories(rank.wire), error)
    train(nets, optimizers, outer, range(4, 8))
    assert not torch.equal(weights(nets[0]), before) and bool(weights(nets[0]).isfinite().all())


def test_a_dropped_round_leaves_outer_momentum_alone() -> None:
    nets, optimizers, outer = local_replicas("diloco(H=1)", 2)
    train(nets, optimizers, outer, range(2))
    before = outer.ranks[0].outer.state_dict()
    with torch.no_grad():
        nets[1][0].bias[0] = float("inf")
    outer()
    assert fixtures.same(outer.ranks[0].outer.state_dict(), before)


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))
    net.register_buffer("mask", torch.full((3,), -torch.inf))
    return net


def test_buffers_are_averaged_at_rounds() -> None:
    nets, optimizers, outer = local_replicas("local_sgd(H=2)", 3, net=normed)
    train(nets, optimizers, outer, range(1))
    means = [net[1].running_mean.clone() for net in nets]
    assert not torch.equal(means[0], means[1])
    outer()
    for net in nets:
        torch.testing.assert_close(net[1].running_mean, torch.stack(means).mean(0))
        assert int(net[1].num_batches_tracked) == 1
        assert bool((net.mask == -torch.inf).all())


def test_buffers_of_a_dropped_round_are_those_of_the_round_before() -> None:
    nets, optimizers, outer = local_replicas("local_sgd(H=1)", 2, net=normed)
    train(nets, optimizers, outer, range(2))
    good = nets[0][1].running_var.clone()
    with torch.no_grad():
        nets[1][0].weight.fill_(float("nan"))
        nets[1][1].running_var.fill_(float("nan"))
    outer()
    assert all(torch.equal(net[1].running_var, good) for net in nets)


def test_bfloat16_models_have_float32_outer_weights() -> None:
    """What bfloat16 cannot hold of the outer weights is not taken for a step of the worker."""
    nets, _, outer = local_replicas("diloco(H=1)", 2, net=lambda: fixtures.model().bfloat16())
    with torch.no_grad():
        for rank in outer.ranks:
            rank.outer.weights["0.weight"].mul_(1.0001)
    assert all(not bool(x.any()) for x in outer.ranks[0].outer.differences().values())
    before = outer.ranks[0].outer.weights["0.weight"].clone()
    outer()
    assert torch.equal(outer.ranks[0].outer.weights["0.weight"], before)
    assert nets[0][0].weight.dtype == torch.bfloat16


def test_averaged_shows_the_outer_weights_and_gives_the_own_ones_back() -> None:
    nets, optimizers, outer = local_replicas("diloco(H=3)", 2)
    train(nets, optimizers, outer, range(4))
    own, shared = weights(nets[1]), flat(outer.ranks[1].outer.weights.values())
    assert not torch.equal(own, shared)
    with outer.ranks[1].averaged():
        assert torch.equal(weights(nets[1]), shared)
    assert torch.equal(weights(nets[1]), own)
