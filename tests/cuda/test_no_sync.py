"""A compressed step under DDP and NCCL never makes the host wait for the device, dropped steps included."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from spawn import Answers, cases_fixture, use_nccl

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
ADAMW = ["onebit_adam(start=2)", "onebit_adam(start=2, divide='after')", "dgc_adam(0.01, start=2)"]
PLAIN = ["dgc(0.01)", "topk(0.01) | sign", "ef_signsgd", "int4", "powersgd(2)", "qsgd"]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Waiting for the device is an error in here."""
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
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05)
        self.adaptive = spec in ADAMW
        if self.adaptive:  # a dropped step leaves weights as they are, but for their decay
            self.optimizer = gradwire.AdamW(self.net.parameters(), lr=0.01, weight_decay=0.0, fused=True)
        self.wire = gradwire.compress(self.ddp, spec, optimizer=self.optimizer, bucket_mb=0.3)
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
        # AdamW goes on with the momentum of its own that 1-D tensors have, as with any gradient of zeros.
        kept = {name: p for name, p in self.net.named_parameters() if p.dim() > 1 or not self.adaptive}
        return memories | {name: p.detach().clone() for name, p in kept.items()}


def take_steps(rank: int, world: int, case: tuple[str, bool]) -> None:
    use_nccl()
    loop = Loop(*case)
    for _ in range(8):  # kernels are compiled, DDP makes its buckets anew, both generations of state are captured
        loop.step()
    bad = torch.tensor(torch.inf, device="cuda")
    with no_waiting():
        for _ in range(3):
            loop.step()
    before = loop.left()
    with no_waiting():
        loop.step(bad)
    assert all(not p.grad.any() for p in loop.net.parameters())
    after = loop.left()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert (loop.wire.skipped, loop.wire.report().steps) == (1, 12)


UNDER_DDP = {spec: (spec, False) for spec in SPECS}
MORE_UNDER_DDP = {spec: (spec, False) for spec in MORE}
OF_ADAMW = {spec: (spec, False) for spec in ADAMW}
IN_A_LOOP = {f"{spec} in a loop": (spec, True) for spec in PLAIN}
# Most of the time is that of Triton's compiler.
under_ddp = cases_fixture(take_steps, 1, UNDER_DDP, timeout=170)
more_under_ddp = cases_fixture(take_steps, 1, MORE_UNDER_DDP, timeout=170)
of_adamw = cases_fixture(take_steps, 1, OF_ADAMW, timeout=170)
in_a_loop = cases_fixture(take_steps, 1, IN_A_LOOP, timeout=170)


@pytest.mark.parametrize("case", UNDER_DDP)
def test_no_step_under_ddp_waits(case: str, under_ddp: Answers) -> None:
    assert under_ddp[case] == [None]


@pytest.mark.parametrize("case", MORE_UNDER_DDP)
def test_no_step_of_another_spec_under_ddp_waits(case: str, more_under_ddp: Answers) -> None:
    """The ramp is over here: each of its stages lays out tables of its own, and waits for them."""
    assert more_under_ddp[case] == [None]


@pytest.mark.parametrize("case", OF_ADAMW)
def test_no_step_that_compresses_momentum_waits(case: str, of_adamw: Answers) -> None:
    """Their starts are over: the step in which the variance is frozen reads how many steps it was measured over."""
    assert of_adamw[case] == [None]


@pytest.mark.parametrize("case", IN_A_LOOP)
def test_no_step_of_a_plain_loop_waits(case: str, in_a_loop: Answers) -> None:
    assert in_a_loop[case] == [None]
