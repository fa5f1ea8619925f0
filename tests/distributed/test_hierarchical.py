"""Compression between hosts only: a host sends what a single rank with the mean gradient of the host would send."""

import math
import os
import re
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.test_entry_points import by_hook, by_loop, by_optimizer
from tests.distributed.test_gradscaler import BAD_STEP, ENTRY_POINTS, STEPS, train, unscaled
from tests.distributed.test_nonfinite import one_door
from tests.distributed.test_unused import Branches, Trained, check_step, check_trained, step_of
from torch import Tensor, nn

import fixtures
import gradwire
from gradwire.comm.emulated import EmulatedBackend
from gradwire.comm.host_layout import HostLayout
from gradwire.engine.gradients import Grads
from gradwire.engine.step import Engine
from spawn import Answers, cases_fixture

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
    """several buckets, so that some ranks of a host have no parameter in some of them."""
    return {**options, "bucket_mb": fixtures.BUCKET_MB}


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
            fixtures.sgd_step(net)
    return nets, workers


# -- what it computes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", SPECS, ids=lambda options: str(options["spec"]))
def test_hosts_are_ranks_with_mean_gradients(options: dict[str, Any]):
    """Bit for bit: parameters, and all memories, of which each rank of a host holds its share."""
    nets, workers = fixtures.replicas(4, across=HOSTS, **short(options))
    fixtures.train_steps(nets, workers, range(fixtures.STEPS))
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
        # A rank without parameters in a bucket still sends a status.
        assert 0 <= sum(report.sent for report in sent) - single.report().sent <= 40 * fixtures.STEPS


@pytest.mark.parametrize("options", [SPECS[3], *SPECS[2::2]], ids=lambda options: str(options["spec"]))
def test_one_rank_a_host_is_flat(options: dict[str, Any]):
    nets, workers = fixtures.replicas(3, across=[[0], [1], [2]], **short(options))
    others, flat = fixtures.replicas(3, **short(options))
    for replicas, group in ((nets, workers), (others, flat)):
        fixtures.train_steps(replicas, group, range(fixtures.STEPS))
    for wire, other in zip(workers.wires, flat.wires, strict=True):
        assert fixtures.same(wire.state_dict(), other.state_dict())
        assert astuple(wire.link.traffic) == pytest.approx(astuple(other.link.traffic))
        assert wire.report().sent_inside == 0
    assert fixtures.same(fixtures.tensors(nets[0]), fixtures.tensors(others[0]))


def test_one_rank_a_host_clips_as_plain_ranks_do(monkeypatch: pytest.MonkeyPatch):
    """By the norm of the same gradients, to the last bit of a double, which float32 weights do not show."""
    names, found = dict(fixtures.model().named_parameters()).keys(), list[float]()
    of_engine = Engine.gradient_factor

    def recorded(engine: Engine, grads: Grads, unscale: float = 1.0) -> float:
        factor = of_engine(engine, grads, unscale)
        if grads.keys() == names:  # not of kernels that are compiled ahead
            found.append(factor)
        return factor

    monkeypatch.setattr(Engine, "gradient_factor", recorded)
    for across in ([[0], [1]], None):
        nets, workers = fixtures.replicas(2, "dgc(0.1, clip=0.01)", across=across)
        fixtures.train_steps(nets, workers, range(2))
    assert len(found) == 8 and found[:4] == found[4:] and all(0 < factor < 1 for factor in found)


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
            fixtures.sgd_step(net)
    reports = [wire.report() for wire in workers.wires]
    assert all(report.sent == 0 for report in reports)
    ring = 2 * 3 / 4 * 4 * 445
    assert sum(report.sent_inside for report in reports) == pytest.approx(4 * 3 * ring, rel=0.02)
    assert all(not debt.any() for wire in workers.wires for debt in wire.debts().values())


def _grads(net: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in net.parameters()]


def in_processes(rank: int, world: int, options: dict[str, Any]) -> list[Any]:
    """The same by gloo, through every entry point: parameters, state, and bytes between and inside hosts."""
    trained = []
    for entry_point in (by_loop, by_hook, by_optimizer):
        tensors, wire = entry_point(rank, {**short(options), "across": HOSTS})
        trained.append((tensors, wire.state_dict(), wire.link.traffic, wire.link.inside))
    return trained


def train_with_sgd(nets: list[nn.Sequential], workers: gradwire.SimulatedWorkers) -> None:
    """Train replicas in lockstep, with the optimizer that processes use."""
    for step in range(fixtures.STEPS):
        for rank, net in enumerate(nets):
            net.zero_grad()
            fixtures.loss(net, rank, step).backward()
        workers()
        for net in nets:
            fixtures.sgd(net).step()


