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

from gradwire.kernels.cuda.norm import norm

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
