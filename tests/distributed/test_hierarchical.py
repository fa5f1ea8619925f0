"""Compression between hosts only: hosts say what single ranks with the hosts' mean gradients would say."""

import math
import os
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.test_doors import by_hook, by_loop, by_optimizer
from tests.distributed.test_gradscaler import BAD_STEP, STEPS, train, unscaled
from tests.distributed.test_nonfinite import one_door
from tests.distributed.test_unused import Branches, check_step, step_of
from torch import Tensor, nn

import fixtures
import gradwire
from gradwire.comm.emulated import EmulatedBackend
from gradwire.comm.host_layout import HostLayout
from spawn import run_ranks

HOSTS = [[0, 1], [2, 3]]
SPECS: list[dict[str, Any]] = [
    {"spec": "topk(0.1)"},
    {"spec": "topk(0.1) | sign", "granularity": "bucket"},
    {"spec": "sign", "granularity": "model"},
    {"spec": "dgc(0.1, clip=0.5)"},
    {"spec": "int4", "exchange": "two_way"},
    {"spec": "powersgd(2)"},
    {"spec": "variance"},
    {"spec": "qsgd", "exchange": "delayed"},
    {"spec": "randomk(0.2)"},
    {"spec": "hadamard | int8", "exchange": "allgather"},
    {"spec": "sign", "feedback": "ef21", "bundle": None},
    {"spec": {0: "fp32", 2: "topk(0.25)", 4: "topk(0.1) | int8"}},
]


IN_PROCESSES = ("topk(0.1)", "dgc(0.1, clip=0.5)", "int4", "qsgd")


def short(options: dict[str, Any]) -> dict[str, Any]:
    """Several launches, so that shares of some of them are empty."""
    return {**options, "launch_mb": fixtures.LAUNCH_MB}


def composed(options: dict[str, Any], steps: int) -> tuple[list[nn.Sequential], gradwire.SimulatedWorkers]:
    """By hand: the mean of each pair of gradients, and one flat rank for each host."""
    nets, workers = fixtures.replicas(len(HOSTS), **options)
    for step in range(steps):
        for net, host in zip(nets, HOSTS, strict=True):
            grads = []
            for rank in host:
                net.zero_grad()
                fixtures.loss(net, rank, step).backward()
                grads.append([p.grad.clone() for p in net.parameters()])
            for p, first, second in zip(net.parameters(), *grads, strict=True):
                p.grad = (first + second) / 2
        workers()
        for net in nets:
            fixtures.descend(net)
    return nets, workers


# -- what it computes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", SPECS, ids=lambda options: str(options["spec"]))
def test_hosts_are_ranks_with_mean_gradients(options: dict[str, Any]):
    """Bit for bit: parameters, and all memories, of which each rank of a host holds its share."""
    nets, workers = fixtures.replicas(4, across=HOSTS, **short(options))
    fixtures.march(nets, workers, range(fixtures.STEPS))
    flat, singles = composed(short(options), fixtures.STEPS)
    for net in nets:
        assert fixtures.same(fixtures.tensors(net), fixtures.tensors(flat[0]))
    for host, single in zip(HOSTS, singles.wires, strict=True):
        shares = [fixtures.memories(workers.wires[rank]) for rank in host]
        late = {key for key in shares[0] if key.startswith("pending/")}
        assert not (shares[0].keys() & shares[1].keys()) - late
        assert fixtures.same(shares[0] | shares[1], fixtures.memories(single))
        sent = [workers.wires[rank].report() for rank in host]
        assert sum(report.dense for report in sent) == single.report().dense
        # A rank with nothing to say in a launch still says so.
        assert 0 <= sum(report.sent for report in sent) - single.report().sent <= 40 * fixtures.STEPS


@pytest.mark.parametrize("options", SPECS[2::2], ids=lambda options: str(options["spec"]))
def test_one_rank_a_host_is_flat(options: dict[str, Any]):
    nets, workers = fixtures.replicas(3, across=[[0], [1], [2]], **short(options))
    others, flat = fixtures.replicas(3, **short(options))
    for replicas, group in ((nets, workers), (others, flat)):
        fixtures.march(replicas, group, range(fixtures.STEPS))
    for wire, other in zip(workers.wires, flat.wires, strict=True):
        assert fixtures.same(wire.state_dict(), other.state_dict())
        assert astuple(wire.link.traffic) == pytest.approx(astuple(other.link.traffic))
        assert wire.report().sent_inside == 0
    assert fixtures.same(fixtures.tensors(nets[0]), fixtures.tensors(others[0]))


