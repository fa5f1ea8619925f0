"""Training with CUDA tensors: one rank on NCCL, two ranks on gloo that share a GPU, DDP, and a GradScaler."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.core.keys import Key
from gradwire.kernels import quantize
from gradwire.kernels.dispatch import reference_only
from spawn import Answers, cases_fixture, use_nccl

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SPECS = [
    "topk(0.01) | sign",
    "dgc(0.01)",
    "sign",
    "qsgd",
    "powersgd(2)",
    "randomk(0.1)",
    "hadamard | int4",
    "ef_signsgd",
]


def model(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 10)).to(device)


def train(spec: str, device: str, rank: int, ddp: bool, scaled: bool = False) -> Tensor:
    net = model(device)
    scaler = torch.amp.GradScaler(device) if scaled else None
    outer: nn.Module = DistributedDataParallel(net) if ddp else net
    wire = gradwire.compress(outer, spec, scaler=scaler)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    draw = torch.Generator().manual_seed(rank)
    for _ in range(4):
        x, y = torch.randn(16, 64, generator=draw), torch.randint(0, 10, (16,), generator=draw)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(outer(x.to(device)), y.to(device))
        (scaler.scale(loss) if scaler else loss).backward()
        if not ddp:
            wire()
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
    wire.state_dict()
    assert wire.report().steps == 4
    return torch.cat([p.detach().flatten() for p in net.parameters()]).cpu()


def with_gloo(rank: int, world: int, spec: str) -> tuple[Tensor, Tensor, Tensor]:
    """Parameters after training on the CPU, on the GPU, and under DDP on the GPU."""
    on_gpu = [train(spec, "cuda", rank, ddp=ddp) for ddp in (False, True)]
    return train(spec, "cpu", rank, ddp=False), on_gpu[0], on_gpu[1]


BY_SPEC = {spec: spec for spec in SPECS}
gloo = cases_fixture(with_gloo, 2, BY_SPEC, timeout=110)


@pytest.mark.parametrize("case", BY_SPEC)
def test_gloo_with_cuda_tensors(case: str, gloo: Answers) -> None:
    first, second = gloo[case]
    start = torch.cat([p.detach().flatten() for p in model("cpu").parameters()])
    assert all(map(torch.equal, first, second)), "ranks drift apart"
    on_cpu, plain, hooked = first
    assert torch.equal(plain, hooked)
    # Sums of products round differently, and an entry at a threshold may fall to the other side of it.
    moved, expected = plain - start, on_cpu - start
    assert (moved - expected).norm() < 0.1 * expected.norm()


def with_nccl(rank: int, world: int, case: tuple[str, bool]) -> tuple[Tensor, Tensor]:
    """Parameters of a plain loop, or of DDP without a scaler; and of DDP, with a scaler if there is one."""
    use_nccl()
    spec, scaled = case
    return train(spec, "cuda", 0, ddp=scaled), train(spec, "cuda", 0, ddp=True, scaled=scaled)


NCCL = {**{spec: (spec, False) for spec in SPECS}, "topk(0.1) scaled": ("topk(0.1)", True)}
nccl = cases_fixture(with_nccl, 1, NCCL, timeout=110)


@pytest.mark.parametrize("case", NCCL)
def test_nccl(case: str, nccl: Answers) -> None:
    ((expected, hooked),) = nccl[case]
    if NCCL[case][1]:
        assert (hooked - expected).abs().max() < 1e-3
    else:
        assert torch.equal(hooked, expected)


@pytest.mark.parametrize("spec", SPECS)
def test_lockstep_on_the_gpu(spec: str) -> None:
    models = [model("cuda") for _ in range(3)]
    workers = gradwire.lockstep(models, spec)
    for _ in range(3):
        for rank, net in enumerate(models):
            draw = torch.Generator("cuda").manual_seed(rank)
            net.zero_grad()
            net(torch.randn(16, 64, device="cuda", generator=draw)).square().mean().backward()
        workers()
        for p, *others in zip(*(net.parameters() for net in models), strict=True):
            for other in others:
                assert p.grad is not None and torch.equal(p.grad, other.grad)


def test_reference_kernels_divide_as_on_a_cpu() -> None:
    """By a Python number torch would divide with its reciprocal there, and sevenths would be an ulp off."""
    values, lengths = torch.randn(10_000, generator=torch.Generator().manual_seed(0)), torch.tensor([3_000, 7_000])
    with reference_only():
        fours = quantize.integer_encode(values, lengths, 4, 256)
        found = quantize.integer_decode(fours.cuda(), lengths.cuda(), 4, 256)
        assert torch.equal(found.cpu(), quantize.integer_decode(fours, lengths, 4, 256))
        levels = quantize.qsgd_encode(values, lengths, ("a", "b"), Key(1, 0, 0), 127, 512)
        for biased in (False, True):
            found = quantize.qsgd_decode(levels.cuda(), lengths.cuda(), 127, 512, biased)
            assert torch.equal(found.cpu(), quantize.qsgd_decode(levels, lengths, 127, 512, biased))
