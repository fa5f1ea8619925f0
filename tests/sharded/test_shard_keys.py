"""Random bits of shards: each shard draws its own, and ranks of one process draw them as ranks of several do."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import gradwire
from gradwire.comm.host_layout import HostLayout
from gradwire.engine import Lockstep, build, default_rules
from gradwire.engine.batched import Batched
from gradwire.engine.step import Engine

WORLD = 2
SPECS = ("qsgd", "terngrad", "randomk(0.2)")


def nets() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(40, 30) for _ in range(WORLD)]


def workers(
    spec: str, shards: Sequence[int]
) -> tuple[gradwire.integrations.simulated.SimulatedWorkers, list[nn.Module]]:
    made = nets()
    group = gradwire.lockstep(made, spec)
    for wire, shard in zip(group.wires, shards, strict=True):
        wire.engine.unwrapped.shard = shard
    return group, made


def updates(spec: str, shards: Sequence[int], monkeypatch: pytest.MonkeyPatch | None = None) -> list[Tensor]:
    """The update of each of three steps; in turn, if a patch is given that forbids steps of all ranks at once."""
    if monkeypatch is not None:
        monkeypatch.setattr(Batched, "can_run", lambda *_: False)
    group, made = workers(spec, shards)
    found = []
    for step in range(3):
        for rank, net in enumerate(made):
            draw = torch.Generator().manual_seed(10 * step + rank)
            for p in net.parameters():
                p.grad = torch.randn(p.shape, generator=draw)
        group()
        found.append(torch.cat([p.grad.flatten() for net in made for p in net.parameters()]))
    return found


@pytest.mark.parametrize("spec", SPECS)
def test_ranks_at_once_draw_what_they_draw_in_turn(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = updates(spec, [1, 1])
    assert all(map(torch.equal, at_once, updates(spec, [1, 1], monkeypatch)))


@pytest.mark.parametrize("spec", SPECS)
def test_shards_draw_other_bits(spec: str) -> None:
    assert not any(map(torch.equal, updates(spec, [0, 0]), updates(spec, [1, 1])))


def test_ranks_of_different_shards_do_not_run_at_once() -> None:
    group, made = workers("qsgd", [0, 1])
    batched = Batched([wire.engine.unwrapped for wire in group.wires], group.group)
    grads = [{name: torch.ones_like(p) for name, p in net.named_parameters()} for net in made]
    assert not batched.can_run(grads)
    assert Batched([wire.engine.unwrapped for wire in workers("qsgd", [1, 1])[0].wires], group.group).can_run(grads)


def test_shards_of_a_mesh_send_different_codes_of_equal_gradients() -> None:
    """All four ranks of a mesh have the same rows and the same gradient; replicas agree, and shards differ."""
    layout = HostLayout.of([[0, 1], [2, 3]])
    plan = build({"weight": (30, 40)}, default_rules("qsgd"), 2, local_shapes={"weight": (30, 40)})
    places = [layout.place_of(rank) for rank in range(4)]
    engines = [Engine(plan, replica, 2, 0, torch.device("cpu"), shard=shard, shards=2) for replica, shard in places]
    grad = torch.randn(30, 40, generator=torch.Generator().manual_seed(0))
    given = [{"weight": grad.clone()} for _ in engines]
    Lockstep(4, layout).drive([engine.run(own) for engine, own in zip(engines, given, strict=True)])
    first, second, third, fourth = (own["weight"] for own in given)
    assert torch.equal(first, third) and torch.equal(second, fourth)
    assert not torch.equal(first, second)