PROCESSES = fixtures.by_name(*(options for options in SPECS if options["spec"] in IN_PROCESSES))
processes = cases_fixture(in_processes, 4, PROCESSES)


@pytest.mark.parametrize("case", PROCESSES)
def test_processes_are_lockstep_bit_for_bit(case: str, processes: Answers):
    """With two hosts, sums do not depend on the order."""
    nets, workers = fixtures.replicas(4, across=HOSTS, **short(PROCESSES[case]))
    train_with_sgd(nets, workers)
    for ran, net, wire in zip(processes[case], nets, workers.wires, strict=True):
        for tensors, state, traffic, inside in ran:
            assert fixtures.same(tensors, fixtures.tensors(net))
            assert fixtures.same(state, wire.state_dict())
            assert (traffic, inside) == (wire.link.traffic, wire.link.inside)


# -- bad and missing gradients -----------------------------------------------------------------------------------------

BROKEN = fixtures.by_name(
    {"spec": "topk(0.1)", "bundle": None},
    {"spec": "powersgd(2)"},
    {"spec": "int4", "exchange": "two_way"},
    # The bad layer is in a bucket, and on a rank, that sends nothing of its own.
    {"spec": "topk(0.1)", "rules": (gradwire.Rule("int8", "2.*", exchange="noop"),)},
)


def drop(rank: int, options: dict[str, Any]) -> list[dict[str, Tensor]]:
    value = math.nan if "bundle" in options or "exchange" in options else math.inf
    return [fixtures.tensors(one_door(door, rank, value, options)[0]) for door in ("plain", "hook")]


OVERFLOWING = fixtures.by_name(
    {"spec": "topk(0.1)"}, {"spec": "dgc(0.1, clip=0.2)"}, {"spec": "int4", "exchange": "delayed"}
)


def overflow(rank: int, options: dict[str, Any]) -> tuple[Any, list[Any]]:
    trained = []
    for door in ENTRY_POINTS:
        net, wire, scales = train(door, rank, options, lambda step: rank == 1 and step == BAD_STEP)
        counts = wire.report().steps, wire.report().skipped
        trained.append((fixtures.tensors(net), fixtures.memories(wire), scales, counts))
    return unscaled(rank, options, BAD_STEP), trained


LACKING = fixtures.by_name({"spec": "topk(0.2)"}, {"spec": "int4", "exchange": "two_way"}, {"spec": "dgc(0.2)"})


def lack(rank: int, options: dict[str, Any]) -> Trained:
    net, inner = Branches(), Branches()
    outer = fixtures.ddp(inner, find_unused_parameters=True)
    plain, hook = gradwire.compress(net, **options), gradwire.compress(outer, **options)
    trained = Trained([], [])
    for step in range(fixtures.STEPS):
        before = fixtures.memories(plain)
        step_of(net, rank, step)
        plain()
        step_of(outer, rank, step)
        check_step(step, net, before, fixtures.memories(plain))
        for model in (net, inner):
            fixtures.sgd_step(model)
        trained.loop.append({**fixtures.tensors(net), **fixtures.memories(plain)})
        trained.hook.append({**fixtures.tensors(inner), **fixtures.memories(hook)})
    return trained


def sparse(rank: int, options: dict[str, Any]) -> str:
    net = fixtures.model()
    wire = gradwire.compress(net, **options)
    fixtures.loss(net, rank, 0).backward()
    if rank == 3:
        net[0].weight.grad = net[0].weight.grad.to_sparse()
    return fixtures.error_text(wire)


TROUBLE: dict[str, tuple[Any, dict[str, Any]]] = {
    **{f"not finite, {name}": (drop, options) for name, options in BROKEN.items()},
    **{f"overflow, {name}": (overflow, options) for name, options in OVERFLOWING.items()},
    **{f"missing, {name}": (lack, options) for name, options in LACKING.items()},
    "sparse": (sparse, {"spec": "topk(0.1)"}),
}


def trouble(rank: int, world: int, case: tuple[Any, dict[str, Any]]) -> Any:
    function, options = case
    return function(rank, {**short(options), "across": HOSTS})


troubles = cases_fixture(trouble, 4, TROUBLE)


@pytest.mark.parametrize("case", [case for case in TROUBLE if case.startswith("not finite")])
def test_a_bad_gradient_drops_the_step_on_all_hosts(case: str, troubles: Answers):
    rules = TROUBLE[case][1].get("rules", ())
    for plain, hook in troubles[case]:
        assert fixtures.same(plain, hook)
        for name, tensor in plain.items():
            if not (rules and name.startswith("2.")):  # noop averages within hosts only
                assert torch.equal(tensor, troubles[case][0][0][name]), name


