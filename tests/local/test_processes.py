"""Local steps in real processes: equal to lockstep, and resumed inside a round."""

from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fixtures
import gradwire
import local_fixtures
from gradwire.integrations.consistency import devices_differ
from gradwire.integrations.local import round_length
from gradwire.integrations.setup import Setup
from spawn import Answers, cases_fixture, run_ranks

WORLD, STEPS = 3, 7
CASES: dict[str, dict[str, Any]] = {
    "sparseloco": {"spec": "sparseloco(H=2, k=4, chunk=32)", "bundle": None},
    "a start": {"spec": "sparseloco(H=2, k=4, chunk=32, start=3)", "bundle": None},
    "int8": {"spec": "diloco(H=3)", "codec": "int8", "exchange": "two_way", "bundle": None},
    "a delay": {
        "spec": "diloco(H=3, alpha=0.5, delay=2)",
        "codec": "topk(0.1) | sign",
        "exchange": "allgather",
        "bundle": None,
    },
    "fragments": {
        "spec": "streaming_diloco(H=4, fragments=2, values=int8, delay=2)",
        "exchange": "allgather",
        "bundle": None,
    },
    "phases": {"spec": "sparseloco(H=2, k=4, chunk=32, start=3, first={0: None, 1: int8, 2: int4})", "bundle": None},
    "kept errors": {"spec": "sparseloco(H=2, k=4, chunk=32, keep=1.0, start=2)", "bundle": None},
    "a schedule": {
        "spec": "local_schedule({0: sparseloco(H=1, k=4, chunk=32, keep=1.0), 3: sparseloco(H=2, k=4, chunk=32)})",
        "bundle": None,
    },
    "random bits": {"spec": "local_sgd(H=2)", "codec": "qsgd", "exchange": "allgather", "bundle": None},
}


