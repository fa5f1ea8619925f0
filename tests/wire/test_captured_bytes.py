"""No dense tensor leaves: bytes counted outside the package agree with `wire.report()`, for every exchange.

Two counters that know nothing of our code watch the same steps. The first is a process group with gloo beneath it: all
that any thread hands to torch.distributed passes through it, and what it does not know it refuses. The second is the
kernel's: each rank lives in a network namespace of its own, whose interface counts frames.

The framing model, from one rank's report to what its interface counts:

    tx_bytes = sent + 144 * messages + 1448 * resent + 66 * tx_packets

- 66 bytes of headers open every frame: Ethernet 14, IPv4 20, TCP 20, and its timestamps 12. 1448 bytes of data fill it.
  An acknowledgement is a frame without data, or rides along with data that goes the other way; how many there are is a
  matter of timing. So frames are taken as counted, and must be at least as many as the data fills.
- 144 bytes of gloo go with each message: a header of 48 before the data, and one each for the notices by which sender
  and receiver find each other. Of W ranks, each sends 4 (W-1) messages in an all-reduce, 2 (W-1) in an all-gather, and
  W-1 in an all-to-all.
- Segments sent again (``resent``) are known to the namespace.
"""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.core.registry import registered
from gradwire.integrations.report import Report
from namespaces import FRAME, SEGMENT, Counters, Unavailable, enter, meet, namespaces, read
from spawn import COLLECTIVE_TIMEOUT, run_ranks

STEPS = {2: 2, 4: 1}  # by world
MESSAGE = 144  # bytes of gloo's with each message
MESSAGES = {"allreduce": 4, "allgather": 2, "alltoall": 1, "broadcast": 1}  # of each rank, for each of its peers


class Case(NamedTuple):
    """A spec, an exchange, and rows enough for a payload of a megabyte."""

    spec: str
    exchange: str | None
    rows: int


CASES = {
    "allgather": Case("topk(0.06)", "allgather", 2048),
    "allreduce": Case("randomk(0.0625)", "allreduce", 2048),
    "auto": Case("int4", "auto", 1024),
    "delayed": Case("int4", "delayed(inner=two_way)", 1024),
    "majority": Case("sign", "majority", 4096),
    "noop": Case("int4", "noop", 1024),
    "powersgd": Case("powersgd(48)", None, 2048),
    "two_way": Case("int4", "two_way", 1024),
}
DOORS = ("loop", "ddp")


class Model(nn.Module):
    """Two matrices and a vector; the input is the matrices' gradient."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.zeros(rows // 2, 2048) for _ in range(2))
        self.vector = nn.Parameter(torch.zeros(100))

    def forward(self, x: Tensor) -> Tensor:
        return sum((x * matrix).sum() for matrix in self.matrices) + self.vector.sum()


class Capture(dist.ProcessGroup):
    """Gloo, counted. An operation that is not defined here fails, since the group has no backend for it."""

    notes: list[tuple[str, int, float]] = []  # noqa: RUF012 - operation, bytes of its tensor, bytes sent

    def __init__(self, store: dist.Store, rank: int, world: int, timeout: Any) -> None:
        super().__init__(rank, world)
        self.gloo = dist.ProcessGroupGloo(store, rank, world, timeout)

    def note(self, operation: str, tensor: Tensor, copies: float) -> None:
        n = tensor.numel() * tensor.element_size()
        self.notes.append((operation, n, copies * n))

    def allreduce(self, tensors: list[Tensor], options: Any) -> dist.Work:
        (x,) = tensors
        self.note("allreduce", x, 2 * (self.size() - 1) / self.size())
        return self.gloo.allreduce(tensors, options)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any) -> dist.Work:
        (x,) = inputs
        self.note("allgather", x, self.size() - 1)
        return self.gloo.allgather(outputs, inputs, options)

    def all_gather_single(self, output: Tensor, x: Tensor, options: Any) -> dist.Work:
        self.note("allgather", x, self.size() - 1)
        return self.gloo._allgather_base(output, x, options)

    def all_to_all_single(self, output: Tensor, x: Tensor, into: list[int], out: list[int], options: Any) -> dist.Work:
        kept = out[self.rank()] / x.numel()
        self.note("alltoall", x, 1 - kept)
        return self.gloo.alltoall_base(output, x, into, out, options)

    def broadcast(self, tensors: list[Tensor], options: Any) -> dist.Work:
        (x,) = tensors
        self.note("broadcast", x, 1)
        return self.gloo.broadcast(tensors, options)

    # The names by which older versions of torch, and its C++ side, call the same.
    _allgather_base = all_gather_single
    alltoall_base = all_to_all_single


class Account(NamedTuple):
    """One rank's steps: as reported, as handed to torch, and as the kernel counted them."""

    report: Report
    captured: list[tuple[str, int, float]]
    counted: Counters | None


