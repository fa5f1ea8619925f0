"""Gradients of shards that become views of the buffer that captured steps read: loops get what eager steps give."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from tests.sharded_fixtures import local, mesh_of
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fixtures
import gradwire
from fake_cuda_graph import FakeCudaGraph, eager_and_captured
from gradwire.engine import staging
from spawn import Answers, cases_fixture

STEPS, CAPTURED = 14, 10  # from here on every step is replayed
Loop = Callable[[nn.Module, torch.optim.Optimizer, int], None]


class Trained(NamedTuple):
    """What a loop leaves.

    Attributes:
        kept: By step: whether gradients that the loop has kept are still what they were then.
        in_buffer: By bucket: whether the last gradients lay where captured work reads them.
        copies: In the last step: calls that copy gradients to buffers, or updates from there.
        made: Graphs.
    """

    parameters: dict[str, Tensor]
    memories: dict[str, Tensor]
    gradients: dict[str, Tensor]
    kept: list[bool]
    in_buffer: list[bool]
    copies: int
    made: int


def net() -> nn.Module:
    """A net of two buckets, with a parameter of one row, of which one shard has none."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    return model


def backward(model: nn.Module, seed: int) -> None:
    inputs = fixtures.batch(seed, 0).to(next(model.parameters()).dtype)
    model(inputs).float().square().mean().backward()


