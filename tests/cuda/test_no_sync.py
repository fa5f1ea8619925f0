"""A compressed step under DDP and NCCL never makes the host wait for the device, dropped steps included."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from spawn import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SPECS = [
    "dgc(0.01)",
    "topk(0.01)",
    "topk(0.01) | sign",
    "topk(0.01) | fp16",
    "sign",
    "ef_signsgd",
    "qsgd",
    "int4",
    "int8",
    "powersgd(2)",
    "randomk(0.1)",
    "terngrad",
    "fp16",
]
MORE = ["majority_vote", "natural", "onebit", "bf16", "int2", "dgc(0.01, nesterov=True)", "dgc(0.01, ramp=3)"]
MORE += ["chunk_topk(4)", "chunk_topk(4, chunk=512) | sign"]
PLAIN = ["dgc(0.01)", "topk(0.01) | sign", "ef_signsgd", "int4", "powersgd(2)", "qsgd"]


@contextmanager
def unwatched() -> Iterator[None]:
    """Whoever waits for the device in here is refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode is a prototype, torch says
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Loop:
    """A small model, under DDP unless the loop is plain, and batches that are there already."""

    def __init__(self, spec: str, plain: bool = False) -> None:
        torch.manual_seed(0)
        self.plain = plain
        self.net = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 10))
        self.net.cuda()
        self.ddp: nn.Module = self.net
        if not plain:
            self.ddp = DistributedDataParallel(self.net, gradient_as_bucket_view=True, bucket_cap_mb=0.2)
        self.wire = gradwire.compress(self.ddp, spec, launch_mb=0.3)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05)
        self.batch = torch.randn(16, 64, device="cuda")

    def step(self, times: Tensor | None = None) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        loss = self.ddp(self.batch).square().mean()
        (loss if times is None else loss * times).backward()
        if self.plain:
            self.wire()
        self.optimizer.step()

    def left(self) -> dict[str, Tensor]:
        memories = {key: x for key, x in self.wire.state_dict().items() if not key.startswith("gradwire/")}
        return memories | {name: p.detach().clone() for name, p in self.net.named_parameters()}


def alone(rank: int, world: int) -> None:
    watch(SPECS)


def alone_with_more(rank: int, world: int) -> None:
    watch(MORE)


def alone_and_plain(rank: int, world: int) -> None:
    watch(PLAIN, plain=True)


def watch(specs: list[str], plain: bool = False) -> None:
    dist.destroy_process_group()
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    bad = torch.tensor(torch.inf, device="cuda")
    for spec in specs:
        loop = Loop(spec, plain)
        for _ in range(4):  # kernels are compiled, tables are laid out, DDP makes its buckets anew
            loop.step()
        assert loop.wire.session.ahead, spec
        try:
            with unwatched():
                for _ in range(3):
                    loop.step()
        except RuntimeError as wrong:
            raise AssertionError(f"{spec} waits for the device") from wrong
        before = loop.left()
        with unwatched():
            loop.step(bad)
        assert all(not p.grad.any() for p in loop.net.parameters()), spec
        after = loop.left()
        assert all(torch.equal(after[name], before[name]) for name in before), spec
        assert (loop.wire.skipped, loop.wire.report().steps) == (1, 8), spec
    dist.destroy_process_group()


def test_no_step_waits() -> None:
    run_ranks(alone, 1, timeout=170)  # most of it is Triton's compiler


def test_no_other_step_waits() -> None:
    """A ramp is over here: each of its stages lays out tables of its own, and waits for them."""
    run_ranks(alone_with_more, 1, timeout=170)


def test_no_step_of_a_plain_loop_waits() -> None:
    run_ranks(alone_and_plain, 1, timeout=170)
