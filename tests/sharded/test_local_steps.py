"""Local steps of sharded replicas: each trains under FSDP, and shards are exchanged every few steps."""

import shutil
import tempfile
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.sharded.test_hsdp import shard_net
from tests.sharded_fixtures import IS_TORCH_2_9, OddNet, local, long, mesh_of, shard_, whole
from torch import Tensor

import fixtures
import gradwire
from spawn import Answers, cases_fixture

SPECS: dict[str, dict[str, Any]] = {
    "sparseloco": {"spec": "sparseloco(H=2, k=4, chunk=32)", "bundle": None},
    "start": {"spec": "diloco(H=2, start=3)", "codec": "topk(0.1) | sign", "exchange": "allgather"},
    "fragments": {
        "spec": "streaming_diloco(H=4, fragments=('*.weight', '*'), values=int8, delay=2)",
        "exchange": "allgather",
    },
    "two_dimensions": {"spec": "diloco(H=3)", "codec": "int4", "exchange": "two_way", "native_mesh": True},
}
STEPS = 7
# FSDP of torch 2.8 rounds its means in another way, and AdamW turns that into up to 3 % of its rate of 0.01.
ROUNDING = 1e-6 if IS_TORCH_2_9 else 1e-3
PLAIN = {"spec": "diloco(H=2, start=2, first=None)"}


