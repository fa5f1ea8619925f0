"""The Triton batch norm of stacked models against torch's, to rounding, forward and backward."""

import importlib.util
import os

import pytest
import torch
from torch.nn import functional as F

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is no GPU, and TRITON_INTERPRET=1 is not set", allow_module_level=True)

from gradwire.kernels.cuda.norm import backward, forward, norm
from gradwire.kernels.cuda.pool import pool

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("batch", "channels", "side"), [(4, 16, 8), (3, 96, 7), (8, 130, 9), (1, 1, 2)])
def test_it_is_torchs(batch: int, channels: int, side: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(batch, channels, side, side, device=DEVICE) * 2 + 0.5
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    w, b = (torch.randn(channels, device=DEVICE, requires_grad=True) for _ in range(2))
    kept = torch.randn(channels, device=DEVICE), torch.rand(channels, device=DEVICE)
    mine, theirs = [k.clone() for k in kept], [k.clone() for k in kept]
    found, wanted = norm(x, *mine, w, b, 0.1, 1e-5), F.batch_norm(x, *theirs, w, b, True, 0.1, 1e-5)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    dy = torch.randn_like(found)
    for one, other in zip(
        torch.autograd.grad(found, (x, w, b), dy), torch.autograd.grad(wanted, (x, w, b), dy), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("groups", "channels", "side"), [(3, 16, 8), (2, 130, 5)])
def test_groups_are_normalized_apart_and_rectified(groups: int, channels: int, side: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(groups * 4, channels, side, side, device=DEVICE).contiguous(memory_format=torch.channels_last)
    w, b = (torch.randn(channels, device=DEVICE, requires_grad=True) for _ in range(2))
    kept = torch.zeros(groups, channels, device=DEVICE), torch.ones(groups, channels, device=DEVICE)
    found, *about = forward(x, kept, w.detach(), b.detach(), 0.1, 1e-5, groups, relu=True)
    dy = torch.randn_like(x)
    dx, dw, db = backward(dy, x, *about, w.detach(), b.detach(), groups, relu=True)
    for i in range(groups):
        own = slice(4 * i, 4 * (i + 1))
        mine, mean, var = x[own].detach().requires_grad_(), torch.zeros_like(kept[0][i]), torch.ones_like(kept[0][i])
        wanted = F.batch_norm(mine, mean, var, w, b, True, 0.1, 1e-5).relu()
        expected = torch.autograd.grad(wanted, (mine, w, b), dy[own])
        for one, other in zip(
            (found[own], kept[0][i], kept[1][i], dx[own], dw[i], db[i]), (wanted, mean, var, *expected), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("batch", "channels", "height", "width"), [(2, 16, 4, 6), (3, 130, 2, 2)])
def test_pooling_is_torchs(batch: int, channels: int, height: int, width: int) -> None:
    torch.manual_seed(0)
    x = torch.randint(-3, 4, (batch, channels, height, width), device=DEVICE).float()  # ties: the first wins
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    found, wanted = pool(x), F.max_pool2d(x, 2)
    assert torch.equal(found, wanted)
    dy = torch.randn_like(found)
    assert torch.equal(*(torch.autograd.grad(y, x, dy)[0] for y in (found, wanted)))