@pytest.mark.parametrize("spec", ["topk(0.1)", "int4", "powersgd(2)", "sign"])
def test_one_host_is_the_dense_mean(spec: str):
    nets, workers = fixtures.replicas(4, spec, across="hosts")
    for step in range(3):
        for rank, net in enumerate(nets):
            net.zero_grad()
            fixtures.loss(net, rank, step).backward()
        whole = [torch.stack(grads).double().mean(0) for grads in zip(*(_grads(net) for net in nets), strict=True)]
        workers()
        for net in nets:
            for p, mean in zip(net.parameters(), whole, strict=True):
                torch.testing.assert_close(p.grad.double(), mean, rtol=1e-6, atol=1e-8)
            fixtures.descend(net)
    reports = [wire.report() for wire in workers.wires]
    assert all(report.sent == 0 for report in reports)
    ring = 2 * 3 / 4 * 4 * 445
    assert sum(report.sent_inside for report in reports) == pytest.approx(4 * 3 * ring, rel=0.02)
    assert all(not debt.any() for wire in workers.wires for debt in wire.debts().values())


def _grads(net: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in net.parameters()]


def in_processes(rank: int, world: int, several: list[dict[str, Any]]) -> list[Any]:
    """The same by gloo, through every door: parameters, memories, and bytes between and inside hosts."""
    found = []
    for options in several:
        seen = []
        for door in (by_loop, by_hook, by_optimizer):
            tensors, wire = door(rank, {**short(options), "across": HOSTS})
            seen.append((tensors, wire.state_dict(), wire.link.traffic, wire.link.inside))
        found.append(seen)
    return found


def march(nets: list[nn.Sequential], workers: gradwire.SimulatedWorkers) -> None:
    """Train replicas in lockstep, with the optimizer that processes use."""
    for step in range(fixtures.STEPS):
        for rank, net in enumerate(nets):
            net.zero_grad()
            fixtures.loss(net, rank, step).backward()
        workers()
        for net in nets:
            fixtures.sgd(net).step()


def test_processes_are_lockstep_bit_for_bit():
    """Of two hosts, sums are the same in any order."""
    several = [options for options in SPECS if options["spec"] in IN_PROCESSES]
    ranks = run_ranks(in_processes, 4, several, timeout=110)
    for i, options in enumerate(several):
        nets, workers = fixtures.replicas(4, across=HOSTS, **short(options))
        march(nets, workers)
        for rank, (net, wire) in enumerate(zip(nets, workers.wires, strict=True)):
            for tensors, state, traffic, inside in ranks[rank][i]:
                assert fixtures.same(tensors, fixtures.tensors(net)), options
                assert fixtures.same(state, wire.state_dict()), options
                assert (traffic, inside) == (wire.link.traffic, wire.link.inside), options


# -- what must keep working --------------------------------------------------------------------------------------------

BROKEN: list[dict[str, Any]] = [
    {"spec": "topk(0.1)", "bundle": None},
    {"spec": "powersgd(2)"},
    {"spec": "int4", "exchange": "two_way"},
    # The bad layer travels in a launch, and on a rank, that has nothing to say of its own.
    {"spec": "topk(0.1)", "rules": (gradwire.Rule("int8", "2.*", exchange="noop"),)},
]


def troubled(rank: int, world: int) -> None:
    for i, options in enumerate(BROKEN):
        hosted = {**short(options), "across": HOSTS}
        value = (math.nan, math.inf)[i % 2]
        found = [one_door(door, rank, value, hosted) for door in ("plain", "hook")]
        assert fixtures.same(*(fixtures.tensors(net) for net, _ in found)), options
        # What does not travel, as with noop, drifts apart.
        assert fixtures.agreed(torch.cat([p.flatten() for p in found[0][0].parameters()])) or "rules" in options


