"""Bad input raises an error that names the offender and the remedy, on every rank, before anything is sent.

All cases run in one group, one after the other: a refused call leaves the group fit for the next.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import fixtures
import gradwire
from gradwire.integrations import consistency
from spawn import Answers, cases_fixture

SPECS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no parenthesis": ({"spec": "topk(0.01"}, ("'topk(0.01'", "|")),
    "a slip": ({"spec": "tpok(0.01)"}, ("'tpok'", "topk")),
    "no rule": ({"spec": "sign", "rules": ["fp16"]}, ("'fp16'", "gradwire.Rule")),
    "a rule alone": ({"spec": "sign", "rules": gradwire.Rule("fp16")}, ("rules=[",)),
    "a scaler": ({"spec": "sign", "scaler": 3}, ("scaler=3", "GradScaler")),
    "a text as a size": ({"spec": "sign", "bucket_mb": "x"}, ("bucket_mb='x'",)),
    "a size without end": ({"spec": "sign", "bucket_mb": float("inf")}, ("bucket_mb=inf",)),
    "a text as a seed": ({"spec": "sign", "seed": "x"}, ("seed='x'",)),
    "half a seed": ({"spec": "sign", "seed": 0.5}, ("seed=0.5",)),
    "a long seed": ({"spec": "sign", "seed": 2**70}, ("seed=",)),
    "an argument": ({"spec": "topk(0.1, colour=3)"}, ("topk", "colour")),
    "a type": ({"spec": "powersgd(rank='two')"}, ("powersgd", "'two'")),
    "a momentum": ({"spec": "dgc(0.1, momentum='big')"}, ("momentum", "'big'")),
    "a number in a chain": ({"spec": "0.3 | sign"}, ("0.3", "stage")),
    "a number alone": ({"spec": "0.01"}, ("'0.01'", "stage")),
    "nothing": ({"spec": None}, ("None", "codec")),
    "the order": ({"spec": "sign | topk(0.1)"}, ("sign | topk(0.1)", "selector", "quantizer")),
    "a feedback": ({"spec": "residual"}, ("'residual'", "feedback=")),
    "a table": ({"spec": {5: "topk(0.1)"}}, ("step 0", "[5]")),
    "ratio 0": ({"spec": "topk(0)"}, ("topk(0)", "(0, 1]", "topk(0.01)")),
    "ratio above 1": ({"spec": "topk(1.5)"}, ("topk(1.5)", "(0, 1]")),
    "ratio below 0": ({"spec": "randomk(-0.1)"}, ("randomk(-0.1)", "(0, 1]")),
    "ratio in percent": ({"spec": "dgc(25)"}, ("topk(25)", "(0, 1]")),
    "sums": ({"spec": "topk(0.1)", "exchange": "allreduce"}, ("allreduce", "topk(0.1)", "allgather")),
    "sums of integers": ({"spec": "int8", "exchange": "allreduce"}, ("allreduce", "int8", "two_way")),
    "lengths": ({"spec": "topk(0.1)", "exchange": "two_way"}, ("two_way", "topk(0.1)", "int32", "bitmap")),
    "votes": ({"spec": "int8", "exchange": "majority"}, ("majority", "int8", "sign")),
    "no feedback": ({"spec": "sign", "feedback": "topk(0.1)"}, ("'topk(0.1)'", "feedback")),
    "no exchange": ({"spec": "sign", "exchange": "residual"}, ("'residual'", "exchange")),
    "granularity": ({"spec": "sign", "granularity": "row"}, ("'row'", "layer, bucket, model")),
    "bundle": ({"spec": "sign", "bundle": "fp17"}, ("'fp17'", "fp16")),
    "an idle rule": (
        {"spec": "sign", "rules": (gradwire.Rule("fp16", name="4.wieght"),)},
        ("[4.wieght]", "parameter", "4.weight"),
    ),
    "a rule too tight": (
        {"spec": "sign", "rules": (gradwire.Rule("fp16", name="4.*", min_size=1000),)},
        ("[4.* size>=1000]", "4.weight (5, 12)"),
    ),
    "a rule": (
        {"spec": "sign", "rules": (gradwire.Rule("topk(0.1)", name="0.*", exchange="allreduce"),)},
        ("allreduce", "topk(0.1)"),
    ),
}


WHERE = ("everywhere", "on rank 1", "in the optimizer of rank 1")
MALFORMED = {f"{name}, {where}": (name, where) for name in SPECS for where in WHERE}


def malformed(rank: int, world: int, case: tuple[str, str]) -> str:
    name, where = case
    options = SPECS[name][0] if rank == 1 or where == "everywhere" else {"spec": "topk(0.1)"}
    attach = fixtures.wrap_optimizer if "optimizer" in where else gradwire.compress
    return fixtures.error_text(lambda: attach(fixtures.model(), **options))


malformed_specs = cases_fixture(malformed, 2, MALFORMED)


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_spec_is_refused_on_all_ranks(case: str, malformed_specs: Answers):
    name, where = MALFORMED[case]
    words = ("ValueError", *SPECS[name][1])
    other = () if where == "everywhere" else ("rank 1",)  # what rank 0 says of another rank's spec
    first, second = malformed_specs[case]
    fixtures.check_message([(first, words + other), (second, words)])


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
    "complex": (complex_model, ("'1.weight'", "complex")),
    "nothing to train": (all_frozen, ("requires_grad",)),
}
OTHER_MODELS: dict[str, Callable[[], nn.Module]] = {
    "wider": lambda: nn.Sequential(nn.Linear(11, 16)),
    "frozen": frozen,
    "another dtype": lambda: fixtures.model().double(),
    "another name": lambda: nn.ModuleDict({"body": fixtures.model()}),
    "a buffer more": with_buffer,
    "a frozen parameter more": whole_numbers,
}


def fsdp(world: int) -> nn.Module:
    return FullyShardedDataParallel(fixtures.model(), device_id=torch.device("cpu"), use_orig_params=True)


def fsdp2(world: int) -> nn.Module:
    return fully_shard(fixtures.model(), mesh=init_device_mesh("cpu", (world,)))


SHARDED = ("sharded", "DistributedDataParallel")
# Models whose gradients are averaged by another library, or whose parameters are sharded.
WRAPPED: dict[str, tuple[Callable[[int], nn.Module], Callable[[nn.Module], object], tuple[str, ...]]] = {
    "DDP inside": (
        lambda world: nn.Sequential(fixtures.ddp(fixtures.model())),
        lambda net: gradwire.compress(net, "sign"),
        ("'0'",),
    ),
    "FSDP": (fsdp, lambda net: gradwire.compress(net, "sign"), SHARDED),
    "FSDP 2": (fsdp2, lambda net: gradwire.compress(net, "sign"), ("'0.weight'", *SHARDED)),
    "gossip of FSDP": (fsdp, lambda net: gradwire.gossip(net, "choco(ring)"), SHARDED),
    "an optimizer of FSDP": (fsdp, lambda net: fixtures.wrap_optimizer(net, spec="sign"), SHARDED),
    "an optimizer of FSDP 2": (
        fsdp2,
        lambda net: fixtures.wrap_optimizer(net, spec="sign"),
        ("'0.weight'", *SHARDED),
    ),
}
UNFIT = {f"{name}, {where}": (name, where) for name in MODELS for where in ("everywhere", "on rank 1")}
UNFIT["complex, in the optimizer of rank 1"] = ("complex", "optimizer")
MODEL_CASES = {**UNFIT, **{name: (name, "wrapped") for name in WRAPPED}, **{name: (name, "") for name in OTHER_MODELS}}


def refused_model(rank: int, world: int, case: tuple[str, str]) -> str:
    name, where = case
    if where == "wrapped":
        make, attach, _ = WRAPPED[name]
        net = make(world)
        return fixtures.error_text(lambda: attach(net))
    make_one = MODELS[name][0] if name in MODELS else OTHER_MODELS[name]
    net = make_one() if where == "everywhere" or rank == 1 else fixtures.model()
    if where == "optimizer":
        return fixtures.error_text(lambda: fixtures.wrap_optimizer(net, spec="topk(0.1)"))
    return fixtures.error_text(lambda: gradwire.compress(net, "topk(0.1)"))


refused_models = cases_fixture(refused_model, 2, MODEL_CASES)


@pytest.mark.parametrize("case", [*UNFIT, *WRAPPED])
def test_a_model_that_cannot_be_compressed_is_refused_on_all_ranks(case: str, refused_models: Answers):
    name, where = MODEL_CASES[case]
    words = WRAPPED[name][2] if where == "wrapped" else MODELS[name][1]
    fixtures.check_message([(text, ("Error: ", *words)) for text in refused_models[case]])


@pytest.mark.parametrize("case", OTHER_MODELS)
def test_models_that_differ_are_refused_on_all_ranks(case: str, refused_models: Answers):
    words = ("ValueError", "rank 1", "model", "rank 0", ".weight")  # a tensor is named
    fixtures.check_message([(text, words) for text in refused_models[case]])


PLAIN: dict[str, Any] = {"spec": "topk(0.1)"}
OTHER_OPTIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "spec": ({"spec": "topk(0.2)"}, ("topk(0.1)", "topk(0.2)")),
    "feedback": ({**PLAIN, "feedback": "ef21"}, ("ef21", "residual")),
    "exchange": ({"spec": "topk(0.1) | int32", "exchange": "two_way"}, ("two_way",)),
    "granularity": ({**PLAIN, "granularity": "model"}, ("model", "layer")),
    "bundle": ({**PLAIN, "bundle": "bf16"}, ("bf16", "fp16")),
    "rules": ({**PLAIN, "rules": (gradwire.Rule("int8", name="0.*"),)}, ("int8",)),
    "seed": ({**PLAIN, "seed": 7}, ("seed 7", "seed 0")),
    "bucket_mb": ({**PLAIN, "bucket_mb": 1.0}, ("1048576",)),
    "rollback": ({**PLAIN, "rollback": False}, ("no rollback",)),
    "scaler": ({**PLAIN, "scaler": None}, ("GradScaler",)),  # which cannot be sent to a rank
}
RELEASES = {"VERSION": "9.9.9", "WIRE_FORMAT": 99}


def disagree(rank: int, world: int, case: str) -> str:
    if case in OTHER_OPTIONS:
        options = OTHER_OPTIONS[case][0] if rank == 1 else PLAIN
        options = {**options, "scaler": torch.amp.GradScaler("cpu")} if "scaler" in options else options
        return fixtures.error_text(lambda: gradwire.compress(fixtures.model(), **options))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(consistency, case, RELEASES[case])
        return fixtures.error_text(lambda: gradwire.compress(fixtures.model(), "topk(0.1)"))


disagreements = cases_fixture(disagree, 2, {name: name for name in (*OTHER_OPTIONS, *RELEASES)})


@pytest.mark.parametrize("case", OTHER_OPTIONS)
def test_options_that_differ_are_refused_on_all_ranks(case: str, disagreements: Answers):
    words = ("ValueError", "rank 1", "spec", "rank 0", *OTHER_OPTIONS[case][1])
    fixtures.check_message([(text, words) for text in disagreements[case]])


@pytest.mark.parametrize("case", RELEASES)
def test_releases_that_differ_are_refused_on_all_ranks(case: str, disagreements: Answers):
    words = ("ValueError", "rank 1", str(RELEASES[case]), "install")
    fixtures.check_message([(text, words) for text in disagreements[case]])


ARGUMENTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "bucket_mb as text": ({"bucket_mb": "x"}, ("bucket_mb", "'x'")),
    "bucket_mb below 0": ({"bucket_mb": -1.0}, ("bucket_mb", "-1.0")),
    "bucket_mb without end": ({"bucket_mb": float("inf")}, ("bucket_mb", "inf")),
    "a seed as text": ({"seed": "odd"}, ("seed", "'odd'")),
    "a scaler as a number": ({"scaler": 3}, ("scaler", "3", "GradScaler")),
    "one rule": ({"rules": gradwire.Rule("fp16")}, ("rules", "[gradwire.Rule")),
    "a number of rules": ({"rules": 3}, ("rules", "3")),
}
NOT_A_MODEL = "no model"
UNKNOWN = "an unknown option of an optimizer"
ONE_RANK = {f"{name}, {door}": (name, door) for name in ARGUMENTS for door in ("compress", "optimizer")}
ONE_RANK |= {NOT_A_MODEL: (NOT_A_MODEL, "compress"), UNKNOWN: (UNKNOWN, "optimizer")}


def wrong_on_one_rank(rank: int, world: int, case: tuple[str, str]) -> str:
    name, door = case
    options = {"colour": 3} if name == UNKNOWN else ARGUMENTS.get(name, ({}, ()))[0]
    if door == "optimizer":
        return fixtures.error_text(
            lambda: fixtures.wrap_optimizer(fixtures.model(), spec="sign", **options if rank else {})
        )
    model: Any = fixtures.model() if rank == 0 or name != NOT_A_MODEL else "a model"
    return fixtures.error_text(lambda: gradwire.compress(model, "sign", **options if rank else {}))


wrong_arguments = cases_fixture(wrong_on_one_rank, 2, ONE_RANK)


@pytest.mark.parametrize("case", ONE_RANK)
def test_a_wrong_argument_of_one_rank_is_refused_on_all_ranks(case: str, wrong_arguments: Answers):
    name = ONE_RANK[case][0]
    others = {NOT_A_MODEL: ("str", "nn.Module"), UNKNOWN: ("colour",)}
    words = ("ValueError", *(others.get(name) or ARGUMENTS[name][1]))
    first, second = wrong_arguments[case]
    fixtures.check_message([(first, ("rank 1", *words)), (second, words)])
