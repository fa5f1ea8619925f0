"""Local steps on a GPU: outer weights that lie in the host's memory, and a group of CPU and GPU workers."""

from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire
from fixtures import batch, model
from spawn import Answers, cases_fixture, run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

Weights = dict[str, Tensor]
ROUNDS = ("sparseloco(H=2)", "diloco(H=2)", "diloco(H=2, alpha=0.5, delay=1)")


def train(spec: str, device: str, rank: int = 0, **options: Any) -> tuple[Any, Weights]:
    """Three rounds: the handle, and the model's weights."""
    net = model().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    outer = gradwire.local(net, optimizer, spec, **options)
    while outer.report().rounds.steps < 3:
        optimizer.zero_grad()
        net(batch(rank, outer.steps).to(device)).square().mean().backward()
        optimizer.step()
        outer()
    return outer, {name: p.detach().cpu() for name, p in net.named_parameters()}


@pytest.mark.parametrize("spec", ROUNDS)
def test_outer_weights_in_pinned_memory_of_the_host(spec: str) -> None:
    there, moved = train(spec, "cuda", outer_device="cpu")
    here, expected = train(spec, "cuda")
    for name, weight in there.outer.weights.items():
        assert weight.device.type == "cpu" and weight.is_pinned()
        assert here.outer.weights[name].is_cuda
        torch.testing.assert_close(weight.detach(), here.outer.weights[name].detach().cpu(), rtol=0, atol=1e-7)
        torch.testing.assert_close(moved[name], expected[name], rtol=0, atol=1e-6)


def refused(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="device cuda"):
        gradwire.compress(model().to("cpu" if rank else "cuda"), "int8")


def test_gradients_of_a_cpu_and_a_gpu_are_refused() -> None:
    run_ranks(refused, 2)


def mixed(rank: int, world: int, case: tuple[str, dict[str, Any]]) -> tuple[set[str], Weights]:
    """Rank 0 has a GPU, rank 1 has none."""
    spec, options = case
    outer, _ = train(spec, "cpu" if rank else "cuda", rank, **options)
    weights = outer.outer.weights
    return {x.device.type for x in weights.values()}, {name: x.detach().cpu() for name, x in weights.items()}


CASES = {spec: (spec, {}) for spec in ROUNDS} | {
    "start": ("sparseloco(H=2, start=2)", {}),
    "int4": ("diloco(H=2)", {"codec": "int4"}),
    "by speed": ("sparseloco(H=4)", {"uneven": True}),
}
answers = cases_fixture(mixed, 2, CASES, timeout=110)


@pytest.mark.parametrize("case", CASES)
def test_a_cpu_and_a_gpu_worker_agree(case: str, answers: Answers) -> None:
    (with_gpu, first), (without, second) = answers[case]
    assert (with_gpu, without) == ({"cuda"}, {"cpu"}) and first.keys() == second.keys()
    for name, weight in first.items():
        torch.testing.assert_close(weight, second[name], rtol=0, atol=0)