def overflowing(rank: int, world: int) -> None:
    for options in ({"spec": "topk(0.1)"}, {"spec": "dgc(0.1, clip=0.2)"}, {"spec": "int4", "exchange": "delayed"}):
        hosted = {**short(options), "across": HOSTS}
        parameters, memories = unscaled(rank, hosted, BAD_STEP)
        for door in ("plain", "hook", "optimizer"):
            net, wire, scales = train(door, rank, hosted, lambda step: rank == 1 and step == BAD_STEP)
            assert fixtures.same(fixtures.tensors(net), parameters), (door, options)
            assert fixtures.same(fixtures.memories(wire), memories), (door, options)
            assert fixtures.agreed(torch.tensor(scales))
            assert (wire.report().steps, wire.report().skipped) == (STEPS, 1)


def lacking(rank: int, world: int) -> None:
    for options in ({"spec": "topk(0.2)"}, {"spec": "int4", "exchange": "two_way"}, {"spec": "dgc(0.2)"}):
        hosted = {**short(options), "across": HOSTS}
        net, inner = Branches(), Branches()
        outer = fixtures.ddp(inner, find_unused_parameters=True)
        plain, hook = gradwire.compress(net, **hosted), gradwire.compress(outer, **hosted)
        for step in range(fixtures.STEPS):
            before = fixtures.memories(plain)
            step_of(net, rank, step)
            plain()
            step_of(outer, rank, step)
            check_step(rank, step, net, before, fixtures.memories(plain), options)
            for model in (net, inner):
                fixtures.descend(model)
            assert fixtures.same(fixtures.tensors(inner), fixtures.tensors(net)), (options, step)
            assert fixtures.same(fixtures.memories(hook), fixtures.memories(plain)), (options, step)
        assert fixtures.agreed(torch.cat([p.flatten() for p in net.parameters()])), options


def sparse(rank: int, world: int) -> str:
    net = fixtures.model()
    wire = gradwire.compress(net, "topk(0.1)", across=HOSTS)
    fixtures.loss(net, rank, 0).backward()
    if rank == 3:
        net[0].weight.grad = net[0].weight.grad.to_sparse()
    return fixtures.sentence(wire)


def everyday(rank: int, world: int) -> str:
    for story in (troubled, overflowing, lacking):
        story(rank, world)
    return sparse(rank, world)


def test_bad_and_missing_gradients_are_everybodys():
    said = run_ranks(everyday, 4, timeout=110)
    assert "'0.weight' is sparse" in said[3]
    assert all("another rank has a sparse gradient" in sentence for sentence in said[:3])


def test_moments_of_all_samples_of_a_host_are_tested():
    """The samples of two ranks are those of one with twice the batch."""
    nets, workers = fixtures.replicas(4, "variance", across=HOSTS, bundle=None)
    flat, singles = fixtures.replicas(2, "variance", bundle=None)
    for net in nets + flat:
        for p in net.parameters():
            p.grad = torch.full_like(p, 0.1)
    for rank, wire in enumerate(workers.wires):
        wire.observe({name: torch.full_like(p, 0.25 * rank) for name, p in nets[0].named_parameters()})
    for host, wire in enumerate(singles.wires):
        total = sum(0.25 * rank for rank in HOSTS[host])
        wire.observe({name: torch.full_like(p, total / 4) for name, p in flat[0].named_parameters()})
    workers()
    singles()
    for wire, single in ((workers.wires[0], singles.wires[0]), (workers.wires[3], singles.wires[1])):
        held, other = fixtures.memories(wire), fixtures.memories(single)
        assert all(torch.equal(held[key], other[key]) for key in held)
        assert any(key.startswith("second_moment/") for key in held)


# -- what is kept ------------------------------------------------------------------------------------------------------

METHODS: list[dict[str, Any]] = [
    {"spec": "topk(0.2)"},
    {"spec": "dgc(0.2)"},
    {"spec": "int4", "exchange": "two_way"},
    {"spec": "qsgd", "exchange": "delayed"},
    {"spec": "powersgd(1)"},
    {"spec": "sign", "granularity": "model"},
]