def optimizer_of(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def attach(options: dict[str, Any]) -> tuple[OddNet, torch.optim.Optimizer, gradwire.LocalSync]:
    chosen, mesh = dict(options), mesh_of(2, 2)
    native = chosen.pop("native_mesh", False)
    net = shard_(OddNet(), mesh if native else mesh["shard"], chosen.pop("policy", "reshard"))
    optimizer = optimizer_of(net)
    return net, optimizer, gradwire.local(net, optimizer, across=None if native else mesh["replicate"], **chosen)


def parts(net: OddNet) -> dict[str, Tensor]:
    return {name: local(p.detach()).clone() for name, p in net.named_parameters()}


def take_steps(
    net: OddNet, optimizer: torch.optim.Optimizer, outer: Callable[[], None], steps: range, rank: int
) -> list[dict[str, Tensor]]:
    """Returns this rank's shards of the gradients in each step."""
    seen = []
    for step in steps:
        optimizer.zero_grad()
        net(fixtures.batch(rank, step)).square().mean().backward()
        seen.append({name: local(p.grad).clone() for name, p in net.named_parameters() if p.grad is not None})
        optimizer.step()
        outer()
    return seen


def recorded(rank: int, options: dict[str, Any]) -> Any:
    net, optimizer, outer = attach(options)
    first = parts(net)
    return first, take_steps(net, optimizer, outer, range(STEPS), rank), outer.state_dict()


def like_replicas(rank: int) -> Any:
    """Sharded replicas, uncompressed, and the same replicas whole, whose gradients are means by hand."""
    net, optimizer, outer = attach({**PLAIN, "policy": "keep"})
    nets = [OddNet(), OddNet()]
    optimizers = [optimizer_of(each) for each in nets]
    workers = gradwire.local_lockstep(nets, optimizers, **PLAIN)
    for step in range(STEPS):  # the last round is not over
        same = step < 2  # the batches of the start are the same
        optimizer.zero_grad()
        net(fixtures.batch(0 if same else rank, step)).square().mean().backward()
        optimizer.step()
        outer()
        for replica, each in enumerate(nets):
            each.zero_grad()
            for shard in range(2):
                x = fixtures.batch(0 if same else 2 * replica + shard, step)
                (each(x).square().mean() / 2).backward()
            optimizers[replica].step()
        workers()
    inside = whole(net), fixtures.tensors(nets[rank // 2])
    outputs = [output_of(net)]
    with outer.averaged():
        averaged = whole(net), {name: x.detach() for name, x in workers.ranks[rank // 2].outer.weights.items()}
        outputs.append(output_of(net))
    outputs.append(output_of(net))
    return inside, averaged, outputs, outer.report()


@torch.no_grad()
def output_of(net: OddNet) -> Tensor:
    """FSDP gathers parameters for it, and keeps some."""
    return net(fixtures.batch(0, 0))


def resumed(rank: int) -> Any:
    """A run without a break, and one that stops inside a round and goes on in new objects."""
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    net, optimizer, outer = attach(SPECS["sparseloco"])
    outer.inner_optimizers = [optimizer]  # as trainers have it, so that its moments are saved, too
    take_steps(net, optimizer, outer, range(3), rank)
    gradwire.save(outer, folders[0])
    dist.barrier()
    again, second, other = attach(SPECS["sparseloco"])
    other.inner_optimizers = [second]
    gradwire.load(other, folders[0])
    take_steps(net, optimizer, outer, range(3, STEPS), rank)
    take_steps(again, second, other, range(3, STEPS), rank)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folders[0])
    return outer.state_dict(), other.state_dict()


def nonfinite(rank: int) -> Any:
    """One shard of one replica diverges; no rank takes part in that round, and all go on from the last one."""
    net, optimizer, outer = attach({"spec": "diloco(H=2)"})
    take_steps(net, optimizer, outer, range(2), rank)
    agreed = whole(net)
    take_steps(net, optimizer, outer, range(2, 3), rank)
    if rank == 1:
        with torch.no_grad():
            local(net.first.weight)[0] = torch.inf
    outer()
    return agreed, whole(net), outer.skipped


def closed(rank: int) -> Any:
    """After a round the handle is closed, and the same optimizer goes on; then a wire takes the model."""
    net, optimizer, outer = attach({"spec": "local_sgd(H=2)", "native_mesh": True})
    take_steps(net, optimizer, outer, range(2), rank)
    native = shard_(OddNet(), mesh_of(2, 2))
    native.load_state_dict(net.state_dict())
    other = optimizer_of(native)
    other.load_state_dict(deepcopy(optimizer.state_dict()))
    outer.close()
    for model, one in ((net, optimizer), (native, other)):
        take_steps(model, one, outer=lambda: None, steps=range(2, 4), rank=rank)
    found = whole(net), whole(native)
    wire = gradwire.compress(net, "fp32")
    take_steps(net, optimizer, wire, range(4, 5), rank)
    return *found, outer.steps, wire.report().steps


def refused(rank: int) -> list[str]:
    mesh = mesh_of(2, 2)
    net = shard_(OddNet(), mesh["shard"])
    options: list[dict[str, Any]] = [{"across": mesh["replicate"], "uneven": True}, {}]
    return [
        fixtures.error_text(lambda x=x: gradwire.local(net, optimizer_of(net), "diloco(H=2)", **x)) for x in options
    ]


CASES: dict[str, Any] = {
    **{name: (recorded, {"options": options}) for name, options in SPECS.items()},
    **{function.__name__: (function, {}) for function in (like_replicas, resumed, nonfinite, closed, refused)},
}


def call(rank: int, world: int, case: tuple[Any, dict[str, Any]]) -> Any:
    return case[0](rank, **case[1])


answers = cases_fixture(call, 4, CASES)


@pytest.mark.parametrize("case", long(SPECS, "start", "two_dimensions"))
def test_shards_are_exchanged_as_if_they_were_models(answers: Answers, case: str) -> None:
    """Bit for bit. Ranks 0 and 2 hold the same rows, and so do 1 and 3."""
    options = {name: x for name, x in SPECS[case].items() if name != "native_mesh"}
    for shard in range(2):
        pair = [answers[case][rank] for rank in (shard, shard + 2)]
        nets = [shard_net({name: tuple(x.shape) for name, x in first.items()}) for first, _, _ in pair]
        for net, (first, _, _) in zip(nets, pair, strict=True):
            net.frozen.requires_grad_(False)
            for name, p in net.named_parameters():
                p.data.copy_(first[name])
        optimizers = [optimizer_of(net) for net in nets]
        workers = gradwire.local_lockstep(nets, optimizers, **options)
        for step in range(STEPS):
            for net, (_, grads, _) in zip(nets, pair, strict=True):
                for name, p in net.named_parameters():
                    p.grad = grads[step][name].clone() if name in grads[step] and p.requires_grad else None
            workers.average_gradients()
            for optimizer in optimizers:
                optimizer.step()
            workers()
        for handle, (_, _, state) in zip(workers.ranks, pair, strict=True):
            mine = {name: x for name, x in handle.state_dict().items() if x.numel() and "gradwire/" not in name}
            assert any(name.startswith("residual/") for name in mine)
            assert fixtures.same(mine, {name: state[name] for name in mine}), (case, shard)


@pytest.mark.parametrize("case", ["like_replicas"])
def test_uncompressed_rounds_are_those_of_whole_replicas(answers: Answers, case: str) -> None:
    for inside, averaged, (before, within, after), report in answers[case]:
        assert report.rounds.steps == 2 and report.local_steps == 4
        for found, expected in (inside, averaged):
            for name, x in expected.items():
                assert torch.allclose(found[name], x, rtol=1e-4, atol=ROUNDING), name
        assert torch.equal(before, after) and not torch.allclose(before, within, rtol=1e-3)


@pytest.mark.parametrize("case", ["resumed"])
def test_a_run_goes_on_inside_a_round(answers: Answers, case: str) -> None:
    for through, again in answers[case]:
        assert fixtures.same(through, again)


@pytest.mark.parametrize("case", ["nonfinite"])
def test_a_shard_that_diverged_drops_the_round_on_all_ranks(answers: Answers, case: str) -> None:
    for agreed, after, skipped in answers[case]:
        assert skipped == 1 and fixtures.same(agreed, after)


@pytest.mark.parametrize("case", ["closed"])
def test_fsdp_averages_again_after_the_handle_is_closed(answers: Answers, case: str) -> None:
    for found, native, *steps in answers[case]:
        assert fixtures.same(found, native) and steps == [2, 1]


@pytest.mark.parametrize("case", ["refused"])
def test_what_cannot_be_is_refused(answers: Answers, case: str) -> None:
    for uneven, no_mesh in answers[case]:
        assert uneven.startswith("ValueError") and "uneven" in uneven
        assert no_mesh.startswith("ValueError") and "across" in no_mesh
