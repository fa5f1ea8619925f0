"""Bad input gets a sentence that names the offender and the remedy, on every rank, before anything is sent.

All attempts of a test run in one group, one after the other: a refusal leaves the group fit for the next.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import fixtures
import gradwire
from gradwire.integrations import consistency
from spawn import run_ranks

SPECS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no parenthesis": ({"spec": "topk(0.01"}, ("'topk(0.01'", "joined by |")),
    "a slip": ({"spec": "tpok(0.01)"}, ("'tpok'", "did you mean topk")),
    "no rule": ({"spec": "sign", "rules": ["fp16"]}, ("'fp16' is no rule", "gradwire.Rule")),
    "an argument": ({"spec": "topk(0.1, colour=3)"}, ("topk", "colour")),
    "a type": ({"spec": "powersgd(rank='two')"}, ("powersgd", "'two'")),
    "a momentum": ({"spec": "dgc(0.1, momentum='big')"}, ("momentum", "'big'")),
    "a number in a chain": ({"spec": "0.3 | sign"}, ("0.3", "no stage")),
    "a number alone": ({"spec": "0.01"}, ("'0.01'", "names no stage")),
    "nothing": ({"spec": None}, ("None", "give a codec")),
    "the order": ({"spec": "sign | topk(0.1)"}, ("sign | topk(0.1)", "the order is")),
    "a feedback": ({"spec": "residual"}, ("'residual'", "feedback=")),
    "a table": ({"spec": {5: "topk(0.1)"}}, ("step 0", "[5]")),
    "ratio 0": ({"spec": "topk(0)"}, ("topk(0)", "(0, 1]", "topk(0.01)")),
    "ratio above 1": ({"spec": "topk(1.5)"}, ("topk(1.5)", "(0, 1]")),
    "ratio below 0": ({"spec": "randomk(-0.1)"}, ("randomk(-0.1)", "(0, 1]")),
    "ratio in percent": ({"spec": "dgc(25)"}, ("topk(25)", "(0, 1]")),
    "sums": ({"spec": "topk(0.1)", "exchange": "allreduce"}, ("allreduce", "topk(0.1)", "allgather")),
    "sums of integers": ({"spec": "int8", "exchange": "allreduce"}, ("allreduce", "int8", "two_way")),
    "lengths": ({"spec": "topk(0.1)", "exchange": "two_way"}, ("two_way", "topk(0.1)", "int32 or bitmap")),
    "votes": ({"spec": "int8", "exchange": "majority"}, ("majority", "int8", "use sign")),
    "no feedback": ({"spec": "sign", "feedback": "topk(0.1)"}, ("'topk(0.1)'", "no feedback")),
    "no exchange": ({"spec": "sign", "exchange": "residual"}, ("'residual'", "no exchange")),
    "granularity": ({"spec": "sign", "granularity": "row"}, ("'row'", "layer, bucket, model")),
    "bundle": ({"spec": "sign", "bundle": "fp17"}, ("'fp17'", "fp16")),
    "an idle rule": (
        {"spec": "sign", "rules": (gradwire.Rule("fp16", name="4.wieght"),)},
        ("[4.wieght]", "names no trainable parameter", "the nearest names are 4.weight"),
    ),
    "a rule too tight": (
        {"spec": "sign", "rules": (gradwire.Rule("fp16", name="4.*", min_size=1000),)},
        ("[4.* size>=1000]", "fits none", "4.weight (5, 12)", "loosen it"),
    ),
    "a rule": (
        {"spec": "sign", "rules": (gradwire.Rule("topk(0.1)", name="0.*", exchange="allreduce"),)},
        ("allreduce", "topk(0.1)"),
    ),
}


def malformed(rank: int, world: int) -> dict[str, fixtures.Case]:
    found = {}
    for case, (options, words) in SPECS.items():
        everywhere = fixtures.sentence(lambda options=options: gradwire.compress(fixtures.model(), **options))
        mine = options if rank == 1 else {"spec": "topk(0.1)"}
        on_one = fixtures.sentence(lambda mine=mine: gradwire.compress(fixtures.model(), **mine))
        by_optimizer = fixtures.sentence(lambda mine=mine: fixtures.wrapped(fixtures.model(), **mine))
        found[case] = (everywhere, ("ValueError", *words))
        found[f"{case} on rank 1"] = (on_one, ("ValueError", *words, *(("on rank 1",) if rank == 0 else ())))
        found[f"{case} by the optimizer of rank 1"] = (by_optimizer, ("ValueError", *words))
    return found


def test_a_malformed_spec_on_all_ranks_or_on_one():
    fixtures.check_sentences(run_ranks(malformed, 2))


def with_buffer() -> nn.Module:
    net = fixtures.model()
    net.register_buffer("seen", torch.zeros(3))
    return net


def frozen() -> nn.Module:
    net = fixtures.model()
    net[0].weight.requires_grad_(False)
    return net


def all_frozen() -> nn.Module:
    return fixtures.model().requires_grad_(False)


def complex_model() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 4), nn.Linear(4, 4, dtype=torch.complex64))


def whole_numbers() -> nn.Module:
    net = fixtures.model()
    net.register_parameter("count", nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False))
    return net


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "sparse": (lambda: nn.Sequential(nn.Embedding(5, 3, sparse=True)), ("'0'", "sparse", "sparse=False")),
    "a sparse bag": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.EmbeddingBag(5, 3, sparse=True, mode="sum")),
        ("'1'", "sparse=False"),
    ),
    "complex": (complex_model, ("'1.weight'", "complex", "real and imaginary")),
    "nothing to train": (all_frozen, ("no trainable parameter", "requires_grad")),
}
OTHER_MODELS: dict[str, Callable[[], nn.Module]] = {
    "wider": lambda: nn.Sequential(nn.Linear(11, 16)),
    "frozen": frozen,
    "another dtype": lambda: fixtures.model().double(),
    "another name": lambda: nn.ModuleDict({"body": fixtures.model()}),
    "a buffer more": with_buffer,
    "a frozen parameter more": whole_numbers,
}


def wrapped(world: int) -> dict[str, fixtures.Case]:
    """Models whose gradients others average, or whose parameters they hand out in parts."""
    mesh = init_device_mesh("cpu", (world,))
    parts = ("sharded", "DistributedDataParallel")
    inside = nn.Sequential(fixtures.ddp(fixtures.model()))
    flat = FullyShardedDataParallel(fixtures.model(), device_id=torch.device("cpu"), use_orig_params=True)
    split = fully_shard(fixtures.model(), mesh=mesh)
    return {
        "DDP inside": (fixtures.sentence(lambda: gradwire.compress(inside, "sign")), ("'0'", "pass that one")),
        "FSDP": (fixtures.sentence(lambda: gradwire.compress(flat, "sign")), parts),
        "FSDP 2": (fixtures.sentence(lambda: gradwire.compress(split, "sign")), ("'0.weight'", *parts)),
        "gossip of FSDP": (fixtures.sentence(lambda: gradwire.gossip(flat, "choco(ring)")), parts),
        "an optimizer of FSDP": (fixtures.sentence(lambda: fixtures.wrapped(flat, spec="sign")), parts),
        "an optimizer of parts": (
            fixtures.sentence(lambda: fixtures.wrapped(split, spec="sign")),
            ("'0.weight'", *parts),
        ),
    }


def models(rank: int, world: int) -> dict[str, fixtures.Case]:
    found = {}
    for case, (make, words) in MODELS.items():
        for who in ("all", "rank 1"):
            net = make() if who == "all" or rank == 1 else fixtures.model()
            found[f"{case}, {who}"] = (fixtures.sentence(lambda net=net: gradwire.compress(net, "topk(0.1)")), words)
    found |= wrapped(world)
    found["an optimizer of complex ones"] = (
        fixtures.sentence(
            lambda: fixtures.wrapped(complex_model() if rank == 1 else fixtures.model(), spec="topk(0.1)")
        ),
        ("'1.weight'", "complex"),
    )
    for case, other in OTHER_MODELS.items():
        net = other() if rank == 1 else fixtures.model()
        said = fixtures.sentence(lambda net=net: gradwire.compress(net, "topk(0.1)"))
        found[case] = (said, ("rank 1 has another model than rank 0", "build the same model"))
    return found


def test_models_that_cannot_be_compressed_or_differ():
    fixtures.check_sentences(run_ranks(models, 2))


def disagreements(rank: int, world: int) -> dict[str, fixtures.Case]:
    plain: dict[str, Any] = {"spec": "topk(0.1)"}
    others: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
        "spec": ({"spec": "topk(0.2)"}, ("topk(0.1)", "topk(0.2)")),
        "feedback": ({**plain, "feedback": "ef21"}, ("ef21", "residual")),
        "exchange": ({"spec": "topk(0.1) | int32", "exchange": "two_way"}, ("two_way",)),
        "granularity": ({**plain, "granularity": "model"}, ("model", "layer")),
        "bundle": ({**plain, "bundle": "bf16"}, ("bf16", "fp16")),
        "rules": ({**plain, "rules": (gradwire.Rule("int8", name="0.*"),)}, ("int8",)),
        "seed": ({**plain, "seed": 7}, ("than rank 0: 'seed 7', not 'seed 0'; attach",)),
        "launch_mb": ({**plain, "launch_mb": 1.0}, ("1048576 bytes",)),
        "rollback": ({**plain, "rollback": False}, (": 'no rollback', not 'rollback'; attach",)),
        "scaler": ({**plain, "scaler": torch.amp.GradScaler("cpu")}, ("GradScaler",)),
    }
    found: dict[str, fixtures.Case] = {}
    for case, (options, words) in others.items():
        mine = options if rank == 1 else plain
        said = fixtures.sentence(lambda mine=mine: gradwire.compress(fixtures.model(), **mine))
        found[case] = (said, ("rank 1 has another spec than rank 0", "everywhere", *words))
    for field in ("VERSION", "WIRE_FORMAT"):
        before = getattr(consistency, field)
        if rank == 1:
            setattr(consistency, field, "9.9.9" if field == "VERSION" else 99)
        said = fixtures.sentence(lambda: gradwire.compress(fixtures.model(), "topk(0.1)"))
        found[field] = (said, ("rank 1 has another", "9", "install the same gradwire"))
        setattr(consistency, field, before)
    return found


def test_ranks_that_mean_different_things():
    fixtures.check_sentences(run_ranks(disagreements, 2))
