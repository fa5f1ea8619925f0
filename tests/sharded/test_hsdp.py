"""Sharded replicas: FSDP reduces inside a replica, and gradwire compresses between replicas."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from tests.sharded_fixtures import OddNet, local, long, mesh_of, recorded, shard_, train, whole
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module

import fixtures
import gradwire
from gradwire.integrations.ownership import release
from spawn import Answers, cases_fixture, run_ranks

SPECS: dict[str, dict[str, Any]] = {
    "topk": {"spec": "topk(0.1)"},
    "sign": {"spec": "topk(0.1) | sign", "granularity": "bucket"},
    "two_way": {"spec": "int4", "exchange": "two_way"},
    "powersgd": {"spec": "powersgd(2)"},
    "random": {"spec": "randomk(0.2)"},
    "delayed": {"spec": "qsgd", "exchange": "delayed"},
    "ef21": {"spec": "sign", "feedback": "ef21", "bundle": None},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "resharded": {"policy": "reshard"},
    "kept": {"policy": "keep"},
    "resharded_to_two": {"policy": "reshard_to_two", "replicas": 1},
    "bf16": {"policy": "bf16"},
    "bf16_reduced": {"policy": "bf16_reduced"},
    "offloaded": {"policy": "offload"},
    "checkpointed": {"checkpointed": True},
    "accumulated": {"accumulate": "gradient_sync"},
    "accumulated_shards": {"accumulate": "all_reduce"},
    "compiled": {"compiled": True},
    "two_dimensions": {"native_mesh": True},
    "two_dimensions_accumulated": {"native_mesh": True, "accumulate": "all_reduce"},
}
COMPRESSED = SPECS | {f"topk_{name}": SPECS["topk"] | OPTIONS[name] for name in OPTIONS if name != "resharded_to_two"}
ROUNDING = {"bf16_reduced": 1e-2}  # FSDP averages replicas in bfloat16 there, and others in float32
CLIP = 0.01
# In torch 2.9 FSDP's function of this name takes another mesh, and 2.8 has none.
WITH_FSDP = ["replicate_with_fsdp"] if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10) else []
LIKE_DDP = ("replicate", *WITH_FSDP, "dtensors")


def like_native(
    rank: int,
    policy: str = "reshard",
    checkpointed: bool = False,
    accumulate: str = "",
    native_mesh: bool = False,
    compiled: bool = False,
    replicas: int = 2,
) -> Any:
    """Train with FSDP's own average between replicas, and with ours, uncompressed."""
    mesh = mesh_of(replicas, 4 // replicas)
    native = shard_(OddNet(checkpointed), mesh, policy)
    train(native, rank, accumulate=accumulate)
    net = shard_(OddNet(checkpointed), mesh if native_mesh else mesh["shard"], policy)
    if rank >= 2 and replicas == 2:
        with torch.no_grad():
            local(net.head.weight).add_(1.0)  # the second replica starts elsewhere
    wire = gradwire.compress(net, "fp32", across=None if native_mesh else mesh["replicate"])
    if compiled:
        net.compile(backend="aot_eager")
    train(net, rank, accumulate=accumulate, after=wire)
    return whole(native), whole(net), wire.report().steps


def twice(
    rank: int, policy: str = "reshard", checkpointed: bool = False, native_mesh: bool = False, **options: Any
) -> Any:
    """Train two times, compressed, and return what was recorded of each."""
    mesh = mesh_of(2, 2)
    across = None if native_mesh else mesh["replicate"]
    nets = [shard_(OddNet(checkpointed), mesh if native_mesh else mesh["shard"], policy) for _ in range(2)]
    return [recorded(net, rank, across=across, **options) for net in nets]


def like_ddp(rank: int, kind: str) -> Any:
    """Replicas that are whole, under DDP and under both functions called `replicate`, or DTensors in a plain loop."""
    plain = fixtures.ddp(fixtures.model())
    wire = gradwire.compress(plain, "topk(0.1)", bucket_mb=fixtures.BUCKET_MB)
    train(plain, rank)
    net = fixtures.model()
    mesh = init_device_mesh("cpu", (4,))
    if kind == "replicate":
        replicate(net)
    elif kind == "replicate_with_fsdp":
        from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp

        replicate_with_fsdp(net, mesh=mesh)
    else:
        distribute_module(net, mesh)
        net.forward = partial(on_replicas, net, mesh)
    other = gradwire.compress(net, "topk(0.1)", bucket_mb=fixtures.BUCKET_MB)
    train(net, rank, after=other if kind != "replicate" else lambda: None)
    params = {name: local(p.detach()) for name, p in net.named_parameters()}
    return fixtures.tensors(plain.module), params, fixtures.memories(wire), fixtures.memories(other)


def on_replicas(net: nn.Sequential, mesh: DeviceMesh, x: Tensor) -> Tensor:
    """A forward pass of DTensors on this rank's own batch."""
    y = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    for layer in net:
        y = layer(y)
    return y.to_local()


def scaled(rank: int) -> Any:
    """A GradScaler whose first scale is too large for one shard of one replica."""
    mesh = mesh_of(2, 2)
    net = shard_(OddNet(), mesh["shard"])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=1000)
    net.first.weight.register_post_accumulate_grad_hook(
        lambda p: local(p.grad)[0].mul_(torch.inf) if rank == 1 and scaler.get_scale() == 2.0**40 else None
    )
    wire = gradwire.compress(net, "topk(0.5)", across=mesh["replicate"], scaler=scaler)
    optimizer, found = fixtures.sgd(net), [whole(net)]
    for step in range(2):
        optimizer.zero_grad()
        scaler.scale(net(fixtures.batch(rank, step)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(whole(net))
    return found, scaler.get_scale(), wire.skipped


def nonfinite(rank: int) -> Any:
    """One shard of one replica has a gradient that is not finite, in one step."""
    mesh = mesh_of(2, 2)
    net = shard_(OddNet(), mesh["shard"])
    calls = []

    def spoil(p: Tensor) -> None:
        calls.append(p)
        if rank == 1 and len(calls) == 2:
            local(p.grad)[0] = torch.inf

    net.first.weight.register_post_accumulate_grad_hook(spoil)
    wire = gradwire.compress(net, "topk(0.5)", across=mesh["replicate"])
    train(net, rank, range(1))
    first = whole(net)
    train(net, rank, range(1, 2))
    second = whole(net)
    train(net, rank, range(2, 3))
    return first, second, whole(net), wire.skipped


def refused(rank: int) -> list[str]:
    """Attempts that would average the wrong things."""
    mesh = mesh_of(2, 2)
    partly = nn.Sequential(fully_shard(nn.Linear(4, 4), mesh=mesh["shard"]), nn.Linear(4, 4))
    net = shard_(OddNet(), mesh["shard"])
    gradwire.compress(shard_(twice := OddNet(), mesh["shard"]), "fp32", across=mesh["replicate"])
    attempts: list[tuple[nn.Module, dict[str, Any]]] = [
        (net, {}),
        (net, {"across": mesh["shard"]}),
        (net, {"across": mesh}),
        (net, {"across": mesh["replicate"], "process_group": mesh["replicate"].get_group()}),
        (partly, {"across": mesh["replicate"]}),
        (fixtures.model(), {"across": mesh["replicate"]}),
        (twice, {"across": mesh["replicate"]}),
    ]
    texts = [fixtures.error_text(lambda x=x, y=y: gradwire.compress(x, "topk(0.1)", **y)) for x, y in attempts]
    frozen = {"across": mesh["replicate"], "optimizer": gradwire.AdamW(net.parameters())}
    return [*texts, fixtures.error_text(lambda: gradwire.compress(net, "onebit_adam", **frozen))]


def failed(rank: int) -> list[str]:
    """A backward pass that fails midway, and the pass after it: before buckets leave early, and when they do."""
    mesh, texts = mesh_of(2, 2), []
    for steps in (0, 2):
        net = shard_(OddNet(), mesh["shard"])
        gradwire.compress(net, "fp32", across=mesh["replicate"])
        train(net, rank, range(steps))
        hook = net.first.register_forward_hook(fail_in_backward)
        with pytest.raises(ArithmeticError):
            net(fixtures.batch(rank, steps)).square().mean().backward()
        hook.remove()
        texts.append(fixtures.error_text(lambda net=net, step=steps: net(fixtures.batch(rank, step))))
    return texts


def fail_in_backward(module: nn.Module, given: object, made: Tensor) -> None:
    """A forward hook after which the backward pass of what was made raises an error."""

    def fail(grad: Tensor) -> None:
        raise ArithmeticError

    made.register_hook(fail)


def evaluated(rank: int, native_mesh: bool, rounds: bool) -> Any:
    """The same training, attached before and after a forward pass, which leaves the outermost parameters gathered."""
    found = []
    for evaluate in (False, True):
        mesh, net = mesh_of(2, 2), fixtures.model()
        fully_shard(net, mesh=mesh if native_mesh else mesh["shard"])
        optimizer, across = fixtures.sgd(net), None if native_mesh else mesh["replicate"]
        if evaluate:
            with torch.no_grad():
                net(fixtures.batch(rank, 9))
        handle = (
            gradwire.local(net, optimizer, "local_sgd(H=2)", across=across)
            if rounds
            else gradwire.compress(net, "topk(0.1)", across=across)
        )
        for step in range(4):
            optimizer.zero_grad()
            fixtures.loss(net, rank, step).backward()
            optimizer.step()
            handle()
        found.append((whole(net), handle.report().sent))
    return found


def released(rank: int) -> Any:
    """A wire that is taken off its model: FSDP averages by itself again, until another wire is attached."""
    net = shard_(OddNet(), mesh_of(2, 2))
    first = gradwire.compress(net, "topk(0.1)")
    train(net, rank, range(2))
    release(first)
    train(net, rank, range(2, 4))
    native = whole(net)
    second = gradwire.compress(net, "topk(0.1)")
    train(net, rank, range(4, 6))
    return native, whole(net), (first.report().steps, second.report().steps)


def call(rank: int, world: int, case: tuple[str, dict[str, Any]]) -> Any:
    kind, options = case
    return {
        "twice": twice,
        "like_native": like_native,
        "like_ddp": like_ddp,
        "nonfinite": nonfinite,
        "refused": refused,
        "failed": failed,
        "scaled": scaled,
        "evaluated": evaluated,
        "released": released,
    }[kind](rank, **options)


EVALUATED: dict[str, dict[str, Any]] = {
    "evaluated_two_dimensions": {"native_mesh": True, "rounds": False},
    "evaluated": {"native_mesh": False, "rounds": False},
    "evaluated_two_dimensions_rounds": {"native_mesh": True, "rounds": True},
    "evaluated_rounds": {"native_mesh": False, "rounds": True},
}
CASES = {
    **{name: ("evaluated", options) for name, options in EVALUATED.items()},
    **{name: ("like_native", options) for name, options in OPTIONS.items()},
    **{name: ("twice", options) for name, options in COMPRESSED.items()},
    **{name: ("like_ddp", {"kind": name}) for name in LIKE_DDP},
    "nonfinite": ("nonfinite", {}),
    "refused": ("refused", {}),
    "failed": ("failed", {}),
    "released": ("released", {}),
    "scaled": ("scaled", {}),
    "clipped": ("twice", {"spec": "fp32", "feedback": f"momentum_correction(momentum=0.0, clip={CLIP})"}),
}
answers = cases_fixture(call, 4, CASES)


def of_one_rank(rank: int, world: int) -> float:
    """Bytes that the only rank has sent."""
    mesh = mesh_of(1, 1)
    net = shard_(OddNet(), mesh["shard"])
    wire = gradwire.compress(net, "topk(0.1)", across=mesh["replicate"])
    train(net, rank, range(2))
    return wire.report().sent


def test_one_rank_is_a_replica_and_all_of_its_shards() -> None:
    assert run_ranks(of_one_rank, 1) == [0.0]


def of_eight_ranks(rank: int, world: int) -> Any:
    """Replicas of four ranks, whose parameters stay on pairs of ranks between forward and backward.

    The mesh has two dimensions, or torch makes other groups of pairs in each replica, and does not return.
    """
    mesh = mesh_of(2, 4)
    native = shard_(OddNet(), mesh, "reshard_to_two")
    train(native, rank)
    net = shard_(OddNet(), mesh, "reshard_to_two")
    gradwire.compress(net, "fp32")
    train(net, rank)
    nets = [shard_(OddNet(), mesh, policy) for policy in ("reshard_to_two", "reshard")]
    return whole(native), whole(net), [recorded(one, rank, "topk(0.1)", None) for one in nets]


@pytest.mark.study
def test_parameters_may_stay_on_fewer_ranks_between_forward_and_backward() -> None:
    for native, ours, (pairs, all_ranks) in run_ranks(of_eight_ranks, 8):
        assert all(torch.allclose(native[name], ours[name], rtol=1e-5, atol=1e-6) for name in native)
        assert fixtures.same(pairs["state"], all_ranks["state"])
        assert all(map(fixtures.same, pairs["after"], all_ranks["after"]))


@pytest.mark.parametrize("case", long(OPTIONS, "kept", "bf16_reduced", "checkpointed", "accumulated", "compiled"))
def test_uncompressed_is_what_fsdp_computes_by_itself(answers: Answers, case: str) -> None:
    for native, ours, steps in answers[case]:
        assert steps == 4, case
        for name in native:
            rounding = ROUNDING.get(case, 1e-6)
            assert torch.allclose(native[name], ours[name], rtol=max(1e-5, rounding), atol=rounding), (case, name)


def shard_net(shapes: dict[str, tuple[int, ...]]) -> nn.Module:
    """The model with one rank's rows alone; what it has no rows of is frozen."""
    net = OddNet()
    for name, _ in list(net.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        made = nn.Parameter(torch.zeros(shapes.get(name, 0)))
        setattr(net.get_submodule(owner), leaf, made.requires_grad_(made.numel() > 0))
    net.tied[1].weight = net.tied[0].weight
    return net


STUDIED = [
    *("sign", "random", "ef21", "topk_resharded", "topk_bf16", "topk_bf16_reduced", "topk_compiled"),
    *("topk_accumulated_shards", "topk_two_dimensions"),
]


@pytest.mark.parametrize("case", long(COMPRESSED, *STUDIED))
def test_shards_are_compressed_as_if_they_were_models(answers: Answers, case: str) -> None:
    """Bit for bit: updates and memories. Ranks 0 and 2 hold the same rows, and so do 1 and 3."""
    spec = SPECS[case.partition("_")[0] if case.startswith("topk_") else case]
    for shard in range(2):
        pair = [answers[case][rank][0] for rank in (shard, shard + 2)]
        nets = [shard_net(one["shapes"]) for one in pair]
        workers = gradwire.lockstep(nets, bucket_mb=fixtures.BUCKET_MB, **spec)
        for wire in workers.wires:
            wire.engine.unwrapped.shard = shard  # whose random bits are drawn
        for step in range(len(pair[0]["before"])):
            for net, one in zip(nets, pair, strict=True):
                for name, grad in one["before"][step].items():
                    net.get_parameter(name).grad = grad.clone()
            workers()
            for net, one in zip(nets, pair, strict=True):
                for name in one["before"][step]:
                    update = one["after"][step][name]
                    assert torch.equal(net.get_parameter(name).grad, update), (case, shard, step, name)
        for wire, one in zip(workers.wires, pair, strict=True):
            assert fixtures.same(fixtures.memories(wire), one["state"]), (case, shard)


@pytest.mark.parametrize("case", long(COMPRESSED, *STUDIED))
def test_a_second_run_computes_the_same_bits(answers: Answers, case: str) -> None:
    for first, second in answers[case]:
        assert fixtures.same(first["state"], second["state"]), case
        assert all(map(fixtures.same, first["after"], second["after"])), case


def test_shards_draw_different_random_bits() -> None:
    engines = [wire.engine.unwrapped for wire in gradwire.lockstep([fixtures.model(), fixtures.model()], "qsgd").wires]
    engines[1].shard = 1
    assert engines[0].key.words("x") != engines[1].key.of(0).words("x")


@pytest.mark.parametrize("case", EVALUATED)
def test_a_model_may_be_evaluated_before_it_is_attached(answers: Answers, case: str) -> None:
    for (before, sent), (after, sent_after) in answers[case]:
        assert fixtures.same(before, after) and sent_after == sent > 0


@pytest.mark.parametrize("case", ["released"])
def test_a_wire_can_be_taken_off_its_model(answers: Answers, case: str) -> None:
    native, after, _ = answers[case][0]
    for other, later, steps in answers[case]:
        assert fixtures.same(native, other) and fixtures.same(after, later)
        assert steps == (2, 2)


@pytest.mark.parametrize("case", LIKE_DDP)
def test_replicas_that_are_whole_train_as_under_ddp(answers: Answers, case: str) -> None:
    for plain, other, memories, others in answers[case]:
        assert fixtures.same(plain, other)
        assert fixtures.same(memories, others)


@pytest.mark.parametrize("case", ["nonfinite"])
def test_one_bad_shard_drops_the_step_everywhere(answers: Answers, case: str) -> None:
    for first, second, third, skipped in answers[case]:
        assert skipped == 1
        assert fixtures.same(first, second)
        assert not fixtures.same(second, third)
    assert all(fixtures.same(answers[case][0][2], one[2]) for one in answers[case])


@pytest.mark.parametrize("case", ["scaled"])
def test_all_shards_back_off_together(answers: Answers, case: str) -> None:
    for (first, second, third), scale, skipped in answers[case]:
        assert (scale, skipped) == (2.0**39, 1)
        assert fixtures.same(first, second)
        assert not fixtures.same(second, third)


@pytest.mark.parametrize("case", ["clipped"])
def test_gradients_are_clipped_by_the_norm_of_the_whole_replica(answers: Answers, case: str) -> None:
    ranks = [one for one, _ in answers[case]]
    for step in range(4):
        norms = [
            math.hypot(*(float(x.double().norm()) for rank in pair for x in ranks[rank]["before"][step].values()))
            for pair in ((0, 1), (2, 3))
        ]
        factors = [min(1.0, CLIP / math.sqrt(2) / norm) for norm in norms]
        assert max(factors) < 1
        for shard in range(2):
            pair = ranks[shard], ranks[shard + 2]
            for name, update in pair[0]["after"][step].items():
                if name in pair[0]["before"][step]:
                    parts = [one["before"][step][name] * factor for one, factor in zip(pair, factors, strict=True)]
                    assert torch.allclose(update, sum(parts) / 2, rtol=1e-4, atol=1e-9), (step, shard, name)


@pytest.mark.parametrize("case", ["refused"])
def test_what_would_average_the_wrong_things_is_refused(answers: Answers, case: str) -> None:
    words = ("sharded", "replicas", "dimensions", "process_group", "'1.weight'", "process_group", "wire.set", "moments")
    for texts in answers[case]:
        for text, word in zip(texts, words, strict=True):
            assert text.startswith("ValueError") and word in text, text


@pytest.mark.parametrize("case", ["failed"])
def test_no_pass_follows_one_that_failed(answers: Answers, case: str) -> None:
    assert all(text.startswith("RuntimeError") and "checkpoint" in text for texts in answers[case] for text in texts)


@pytest.mark.parametrize("case", ["topk"])
def test_buckets_leave_during_backward_from_the_second_step_on(answers: Answers, case: str) -> None:
    """A parameter that is never used holds up its bucket and those after it; here it is in the last one."""
    for one, _ in answers[case]:
        first, *later = one["early"]
        assert first == 0 and min(later) > 0