@pytest.mark.parametrize("case", [case for case in TROUBLE if case.startswith("overflow")])
def test_an_overflow_skips_the_step_on_all_hosts(case: str, troubles: Answers):
    for (parameters, memories), trained in troubles[case]:
        for i, (found, state, scales, counts) in enumerate(trained):
            assert fixtures.same(found, parameters) and fixtures.same(state, memories), ENTRY_POINTS[i]
            assert scales == troubles[case][0][1][i][2], "scales drift apart"
            assert counts == (STEPS, 1)


@pytest.mark.parametrize("case", [case for case in TROUBLE if case.startswith("missing")])
def test_a_parameter_that_no_host_used_keeps_its_state(case: str, troubles: Answers):
    check_trained(troubles[case])


@pytest.mark.parametrize("case", ["sparse"])
def test_a_sparse_gradient_is_refused_on_all_hosts(case: str, troubles: Answers):
    *others, last = troubles[case]
    words = ("ValueError", "sparse")
    fixtures.check_message([*((text, (*words, "rank")) for text in others), (last, (*words, "'0.weight'"))])


def test_moments_are_of_all_samples_of_a_host():
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
    """The same training on other hosts."""
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
    fixtures.train_steps(nets, workers, range(5))
    return nets, workers


@pytest.mark.parametrize("options", METHODS, ids=lambda options: str(options["spec"]))
def test_ten_steps_are_five_and_five(options: dict[str, Any], tmp_path: Path):
    nets, workers = trained(4, HOSTS, **options)
    copies, after = moved((nets, workers), 4, HOSTS, tmp_path, **options)
    for replicas, group in ((nets, workers), (copies, after)):
        fixtures.train_steps(replicas, group, range(5, 10))
    for net, copy, wire, other in zip(nets, copies, workers.wires, after.wires, strict=True):
        assert fixtures.same(fixtures.tensors(net), fixtures.tensors(copy))
        assert fixtures.same(wire.state_dict(), other.state_dict())


ARRANGEMENTS = {"flat": (3, None), "2x2": (4, HOSTS), "1x3": (3, "hosts"), "3x2": (6, [[0, 3], [1, 4], [2, 5]])}


def mean_gradients(net: nn.Module, world: int, step: int) -> dict[str, Tensor]:
    grads = []
    for rank in range(world):
        net.zero_grad()
        fixtures.loss(net, rank, step).backward()
        grads.append({name: p.grad.double() for name, p in net.named_parameters()})
    return {name: torch.stack([grad[name] for grad in grads]).mean(0) for name in grads[0]}