def watch(rank: int, world: int, folder: str, names: list[str] | None) -> dict[tuple[str, str], Account]:
    """Train through every exchange and door, in the namespace that bears my name, if any."""
    store = dist.FileStore(f"{folder}/meeting", world)  # a file, so that rendezvous stays off the interfaces
    meet(store, world, "begun")  # a rank may still be connecting to the group that is destroyed now
    dist.destroy_process_group()
    if names is not None:
        enter(names[rank])
    dist.Backend.register_backend("capture", Capture, devices=["cpu"])
    dist.init_process_group("capture", store=store, rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT)
    accounts = {}
    for name, case in CASES.items():
        for door in DOORS:
            begun, ended = [f"{name}, {door}, {moment}" for moment in ("begun", "ended")]
            steps = take_steps(STEPS[world], case, door, rank)
            next(steps)
            Capture.notes.clear()
            meet(store, world, begun)  # what was sent before has arrived everywhere
            before = read() if names is not None else None
            meet(store, world, begun + ", read")
            report = next(steps)
            meet(store, world, ended)
            counted = read().since(before) if before is not None else None
            meet(store, world, ended + ", read")
            accounts[name, door] = Account(report, list(Capture.notes), counted)
    return accounts


def take_steps(num_steps: int, case: Case, door: str, rank: int, **options: Any) -> Iterator[Any]:
    """Attach; when asked on, take the steps, and report."""
    model = Model(case.rows)
    x = torch.randn(model.matrices[0].shape, generator=torch.Generator().manual_seed(rank))
    # Weights are zeros on all ranks: nothing to broadcast.
    trained = DistributedDataParallel(model, bucket_cap_mb=4, init_sync=False) if door == "ddp" else model
    wire = gradwire.compress(trained, case.spec, exchange=case.exchange, bucket_mb=4, **options)  # several buckets
    yield
    for _ in range(num_steps):
        model.zero_grad()
        trained(x).backward()
        if door == "loop":
            wire()
    yield wire.report()


@pytest.fixture(
    scope="module", params=[pytest.param(2, marks=pytest.mark.study), 4], ids=["world2", "world4"]
)  # two ranks say little that four do not
def watched(request: pytest.FixtureRequest) -> Iterator[tuple[list[dict[tuple[str, str], Account]], str]]:
    """What every rank saw, and why the kernel did not count, if so."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        names, why = None, ""
        try:
            names = stack.enter_context(namespaces(request.param))
        except Unavailable as reason:
            why = str(reason)
        yield run_ranks(watch, request.param, folder, names), why


def test_every_exchange_is_counted():
    assert CASES.keys() == registered("exchange").keys()


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", CASES)
def test_no_tensor_is_dense(watched, name, door):
    for accounts in watched[0]:
        report, captured, _ = accounts[name, door]
        assert report.steps == STEPS[report.world]
        assert report.payload >= report.steps * 1e6 or name == "noop"
        assert max((n for _, n, _ in captured), default=0) < report.dense / report.steps / 7
        assert report.wire_ratio > 5


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", CASES)
def test_the_report_equals_the_bytes_given_to_torch(watched, name, door):
    for accounts in watched[0]:
        report, captured, _ = accounts[name, door]
        # DDP itself broadcasts a few numbers when it rebuilds its buckets.
        assert sum(sent for _, _, sent in captured) == pytest.approx(report.sent, rel=1e-3, abs=1000)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", CASES)
def test_the_report_equals_the_bytes_that_the_kernel_sent(watched, name, door):
    ranks, why = watched
    if why:
        pytest.skip(why)
    everywhere = [accounts[name, door] for accounts in ranks]
    resent = SEGMENT * sum(account.counted.resent for account in everywhere)
    for report, captured, counted in everywhere:
        gloo = MESSAGE * sum(MESSAGES[operation] for operation, _, _ in captured) * (len(ranks) - 1)
        error = (counted.data - report.sent - gloo) / max(report.sent, 1e6)
        print(f"{name:9} {door:4} {report.sent:8.0f} {counted.sent:8} {counted.sent_frames:5} {error:+.2%}")
        # Gloo sends fewer messages where a tensor is tiny: some leeway for an exchange that sends nothing else.
        assert counted.carried(report.sent + gloo, rel=0.03, leeway=5000), (counted, report.sent + gloo)
        assert counted.sent_frames >= 0.97 * report.sent / SEGMENT
        into = counted.received - FRAME * counted.received_frames
        assert into == pytest.approx(report.received + gloo, rel=0.03, abs=5000 + resent)
