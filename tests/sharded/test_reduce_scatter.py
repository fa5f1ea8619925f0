"""A compressed reduce-scatter inside FSDP."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.sharded_fixtures import IS_TORCH_2_9, OddNet, long, mesh_of, shard_, shards, train, whole
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

import fixtures
from gradwire.codecs.codec import codec
from gradwire.integrations.sharded import compress_reduce_scatter
from gradwire.integrations.sharded.reduce_scatter import CompressedReduceScatter
from spawn import Answers, cases_fixture

needs_torch_2_9 = pytest.mark.skipif(not IS_TORCH_2_9, reason="older versions take no other reduce-scatter")
SPECS = {"fp32": 1e-6, "bf16": 4e-3, "int8": 1e-2, "hadamard | int4": 0.1}


def gradients(net: OddNet, rank: int) -> dict[str, Tensor]:
    net.zero_grad()
    net(fixtures.batch(rank, 0)).square().mean().backward()
    return shards(net)


def alone() -> tuple[Tensor, Tensor]:
    """A group of one rank: FSDP of some versions reduces there, too."""
    given, out = torch.randn(6), torch.empty(6)
    CompressedReduceScatter(codec("int8"))(out, given, mesh_of(4, 1)["shard"].get_group(), dist.ReduceOp.AVG)
    return given, out


def older() -> str:
    """What a version of torch says that takes no other reduce-scatter."""
    net = shard_(OddNet(), mesh_of(1, 4)["shard"])
    with pytest.MonkeyPatch.context() as patch:
        if IS_TORCH_2_9:
            patch.delattr(FSDPModule, "set_custom_reduce_scatter")
        return fixtures.error_text(lambda: compress_reduce_scatter(net, "int8"))


def reduced(rank: int, world: int, case: str) -> Any:
    if case in ("alone", "older"):
        return alone() if case == "alone" else older()
    mesh = mesh_of(1, 4)["shard"]
    native = gradients(shard_(OddNet(), mesh), rank)
    net = shard_(OddNet(), mesh)
    if case == "refused":
        net.set_gradient_divide_factor(2.0)
        compress_reduce_scatter(net, "int8")
        return fixtures.error_text(lambda: gradients(net, rank)), fixtures.error_text(
            lambda: compress_reduce_scatter(net, "sign")
        )
    compressed = compress_reduce_scatter(net, case)
    ours, report = gradients(net, rank), compressed.report()
    train(net, rank, range(2))
    with torch.no_grad():
        bad = fixtures.batch(rank, 0) * (torch.inf if rank == 2 else 1.0)
    net(bad).square().mean().backward()
    after = {name: bool(torch.isnan(x).any()) for name, x in shards(net).items()}
    return native, ours, report, whole(net), after


answers = cases_fixture(
    reduced, 4, {**{spec: spec for spec in SPECS}, **{name: name for name in ("refused", "alone", "older")}}
)


@needs_torch_2_9
@pytest.mark.parametrize("case", long(SPECS, "bf16"))
def test_gradients_are_those_of_fsdp_but_for_rounding(answers: Answers, case: str) -> None:
    for native, ours, _, _, _ in answers[case]:
        flats = [torch.cat([x[name].flatten() for name in native]) for x in (native, ours)]
        assert float((flats[0] - flats[1]).norm() / flats[0].norm()) < SPECS[case], case
    assert all(fixtures.same(answers[case][0][3], one[3]) for one in answers[case])


@needs_torch_2_9
@pytest.mark.parametrize("case", ["int8"])
def test_few_bytes_are_sent_and_counted(answers: Answers, case: str) -> None:
    for _, _, report, _, bad in answers[case]:
        assert report.calls == 3  # two blocks, and the rest
        assert 3.5 < report.dense / report.sent < 4
        assert bad["first.weight"]  # a gradient that is not finite stays so, as with FSDP alone


@needs_torch_2_9
@pytest.mark.parametrize("case", ["refused"])
def test_what_would_be_wrong_is_refused(answers: Answers, case: str) -> None:
    for divided, starved in answers[case]:
        assert "set_gradient_divide_factor" in divided
        assert "sign" in starved and "ValueError" in starved


@pytest.mark.parametrize("case", ["alone"])
def test_one_rank_keeps_its_gradient(answers: Answers, case: str) -> None:
    for given, out in answers[case]:
        assert torch.equal(given, out)


@pytest.mark.parametrize("case", ["older"])
def test_a_version_without_other_reduce_scatters_is_refused(answers: Answers, case: str) -> None:
    assert all(text.startswith("ValueError") and "torch 2.9" in text for text in answers[case])