@pytest.mark.parametrize(
    ("old", "new"), [("flat", "2x2"), ("2x2", "flat"), ("2x2", "3x2"), ("3x2", "1x3"), ("1x3", "2x2")]
)
@pytest.mark.parametrize("options", METHODS, ids=lambda options: str(options["spec"]))
def test_the_pending_update_is_conserved(options: dict[str, Any], old: str, new: str, tmp_path: Path):
    before = trained(*ARRANGEMENTS[old], **options)
    copies, after = moved(before, *ARRANGEMENTS[new], tmp_path, **options)
    old_error, new_error = fixtures.mean_pending_error(before[1].wires), fixtures.mean_pending_error(after.wires)
    for name in old_error:
        torch.testing.assert_close(new_error[name], old_error[name], rtol=1e-5, atol=1e-7, msg=name)
    fixtures.train_steps(copies, after, range(5, 6))
    means = mean_gradients(copies[0], len(copies), 6)
    fixtures.train_steps(copies, after, range(6, 7))
    assert all(fixtures.same(fixtures.tensors(copy), fixtures.tensors(copies[0])) for copy in copies)
    if new == "1x3":  # one host compresses nothing; with `delayed`, the last mean is still to come
        last = means if options.get("exchange") == "delayed" else dict.fromkeys(means, 0.0)
        for name, error in fixtures.mean_pending_error(after.wires).items():
            torch.testing.assert_close(error, torch.zeros_like(error) + last[name], rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("options", METHODS, ids=lambda options: str(options["spec"]))
def test_more_ranks_on_the_same_hosts_change_nothing(options: dict[str, Any], tmp_path: Path):
    """The errors of a host do not depend on how many ranks share them."""
    nets, workers = trained(2, [[0], [1]], **options)
    _, after = moved((nets, workers), 6, [[0, 1, 2], [3, 4, 5]], tmp_path / "3", **options)
    _, again = moved((nets, after), 2, None, tmp_path / "1", **options)
    for wire, other in zip(workers.wires, again.wires, strict=True):
        assert fixtures.same(wire.state_dict(), other.state_dict())


def test_a_change_of_spec_keeps_pending_errors():
    nets, workers = trained(4, HOSTS, spec="topk(0.1)", rules=(gradwire.Rule("sign", "2.*", granularity="model"),))
    before = fixtures.mean_pending_error(workers.wires)
    for change in (
        lambda wire: wire.set("int4", exchange="two_way"),
        lambda wire: wire.set("powersgd(2)"),
        lambda wire: wire.off(),
    ):
        for wire in workers.wires:
            change(wire)
        after = fixtures.mean_pending_error(workers.wires)
        for name in before:
            torch.testing.assert_close(after[name], before[name], rtol=1e-5, atol=1e-7, msg=name)
    fixtures.train_steps(nets, workers, range(5, 6))
    assert all(not debt.any() for debt in fixtures.mean_pending_error(workers.wires).values()), (
        "off delivers all errors at once"
    )


# -- which ranks share a host ------------------------------------------------------------------------------------------


def test_ranks_of_a_host_share_the_work():
    net = nn.Sequential(nn.Linear(40, 40), *(nn.Linear(10, 10) for _ in range(16)))
    sizes = {name: p.numel() for name, p in net.named_parameters()}
    workers = gradwire.lockstep([net, net, net, net], "topk(0.1)", across=HOSTS, bundle=None)
    served = [
        [name for lane in wire.engine.unwrapped.plan.lanes for name in lane.tensors.names] for wire in workers.wires[:2]
    ]
    assert sorted(served[0] + served[1]) == sorted(sizes)
    loads = [sum(map(sizes.__getitem__, names)) for names in served]
    assert loads == pytest.approx([sum(sizes.values()) / 2] * 2, rel=0.02)


def test_hosts_are_found_in_the_environment():
    assert HostLayout.from_launcher([(0, 2), (1, 2), (0, 2), (1, 2)]) == HostLayout.of(HOSTS)
    assert HostLayout.from_launcher([(0, 1)] * 3).hosts == ((0,), (1,), (2,))
    assert HostLayout.of([[3, 1], [2, 0]]).hosts == ((0, 2), (1, 3))


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ([(0, 2), (0, 2), (1, 2), (1, 2)], ("across=[[0, 1], [2, 3]]",)),
        ([(0, 2), (1, 2), (0, 1)], ("host",)),
        ([(0, 1), None], ("rank 1", "LOCAL_RANK")),
        ([(0, 3), (1, 3)], ("rank 0", "3")),
    ],
)
def test_an_environment_without_equal_hosts_is_refused(places: Any, words: tuple[str, ...]):
    fixtures.check_message([(fixtures.error_text(lambda: HostLayout.from_launcher(places)), ("ValueError", *words))])


@pytest.mark.parametrize("groups", [[[0, 1], [2]], [[0, 1], [1, 2]], [[0, 3], [1, 2]], []])
def test_groups_that_are_no_hosts_are_refused(groups: list[list[int]]):
    with pytest.raises(ValueError, match=re.escape(str(groups))):
        HostLayout.of(groups)


WRONG: dict[str, tuple[tuple[Any, Any], tuple[str, ...]]] = {  # across= of rank 0, and of the others
    "different": ((HOSTS, "hosts"), ("rank 0", "spec")),
    "rank 0 alone": (("hosts", None), ("rank 0", "spec")),
    "unknown": (("racks", "racks"), ("ValueError", "across='racks'")),
    "no list": (("hosts", 5), ("int", "iterable")),
    "too few": (([[0], [1]], [[0], [1]]), ("ValueError", "2 ranks", "4")),
}


def attached(rank: int, world: int, case: str) -> str:
    """An error of an attached group whose hosts are found in the environment."""
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank % 2), "GRADWIRE_LINK": "1gbit"}
    net = fixtures.model()
    if case in WRONG:
        across = WRONG[case][0][min(rank, 1)]
        return fixtures.error_text(lambda: gradwire.compress(net, "topk(0.1)", across=across))
    wire = gradwire.compress(net, "topk(0.1)", across="hosts")
    assert wire.link.host_layout == HostLayout.of(HOSTS)
    fixtures.plain_loop(net, wire, fixtures.sgd(net), range(2), rank)
    assert wire.report().hosts == 2
    assert isinstance(wire.link.between, EmulatedBackend) and not isinstance(wire.link.inside_host, EmulatedBackend)
    return fixtures.NO_ERROR


attaching = cases_fixture(attached, 4, {name: name for name in ("fine", *WRONG)})


@pytest.mark.parametrize("case", ["fine", *WRONG])
def test_hosts_that_ranks_cannot_agree_on_are_refused_on_all_ranks(case: str, attaching: Answers):
    words = WRONG[case][1] if case in WRONG else (fixtures.NO_ERROR,)
    fixtures.check_message([(text, words) for text in attaching[case]])