def moved(
    before: tuple[list[nn.Sequential], gradwire.SimulatedWorkers], world: int, across: Any, folder: Path, **options: Any
) -> tuple[list[nn.Sequential], gradwire.SimulatedWorkers]:
    """The same training in another arrangement."""
    nets, workers = before
    for wire in workers.wires:
        gradwire.save(wire, folder)
    copies, after = fixtures.replicas(world, across=across, **options)
    for copy, wire in zip(copies, after.wires, strict=True):
        copy.load_state_dict(nets[0].state_dict())
        gradwire.load(wire, folder)
    return copies, after


def trained(world: int, across: Any, **options: Any) -> tuple[list[nn.Sequential], gradwire.SimulatedWorkers]:
    nets, workers = fixtures.replicas(world, across=across, **options)
    fixtures.march(nets, workers, range(5))
    return nets, workers


@pytest.mark.parametrize("options", METHODS, ids=lambda options: str(options["spec"]))
def test_ten_steps_are_five_and_five(options: dict[str, Any], tmp_path: Path):
    nets, workers = trained(4, HOSTS, **options)
    copies, after = moved((nets, workers), 4, HOSTS, tmp_path, **options)
    for replicas, group in ((nets, workers), (copies, after)):
        fixtures.march(replicas, group, range(5, 10))
    for net, copy, wire, other in zip(nets, copies, workers.wires, after.wires, strict=True):
        assert fixtures.same(fixtures.tensors(net), fixtures.tensors(copy))
        assert fixtures.same(wire.state_dict(), other.state_dict())


ARRANGEMENTS = {"flat": (3, None), "2x2": (4, HOSTS), "1x3": (3, "hosts"), "3x2": (6, [[0, 3], [1, 4], [2, 5]])}


@pytest.mark.parametrize(
    ("old", "new"), [("flat", "2x2"), ("2x2", "flat"), ("2x2", "3x2"), ("3x2", "1x3"), ("1x3", "2x2")]
)
@pytest.mark.parametrize("options", METHODS, ids=lambda options: str(options["spec"]))
def test_the_pending_update_is_conserved(options: dict[str, Any], old: str, new: str, tmp_path: Path):
    before = trained(*ARRANGEMENTS[old], **options)
    copies, after = moved(before, *ARRANGEMENTS[new], tmp_path, **options)
    owed, kept = fixtures.mean_debt(before[1].wires), fixtures.mean_debt(after.wires)
    for name in owed:
        torch.testing.assert_close(kept[name], owed[name], rtol=1e-5, atol=1e-7, msg=name)
    fixtures.march(copies, after, range(5, 7))
    assert all(fixtures.same(fixtures.tensors(copy), fixtures.tensors(copies[0])) for copy in copies)
    if new == "1x3":
        assert all(not x.any() for name, x in fixtures.mean_debt(after.wires).items()) or "delayed" in str(options)


@pytest.mark.parametrize("options", METHODS, ids=lambda options: str(options["spec"]))
def test_more_ranks_on_the_same_hosts_change_nothing(options: dict[str, Any], tmp_path: Path):
    """A host owes what it owed, whichever of its ranks keeps the account."""
    nets, workers = trained(2, [[0], [1]], **options)
    _, after = moved((nets, workers), 6, [[0, 1, 2], [3, 4, 5]], tmp_path / "3", **options)
    _, again = moved((nets, after), 2, None, tmp_path / "1", **options)
    for wire, other in zip(workers.wires, again.wires, strict=True):
        assert fixtures.same(wire.state_dict(), other.state_dict())


def test_another_spec_changes_no_hands():
    nets, workers = trained(4, HOSTS, spec="topk(0.1)", rules=(gradwire.Rule("sign", "2.*", granularity="model"),))
    owed = fixtures.mean_debt(workers.wires)
    for change in (
        lambda wire: wire.set("int4", exchange="two_way"),
        lambda wire: wire.set("powersgd(2)"),
        lambda wire: wire.off(),
    ):
        for wire in workers.wires:
            change(wire)
        kept = fixtures.mean_debt(workers.wires)
        for name in owed:
            torch.testing.assert_close(kept[name], owed[name], rtol=1e-5, atol=1e-7, msg=name)
    fixtures.march(nets, workers, range(5, 6))
    assert all(not debt.any() for debt in fixtures.mean_debt(workers.wires).values()), "off pays at once"


