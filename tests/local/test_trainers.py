"""Handles that trainers call: one for each optimizer, and steps that a GradScaler skips."""

import pytest
import torch
import torch.distributed as dist

import fixtures
import gradwire
from gradwire.integrations.entry_point import TRANSFORMERS
from gradwire.integrations.local.trainers import local_prepared
from spawn import run_ranks


def test_a_second_training_with_the_same_optimizer_has_one_handle() -> None:
    """A Trainer keeps its optimizer; the rounds of an earlier handle would set the model back."""
    net = fixtures.model()
    optimizer = fixtures.sgd(net)
    first = local_prepared(TRANSFORMERS, net, [optimizer], "diloco(H=2)")
    optimizer.step()
    second = local_prepared(TRANSFORMERS, net, [optimizer], "diloco(H=2)")
    optimizer.step()
    assert (first.steps, second.steps) == (1, 1)


def closed(rank: int, world: int) -> tuple[int, list[bool]]:
    """After a round and its end, a step of the same optimizer, and one of a wire. An earlier handle ends first."""
    model = fixtures.ddp(fixtures.model())
    optimizer, scaler = fixtures.sgd(model), torch.amp.GradScaler("cpu", init_scale=4.0)
    earlier = local_prepared(TRANSFORMERS, model, [optimizer], "local_sgd(H=2)", scaler)
    outer = local_prepared(TRANSFORMERS, model, [optimizer], "local_sgd(H=2)", scaler)
    earlier.close()
    averaged = []
    for step in range(4):
        if step == 2:
            outer.close()
        elif step == 3:
            gradwire.compress(model, "topk(0.1)", scaler=scaler)
        optimizer.zero_grad()
        scaler.scale(fixtures.loss(model, rank, step)).backward()
        averaged.append(fixtures.same_on_all_ranks(model.module[0].weight.grad))
        scaler.step(optimizer)
        scaler.update()
    return outer.steps, averaged


def test_what_is_closed_is_called_no_longer_and_ddp_averages_again() -> None:
    assert run_ranks(closed, 2) == [(2, [False, False, True, True])] * 2


@pytest.mark.parametrize("trainings", [1, 2])
def test_steps_that_a_scaler_skips_count(trainings: int) -> None:
    """Or a rank that skips one would come to fewer rounds than the others."""
    net = fixtures.model()
    optimizer, scaler = fixtures.sgd(net), torch.amp.GradScaler("cpu", init_scale=4.0)
    handles = [local_prepared(TRANSFORMERS, net, [optimizer], "diloco(H=2)", scaler) for _ in range(trainings)]
    for step in range(4):
        optimizer.zero_grad()
        (scaler.scale(fixtures.loss(net, 0, step)) * (float("inf") if step == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert [(one.steps, one.report().rounds.steps) for one in handles] == [(0, 0)] * (trainings - 1) + [(4, 2)]
    assert all(bool(p.isfinite().all()) for p in net.parameters())


def in_a_start(rank: int, world: int, door: str) -> tuple[float, list[torch.Tensor]]:
    """Three steps of a start, in the second of which a gradient of rank 1 is not finite."""
    net = fixtures.model()
    optimizer, scaler = fixtures.sgd(net), torch.amp.GradScaler("cpu", init_scale=4.0)
    spec = "diloco(H=2, start=3, first=fp32)"
    if door == "trainer":
        local_prepared(TRANSFORMERS, net, [optimizer], spec, scaler)
    elif door == "loop":
        outer = gradwire.local(net, optimizer, spec, scaler=scaler)
    for step in range(3):
        optimizer.zero_grad()
        (scaler.scale(fixtures.loss(net, rank, step)) * (float("inf") if step == rank == 1 else 1.0)).backward()
        if door == "loop":
            outer.average_gradients()
        elif door == "all-reduce":
            for p in net.parameters():
                dist.all_reduce(p.grad)
                p.grad /= world
        scaler.step(optimizer)
        scaler.update()
        if door == "loop":
            outer()
    return scaler.get_scale(), [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("door", ["trainer", "loop"])
def test_in_a_start_all_scalers_skip_a_step_and_back_off(door: str) -> None:
    (expected, weights), *_ = run_ranks(in_a_start, 2, "all-reduce")
    for scale, found in run_ranks(in_a_start, 2, door):
        assert scale == expected == 2.0
        for mine, x in zip(found, weights, strict=True):
            torch.testing.assert_close(mine, x, rtol=1e-6, atol=1e-7)


def test_a_step_under_a_scaler_wants_averaged_gradients() -> None:
    """The optimizer's step comes too late: the scaler of one rank may leave it out."""
    net = fixtures.model()
    optimizer, scaler = fixtures.sgd(net), torch.amp.GradScaler("cpu", init_scale=4.0)
    outer = gradwire.local(net, optimizer, "diloco(H=2, start=3)", scaler=scaler)
    scaler.scale(fixtures.loss(net, 0, 0)).backward()
    with pytest.raises(RuntimeError, match="average_gradients"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="average_gradients"):
        outer()


def test_a_scaler_that_the_start_was_not_given_is_refused() -> None:
    """It would find zeros where gradients overflow, and never back off."""
    net = fixtures.model()
    optimizer, scaler = fixtures.sgd(net), torch.amp.GradScaler("cpu", init_scale=4.0)
    outer = gradwire.local(net, optimizer, "diloco(H=2, start=3)")
    scaler.scale(fixtures.loss(net, 0, 0)).backward()
    outer.average_gradients()
    with pytest.raises(ValueError, match="scaler=scaler"):
        scaler.step(optimizer)


def test_trainers_refuse_rounds_of_unlike_length_and_no_optimizer() -> None:
    net = fixtures.model()
    with pytest.raises(ValueError, match="uneven=True"):
        local_prepared(TRANSFORMERS, net, [fixtures.sgd(net)], "diloco(H=2)", uneven=True)
    with pytest.raises(ValueError, match="no prepared optimizer"):
        local_prepared(TRANSFORMERS, net, [], "diloco(H=2)")