def to_none(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    backward(model, seed)


def to_zero(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad(set_to_none=False)
    backward(model, seed)


def later_to_zero(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Gradients stay in the buffer once they are there."""
    optimizer.zero_grad(set_to_none=seed % 1000 < 10 * CAPTURED)
    backward(model, seed)


def later_never(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    (to_none if seed % 1000 < 10 * CAPTURED else never)(model, optimizer, seed)


def never(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Every backward pass exchanges what has added up so far."""
    backward(model, seed)


def some_to_none(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    for p in model.parameters():
        if p.dim() > 1:
            p.grad = None
        elif p.grad is not None:
            p.grad.zero_()
    backward(model, seed)


def second_pass(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    to_none(model, optimizer, seed)
    backward(model, seed + 1)


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    to_none(model, optimizer, seed)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def replaced(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """A loop that assigns gradients of its own, and lets the next ones add to them."""
    backward(model, seed)
    for p in model.parameters():
        p.grad = p.grad * 0.5


def accumulated(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    for part in range(3):
        model.set_requires_all_reduce(part == 2)
        backward(model, seed + part)


def accumulated_in_place(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad(set_to_none=False)
    for part in range(3):
        model.set_requires_gradient_sync(part == 2)
        backward(model, seed + part)


LOOPS: dict[str, Loop] = {
    one.__name__: one
    for one in (
        *(to_none, to_zero, later_to_zero, never, later_never, some_to_none, second_pass, clipped, replaced),
        *(accumulated, accumulated_in_place),
    )
}
KEEPERS: dict[str, Callable[[Tensor], Tensor]] = {
    "gradients": lambda grad: grad,
    "parts": local,
    "detached": lambda grad: grad.detach(),
    "slices": lambda grad: local(grad)[:1],
}
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CASES: dict[str, dict[str, Any]] = {
    **{name: {"loop": name} for name in LOOPS},
    **{f"keeps {name}": {"keeps": name} for name in KEEPERS},
    "keeps gradients of one step": {"keeps": "gradients", "steps": (CAPTURED,)},
    "two_way": {"spec": "int4", "exchange": "two_way"},
    "without rollback": {"spec": "int4", "exchange": "two_way", "rollback": False},
    "mixed precision": {"policy": HALF},
    "half": {"dtype": torch.bfloat16},
}


def train(
    rank: int,
    loop: str = "to_none",
    keeps: str = "",
    steps: Any = range(STEPS),
    dtype: torch.dtype = torch.float32,
    policy: MixedPrecisionPolicy | None = None,
    spec: str = "topk(0.1) | int32",
    **options: Any,
) -> Trained:
    model, mesh, made = net().to(dtype), mesh_of(2, 2), FakeCudaGraph.made
    fully_shard(model, mesh=mesh["shard"], mp_policy=policy or MixedPrecisionPolicy(cast_forward_inputs=True))
    wire = gradwire.compress(model, spec, across=mesh["replicate"], bucket_mb=fixtures.BUCKET_MB, **options)
    wire.link.stream_ordered = True
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    kept: list[list[tuple[Tensor, Tensor]]] = []
    with counted_copies() as copies:
        for step in range(STEPS):
            copies.clear()
            LOOPS[loop](model, optimizer, 1000 * rank + 10 * step)
            if keeps and step in steps:
                found = [KEEPERS[keeps](p.grad) for p in model.parameters() if p.grad is not None]
                kept.append([(x, local(x).clone()) for x in found])
            number = len(copies)
            optimizer.step()
    named = dict(model.named_parameters())
    parts = {name: local(p.grad).clone() for name, p in named.items() if p.grad is not None}
    in_buffer = [
        bucket.staging is not None
        and [local(named[name].grad).data_ptr() for name in bucket.staging.names]
        == [x.data_ptr() for view in bucket.staging.views for x in view.grads]
        for bucket in wire.executor._buckets
    ]
    return Trained(
        {name: local(p.detach()).clone() for name, p in named.items()},
        fixtures.memories(wire),
        parts,
        [all(torch.equal(local(now), then) for now, then in pairs) for pairs in kept],
        in_buffer,
        number,
        FakeCudaGraph.made - made,
    )


@contextmanager
def counted_copies() -> Iterator[list[None]]:
    """A list of copies to and from buffers."""
    copy, calls = torch._foreach_copy_, list[None]()

    def counted(*args: Any) -> Any:
        if sys._getframe(1).f_code.co_filename == staging.__file__:
            calls.append(None)
        return copy(*args)

    torch._foreach_copy_ = counted
    try:
        yield calls
    finally:
        torch._foreach_copy_ = copy


def both(rank: int, world: int, case: dict[str, Any]) -> tuple[Trained, Trained]:
    return eager_and_captured(lambda: train(rank, **case))


answers = cases_fixture(both, 4, CASES)


@pytest.mark.parametrize("case", CASES)
def test_loops_get_what_eager_steps_give(answers: Answers, case: str) -> None:
    for eager, captured in answers[case]:
        assert eager.made == 0 and captured.made > 0
        for mine, other in zip(captured[:3], eager[:3], strict=True):
            assert fixtures.same(mine, other)


@pytest.mark.parametrize("case", [case for case in CASES if "keeps" in case])
def test_gradients_that_a_loop_keeps_stay_what_they_were(answers: Answers, case: str) -> None:
    for eager, captured in answers[case]:
        assert len(captured.kept) == len(eager.kept) > 0
        assert all(eager.kept) and all(captured.kept)
        assert not any(captured.in_buffer)


IN_BUFFER = {  # and copies of each bucket
    **dict.fromkeys(("to_none", "clipped", "accumulated", "two_way", "without rollback", "mixed precision"), 1),
    **dict.fromkeys(("later_to_zero", "later_never"), 0),
}


@pytest.mark.parametrize("case", IN_BUFFER)
def test_gradients_lie_where_captured_steps_read_them(answers: Answers, case: str) -> None:
    """So nothing is copied back: each bucket is copied once, or never where gradients stay there."""
    for _, captured in answers[case]:
        assert all(captured.in_buffer)
        assert captured.copies == IN_BUFFER[case] * len(captured.in_buffer)


@pytest.mark.parametrize("case", ["half", "to_zero"])
def test_other_gradients_stay_where_they_are(answers: Answers, case: str) -> None:
    """Those of another format are copied to the buffer and back; those at fixed addresses need no buffer."""
    for _, captured in answers[case]:
        assert not any(captured.in_buffer)
        assert captured.copies == (2 * len(captured.in_buffer) if case == "half" else 0)
