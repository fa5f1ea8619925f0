"""Inner optimizers: which ones `local` takes, and which it refuses."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import fixtures
import gradwire
from local_fixtures import local_replicas


def two_optimizers(net: nn.Module) -> list[torch.optim.Optimizer]:
    first, second = ([p for p in net.parameters() if (p.dim() == 2) is wanted] for wanted in (True, False))
    return [torch.optim.SGD(first, lr=0.1), torch.optim.AdamW(second, lr=0.01)]


def test_an_optimizer_of_another_model_is_refused() -> None:
    net, other = fixtures.model(), fixtures.model()
    with pytest.raises(ValueError, match=r"SGD steps no parameter of this model.*model\.parameters\(\)"):
        gradwire.local(net, fixtures.sgd(other), "diloco(H=2)")
    with pytest.raises(ValueError, match="SGD steps no parameter"):
        gradwire.local(net, [*two_optimizers(net), fixtures.sgd(other)], "diloco(H=2)")
    with pytest.raises(ValueError, match="SGD steps no parameter"):
        gradwire.local_lockstep([net, other], [fixtures.sgd(net), fixtures.sgd(net)], "diloco(H=2)")


def test_a_forgotten_optimizer_is_told_where_it_belongs() -> None:
    net, local, lockstep = fixtures.model(), gradwire.local, gradwire.local_lockstep
    remedy = r"not 'diloco\(H=2\)'; write gradwire\.local\(model, optimizer, 'diloco\(H=2\)'\)"
    with pytest.raises(TypeError, match=remedy):
        local(net, "diloco(H=2)")  # type: ignore[call-arg, arg-type]
    with pytest.raises(TypeError, match=remedy):
        local(net, "diloco(H=2)", fixtures.sgd(net))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"gradwire\.local_lockstep\(models, optimizers, 'diloco\(H=2\)'\)"):
        lockstep([net], "diloco(H=2)")  # type: ignore[call-arg, arg-type]


@pytest.mark.parametrize("first", ["compress", "local"])
def test_one_rank_refuses_a_wire_and_local_steps_as_two_do(first: str) -> None:
    net = fixtures.model()
    calls = {
        "compress": lambda: gradwire.compress(net, "int4"),
        "local": lambda: gradwire.local(net, fixtures.sgd(net), "diloco(H=2)"),
    }
    earlier = calls.pop(first)()
    with pytest.raises(ValueError, match="local steps"):
        next(iter(calls.values()))()
    assert earlier.report()


def test_a_start_wants_all_optimizers() -> None:
    """One that it does not know would step by the gradients of this rank alone."""
    net = fixtures.model()
    both = two_optimizers(net)
    with pytest.raises(ValueError, match=r"'0\.bias' is stepped by none.*as a list"):
        gradwire.local(net, both[0], "diloco(H=2, start=3)")
    assert gradwire.local(net, both, "diloco(H=2, start=3)").starting
    gradwire.local(net, both[0], "diloco(H=2)")
    for name, p in net.named_parameters():
        p.requires_grad_(not name.endswith("bias"))
    assert gradwire.local(net, both[0], "diloco(H=2, start=3)").starting


def test_a_parameter_that_begins_to_train_is_refused_at_the_next_round() -> None:
    net = fixtures.model()
    net.get_parameter("0.weight").requires_grad_(False)
    optimizer = fixtures.sgd(net)
    outer = gradwire.local(net, optimizer, "diloco(H=2)")
    for step in range(2):
        fixtures.loss(net, 0, step).backward()
        optimizer.step()
        outer()
    net.get_parameter("0.weight").requires_grad_(True)
    outer()
    with pytest.raises(RuntimeError, match=r"'0\.weight' began to train"):
        outer()


def test_steps_inside_of_averaged_are_refused() -> None:
    nets, _, outer = local_replicas("diloco(H=2)", 1)
    with outer.ranks[0].averaged(), pytest.raises(RuntimeError, match=r"averaged\(\)"):
        outer()
    outer()
    assert outer.ranks[0].steps == 1 and nets[0].training


@pytest.mark.parametrize("option", [{"uneven": True}, {"auto": True}, {"elastic": True}])
def test_replicas_of_one_process_refuse_what_needs_processes(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"leave {next(iter(option))}= out"):
        local_replicas("diloco(H=2)", 2, **option)


@pytest.mark.parametrize(("start", "raises"), [(2, True), (0, False)])
def test_a_start_refuses_optimizers_that_compute_gradients_again(start: int, raises: bool) -> None:
    """The first gradients of a step are averaged, and the others would be those of one worker."""
    net = fixtures.model()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
    outer = gradwire.local(net, optimizer, f"diloco(H=2, start={start})")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = fixtures.loss(net, 0, 0)
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="runs its closure again") if raises else nullcontext():
        optimizer.step(closure)
    if not raises:
        outer()
        assert outer.steps == 1