# -- which ranks share a host ------------------------------------------------------------------------------------------


def test_ranks_of_a_host_share_the_work():
    net = nn.Sequential(nn.Linear(40, 40), *(nn.Linear(10, 10) for _ in range(16)))
    sizes = {name: p.numel() for name, p in net.named_parameters()}
    workers = gradwire.lockstep([net, net, net, net], "topk(0.1)", across=HOSTS, bundle=None)
    served = [[name for lane in wire.session.plan.lanes for name in lane.tensors.names] for wire in workers.wires[:2]]
    assert sorted(served[0] + served[1]) == sorted(sizes)
    loads = [sum(map(sizes.__getitem__, names)) for names in served]
    assert loads == pytest.approx([sum(sizes.values()) / 2] * 2, rel=0.02)


def test_hosts_are_found_in_the_environment():
    assert HostLayout.found([(0, 2), (1, 2), (0, 2), (1, 2)]) == HostLayout.of(HOSTS)
    assert HostLayout.found([(0, 1)] * 3).hosts == ((0,), (1,), (2,))
    for places, words in (
        ([(0, 2), (0, 2), (1, 2), (1, 2)], ("do not follow each other", "across=[[0, 1], [2, 3]]")),
        ([(0, 2), (1, 2), (0, 1)], ("not equally large",)),
        ([(0, 1), None], ("rank 1", "LOCAL_RANK")),
        ([(0, 3), (1, 3)], ("rank 0 is one of 3",)),
    ):
        said = fixtures.sentence(lambda places=places: HostLayout.found(places))
        assert all(word in said for word in words), said
    for groups, word in (
        ([[0, 1], [2]], "equally large"),
        ([[0, 1], [1, 2]], "every rank from 0 on once"),
        ([[0, 3], [1, 2]], "interlaced"),
        ([], "every rank"),
    ):
        assert word in fixtures.sentence(lambda groups=groups: HostLayout.of(groups))
    assert HostLayout.of([[3, 1], [2, 0]]).hosts == ((0, 2), (1, 3))


def attached(rank: int, world: int, monkey: dict[str, str]) -> dict[str, str]:
    """Hosts from the environment, with a thin link between them; and what ranks hear who ask different things."""
    os.environ |= monkey | {"LOCAL_RANK": str(rank % 2)}
    net = fixtures.model()
    wire = gradwire.compress(net, "topk(0.1)", across="hosts")
    assert wire.link.grouping == HostLayout.of(HOSTS[: world // 2])
    fixtures.plain(net, wire, fixtures.sgd(net), range(2), rank)
    assert wire.report().hosts == world // 2
    assert isinstance(wire.link.between, EmulatedBackend) and not isinstance(wire.link.local, EmulatedBackend)
    return {
        "different": fixtures.sentence(lambda: gradwire.compress(net, "topk(0.1)", across="hosts" if rank else HOSTS)),
        "one alone": fixtures.sentence(lambda: gradwire.compress(net, "topk(0.1)", across=None if rank else "hosts")),
        "unknown": fixtures.sentence(lambda: gradwire.compress(net, "topk(0.1)", across="racks")),
        "no list": fixtures.sentence(lambda: gradwire.compress(net, "topk(0.1)", across=5 if rank else "hosts")),
        "too few": fixtures.sentence(lambda: gradwire.compress(net, "topk(0.1)", across=[[0], [1]])),
    }


def test_what_cannot_be_is_refused_everywhere():
    answers = run_ranks(attached, 4, {"LOCAL_WORLD_SIZE": "2", "GRADWIRE_LINK": "1gbit"})
    words = {
        "different": "another spec than rank 0",
        "one alone": "another spec than rank 0",
        "unknown": "across='racks' is unknown",
        "no list": "not iterable",
        "too few": "has 2 ranks, and there are 4",
    }
    for answer in answers:
        for case, word in words.items():
            assert word in answer[case], answer[case]
