"""Parameters of 16 bits mix as precisely as those of float32, and float64 is refused."""

from typing import Any

import pytest
import torch
from torch import nn

import fixtures
import gradwire
from gossip_fixtures import Vector, train
from gradwire.integrations.gossip.flat_params import FlatParams
from spawn import run_ranks

ROUNDS = 300
BF16_ROUNDING = 2.0**-8  # half the distance between two numbers near 1


@pytest.mark.parametrize(
    ("spec", "codec"),
    [("choco(ring, gamma=0.05)", "topk(0.1)"), ("dpsgd(ring)", None), ("deepsqueeze(ring, gamma=0.05)", "sign")],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_replicas_of_16_bits_come_together_and_keep_the_mean(spec: str, codec: str | None, dtype: torch.dtype) -> None:
    models = [Vector().to(dtype) for _ in range(4)]
    net = gradwire.gossip_lockstep(models, spec, codec)
    for rank, model in enumerate(models):
        nn.init.constant_(model.parts[0], 1.0 + 0.0625 * rank)
    began = net.distance()
    for _ in range(ROUNDS):
        net()
    assert net.distance() < 0.01 * began
    for model in models:
        assert (model.parts[0].float() - 1.09375).abs().max() <= BF16_ROUNDING + 1e-5


def optimized(models: list[nn.Module]) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]


class MixedFormats(nn.Module):
    """A model in bfloat16 with one layer in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.short, self.long = nn.Linear(10, 6).bfloat16(), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.long(self.short(x.bfloat16()).float())


def built(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return MixedFormats()


def test_a_resumed_run_of_mixed_formats_equals_one_that_was_not_stopped() -> None:
    models = [built(rank) for rank in range(3)]
    net = gradwire.gossip_lockstep(models, "choco(ring)", "sign")
    train(net, models, optimized(models), range(3), range(7))
    states, weights = net.state_dict(), [fixtures.tensors(model) for model in models]
    assert states[0]["float32/short.weight"].dtype == torch.float32 and "float32/long.weight" not in states[0]
    train(net, models, optimized(models), range(3), range(7, 14))

    again = [built(9) for _ in range(3)]
    other = gradwire.gossip_lockstep(again, "choco(ring)", "sign")
    other.load_state_dict(states)
    for model, weight in zip(again, weights, strict=True):
        model.load_state_dict(weight)
    train(other, again, optimized(again), range(3), range(7, 14))
    for a, b in zip(net.state_dict(), other.state_dict(), strict=True):
        assert fixtures.same(a, b)


def test_states_of_earlier_versions_have_no_copies_and_load() -> None:
    models = [built(rank) for rank in range(3)]
    net = gradwire.gossip_lockstep(models, "dpsgd(ring)")
    train(net, models, optimized(models), range(3), range(3))
    old = [{name: x for name, x in state.items() if not name.startswith("float32/")} for state in net.state_dict()]
    net.load_state_dict(old)
    parameters = [p.detach().float().flatten() for p in models[0].parameters()]
    assert torch.equal(net.flats[0].read(), torch.cat(parameters))


def in_process(rank: int, world: int) -> tuple[Any, Any, Any]:
    model = built(rank)
    net = gradwire.gossip(model, "choco(ring)", "topk(0.2)")
    train(net, [model], optimized([model]), range(rank, rank + 1), range(8))
    before = fixtures.tensors(model)
    model.get_parameter("short.weight").data.mul_(0.75)
    changed, read = fixtures.tensors(model), net.flat.read()
    net.evaluate_mean(lambda: None)
    assert fixtures.same(changed, fixtures.tensors(model)) and torch.equal(net.flat.read(), read)
    return before, net.state_dict(), net.report().memory_floats


def test_processes_of_mixed_formats_equal_lockstep() -> None:
    models = [built(rank) for rank in range(2)]
    net = gradwire.gossip_lockstep(models, "choco(ring)", "topk(0.2)")
    train(net, models, optimized(models), range(2), range(8))
    states = net.state_dict()
    for rank, (parameters, state, memory) in enumerate(run_ranks(in_process, 2)):
        assert fixtures.same(parameters, fixtures.tensors(models[rank])) and fixtures.same(state, states[rank])
        assert memory == net.report(rank).memory_floats > 2.8  # two vectors, and copies of most parameters


def test_what_is_written_is_read_even_if_the_model_cannot_hold_it() -> None:
    model = nn.Linear(3, 3).bfloat16()
    flat, x = FlatParams(model), torch.linspace(-1, 1, 12)
    flat.write_(x)
    assert torch.equal(flat.read(), x) and torch.equal(model.bias.detach(), x[9:].bfloat16())
    with flat.restored():
        flat.write_(torch.zeros(12))
    assert torch.equal(flat.read_all(), x)
    with torch.no_grad():
        model.bias += 0.5
    moved = model.bias.detach().float() - x[9:].bfloat16().float()
    assert torch.equal(flat.read()[9:], x[9:] + moved)


def test_float64_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'weight' is float64, .* use model\.float\(\)"):
        gradwire.gossip_lockstep([nn.Linear(2, 2).double() for _ in range(2)], "dpsgd(ring)")