def optimizer_of(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def take_steps(net: Any, optimizer: Any, outer: Any, rank: int, steps: range, same: bool = False) -> None:
    """With ``same``, batches are those of rank 0 where nothing is sent."""
    for step in steps:
        optimizer.zero_grad()
        fixtures.loss(net, 0 if same and outer.same_batches else rank, step).backward()
        optimizer.step()
        outer()


def account(outer: gradwire.LocalSync) -> dict[str, torch.Tensor]:
    report = outer.report()
    numbers = [report.sent, report.payload, report.rounds.sent, report.local_steps, report.start_steps]
    return {"account": torch.tensor(numbers, dtype=torch.float64)}


def train_process(rank: int, world: int, case: dict[str, Any]) -> dict[str, torch.Tensor]:
    net = fixtures.model(seed=rank)  # they start as rank 0
    optimizer = optimizer_of(net)
    outer = gradwire.local(net, optimizer, **case)
    take_steps(net, optimizer, outer, rank, range(STEPS), same=True)
    return {**outer.state_dict(), **account(outer)}


answers = cases_fixture(train_process, WORLD, CASES)


@pytest.mark.parametrize("case", CASES)
def test_lockstep_equals_processes_bit_for_bit(case: str, answers: Answers) -> None:
    nets = [fixtures.model() for _ in range(WORLD)]
    optimizers = [optimizer_of(net) for net in nets]
    outer = gradwire.local_lockstep(nets, optimizers, **CASES[case])
    local_fixtures.train(nets, optimizers, outer, range(STEPS), same=True)
    for mine, real in zip(outer.ranks, answers[case], strict=True):
        assert fixtures.same({**mine.state_dict(), **account(mine)}, real)


def resume(rank: int, world: int, folder: str, spec: str, stop: int) -> tuple[Any, Any]:
    """A run without a break, and one that stops inside a round and goes on in new objects."""
    net = fixtures.model()
    optimizer = optimizer_of(net)
    outer = gradwire.local(net, optimizer, spec)
    take_steps(net, optimizer, outer, rank, range(stop))
    gradwire.save(outer, folder)
    moments = deepcopy(optimizer.state_dict())
    again = fixtures.model(seed=5)
    second = optimizer_of(again)
    resumed = gradwire.local(again, second, spec)
    gradwire.load(resumed, folder)
    second.load_state_dict(moments)
    take_steps(again, second, resumed, rank, range(stop, 12))
    take_steps(net, optimizer, outer, rank, range(stop, 12))
    return outer.state_dict(), resumed.state_dict()


@pytest.mark.parametrize(
    ("spec", "stop"),
    [
        ("sparseloco(H=5, k=4, chunk=32)", 7),
        ("sparseloco(H=5, k=4, chunk=32, keep=0.5)", 7),
        ("diloco(H=5)", 7),
        ("local_schedule({0: diloco(H=2), 4: diloco(H=3, rate=0.5)})", 6),
        ("diloco(H=3, start=4)", 2),
        ("diloco(H=3, start=4)", 9),
        ("diloco(H=3, start=4, first=None)", 2),
        ("diloco(H=3, start=6, first={0: None, 2: int8, 4: int4})", 1),
        ("diloco(H=3, start=6, first={0: None, 2: int8, 4: int4})", 3),
        ("diloco(H=3, start=6, first={0: int4, 2: None, 4: int4})", 5),
        ("diloco(H=4, alpha=0.5, delay=2)", 5),
        ("streaming_diloco(H=4, fragments=2, delay=2)", 7),
    ],
)
def test_a_run_goes_on_inside_a_round_bit_for_bit(spec: str, stop: int, tmp_path: Path) -> None:
    for through, resumed in run_ranks(resume, 2, str(tmp_path), spec, stop):
        assert fixtures.same(through, resumed)


def fail_on_one(rank: int, world: int) -> list[str]:
    net = fixtures.model()
    spec = "local_sgd(H=2)" if rank else "local_sgd(H=3)"
    different = fixtures.error_text(lambda: gradwire.local(net, fixtures.sgd(net), spec))
    wrong = fixtures.error_text(lambda: gradwire.local(net, fixtures.sgd(net), "topk(0.1)" if rank else "diloco"))
    return [different, wrong]


def test_ranks_that_differ_are_refused_on_all_ranks() -> None:
    for different, wrong in run_ranks(fail_on_one, 2):
        assert "ValueError" in different and "H=2" in different and "H=3" in different
        assert "ValueError" in wrong and "topk(0.1)" in wrong


def across_hosts(rank: int, world: int) -> dict[str, torch.Tensor]:
    net = fixtures.model()
    optimizer = optimizer_of(net)
    outer = gradwire.local(net, optimizer, "diloco(H=2)", across=[[0, 1], [2, 3]])
    take_steps(net, optimizer, outer, rank, range(6))
    return fixtures.tensors(net)


def ddp_inside(rank: int, world: int) -> tuple[str, dict[str, torch.Tensor]]:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    net = DistributedDataParallel(fixtures.model(), process_group=groups[rank // 2])
    optimizer = optimizer_of(net)
    outer = gradwire.local(net, optimizer, "diloco(H=2)", across=[[0, 1], [2, 3]])
    take_steps(net, optimizer, outer, rank, range(6))
    whole = DistributedDataParallel(fixtures.model())
    refused = fixtures.error_text(lambda: gradwire.local(whole, optimizer_of(whole), "diloco(H=2)"))
    return refused, fixtures.tensors(net.module)


def test_ddp_inside_hosts_and_local_steps_between_them() -> None:
    nets = [fixtures.model() for _ in range(2)]
    optimizers = [optimizer_of(net) for net in nets]
    outer = gradwire.local_lockstep(nets, optimizers, "diloco(H=2)")
    for step in range(6):
        for host, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            optimizer.zero_grad()
            both = [fixtures.loss(net, 2 * host + local, step) for local in range(2)]
            torch.stack(both).mean().backward()
            optimizer.step()
        outer()
    for refused, real in run_ranks(ddp_inside, 4):
        assert "DistributedDataParallel" in refused
        for name, p in nets[0].named_parameters():
            torch.testing.assert_close(real[name], p.detach(), rtol=1e-3, atol=1e-4)


def test_rounds_between_hosts_average_inside_hosts() -> None:
    nets = [fixtures.model() for _ in range(4)]
    optimizers = [optimizer_of(net) for net in nets]
    outer = gradwire.local_lockstep(nets, optimizers, "diloco(H=2)")
    for step in range(6):
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            optimizer.zero_grad()
            fixtures.loss(net, rank, step).backward()
            optimizer.step()
        outer()
    for mine, real in zip(nets, run_ranks(across_hosts, 4), strict=True):
        for name, p in mine.named_parameters():
            torch.testing.assert_close(real[name], p.detach(), rtol=1e-4, atol=1e-5)


def uneven(rank: int, world: int, folder: str) -> tuple[list[int], list[dict[str, torch.Tensor]]]:
    """Rank 1 takes three times as long for a step. A run without a break, and one that stops inside a round."""
    found = []
    net, again = fixtures.model(), fixtures.model(seed=5)
    first, second = optimizer_of(net), optimizer_of(again)
    outer, other = (gradwire.local(a, b, "diloco(H=4)", uneven=True) for a, b in ((net, first), (again, second)))
    for one in (outer, other):
        one.uneven_steps.seconds_per_step = lambda: 1.0 + 2.0 * rank  # type: ignore[union-attr, method-assign]
    take_steps(net, first, outer, rank, range(4))
    steps = list(outer.uneven_steps.steps)  # type: ignore[union-attr]
    take_steps(net, first, outer, rank, range(4, 4 + steps[rank] // 2))
    gradwire.save(outer, folder)
    moments = deepcopy(first.state_dict())
    dist.barrier()  # all ranks have saved
    gradwire.load(other, folder)
    assert outer.rounds == other.rounds == 1
    second.load_state_dict(moments)
    for a, b, c in ((net, first, outer), (again, second, other)):
        take_steps(a, b, c, rank, range(c.steps, 4 + steps[rank]))  # the state has the place in this rank's data
        found.append({name: x.detach() for name, x in c.outer.weights.items()})
    return steps, found


def test_slow_ranks_take_fewer_steps_and_count_for_less(tmp_path: Path) -> None:
    nets = [fixtures.model() for _ in range(2)]
    optimizers = [optimizer_of(net) for net in nets]
    w, b = [p.detach().clone() for p in nets[0].parameters()], [torch.zeros(()) for _ in nets[0].parameters()]
    for ends in ((4, 4), (10, 6)):  # rounds of 4 and 4 steps, then of 6 and 2
        differences = []
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            begun = 0 if ends == (4, 4) else 4
            take_steps(net, optimizer, lambda: None, rank, range(begun, ends[rank]))
            weight = (ends[rank] - begun) / 4
            differences.append([weight * (x - p.detach()) for x, p in zip(w, net.parameters(), strict=True)])
        for i, (one, two) in enumerate(zip(*differences, strict=True)):
            g = (one + two) / 2
            b[i] = 0.9 * b[i] + g
            w[i] = w[i] - 0.7 * (g + 0.9 * b[i])
        for net in nets:
            for p, x in zip(net.parameters(), w, strict=True):
                p.data.copy_(x)
    for steps, (through, resumed) in run_ranks(uneven, 2, str(tmp_path)):
        assert steps == [6, 2] and fixtures.same(through, resumed)
        for mine, x in zip(through.values(), w, strict=True):
            torch.testing.assert_close(mine, x, rtol=1e-4, atol=1e-5)


def by_the_clock(rank: int, world: int) -> tuple[int, list[int], float]:
    """A step of rank 1 takes four times as long. The loop ends after as many rounds on all ranks."""
    net, clock = fixtures.model(), [0.0]
    round_length.time = SimpleNamespace(perf_counter=lambda: clock[0])  # type: ignore[assignment]
    optimizer = optimizer_of(net)
    outer = gradwire.local(net, optimizer, "diloco(H=6)", uneven=True)
    assert outer.uneven_steps is not None
    send = outer.fragments[0].wire.sync

    def wait_and_send(differences: Any) -> Any:
        clock[0] += 0.0 if rank else 1.0
        return send(differences)

    outer.fragments[0].wire.sync = wait_and_send  # type: ignore[method-assign]
    while outer.rounds < 3:
        clock[0] += 0.04 if rank else 0.01
        take_steps(net, optimizer, outer, rank, range(outer.steps, outer.steps + 1))
    return outer.steps, outer.uneven_steps.steps, outer.report().payload_ratio


def test_a_slow_rank_takes_fewer_steps_though_the_other_waits_for_it() -> None:
    (fast, steps, ratio), (slow, same, other) = run_ranks(by_the_clock, 2)
    assert steps == same == [10, 2] and (fast, slow) == (6 + 10 + 10, 6 + 2 + 2)
    assert ratio == other, "that of the training, whichever rank tells it"


def uneven_senders(rank: int, world: int) -> tuple[int, torch.Tensor]:
    """Rank 0 takes six steps, rank 1 two; each moves, and sends, one entry of its own."""
    net = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    options = {"codec": "topk(0.25) | fp32", "feedback": "residual", "bundle": None}
    outer = gradwire.local(net, torch.optim.SGD(net.parameters(), lr=1.0), "sparseloco(H=4)", uneven=True, **options)
    assert str(outer.method.message.exchange) == "allgather(mean='senders')" and outer.uneven_steps is not None
    outer.uneven_steps.steps = [6, 2]
    steps = outer.uneven_steps.own
    for _ in range(steps):
        with torch.no_grad():
            net.weight[0, rank] += 0.5
        outer()
    return steps, net.weight.detach()[0]


def test_an_entry_of_one_uneven_rank_moves_as_that_rank_moved_it() -> None:
    (six, one), (two, other) = run_ranks(uneven_senders, 2)
    assert (six, two) == (6, 2)
    assert one.tolist() == other.tolist() == [3.0, 1.0, 0.0, 0.0]


def on_unlike_devices(rank: int, world: int) -> tuple[str, list[dict[str, torch.Tensor]]]:
    """Rank 1 claims to have another device, and its inner optimizer rounds differently in the start."""
    claimed = torch.device("meta" if rank else "cpu")
    net, refused = fixtures.model(), ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Setup, "device", claimed)
        try:
            gradwire.compress(fixtures.model(), "int8")
        except ValueError as error:
            refused = str(error)
    optimizer = optimizer_of(net)
    outer = gradwire.local(net, optimizer, "sparseloco(H=2, k=4, chunk=32, start=3)")
    outer.start.mixed = devices_differ(outer.link, claimed)
    found = []
    for step in range(5):
        optimizer.zero_grad()
        fixtures.loss(net, rank, step).backward()
        optimizer.step()
        if step < 3:
            with torch.no_grad():
                net[0].bias.add_(1e-6 * rank)
        outer()
        found.append({name: x.detach().clone() for name, x in outer.outer.weights.items()})
    return refused, found


def test_unlike_devices_agree_after_the_start_and_are_refused_where_they_would_not() -> None:
    (error, first), (other, second) = run_ranks(on_unlike_devices, 2)
    assert "device meta" in error and "device cpu" in error and error == other
    assert not fixtures.same(first[1], second[1])  # inside the start
    assert all(fixtures.same(a, b) for a, b in zip(first[2:], second[2:], strict=True))
