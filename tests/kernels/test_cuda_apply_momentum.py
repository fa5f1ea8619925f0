"""AdamW's step over frozen denominators by the Triton kernel, against its definition."""

import importlib.util
import os

import pytest
import torch

from gradwire.kernels import apply_momentum
from gradwire.kernels.apply_momentum import Applied
from gradwire.kernels.dispatch import reference_only

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is no GPU, and TRITON_INTERPRET=1 is not set", allow_module_level=True)

from gradwire.kernels import cuda

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(3,), (64, 64), (5000,), (0, 4), (1, 2048)]


def parts(device, dtype=torch.float32, shift=0):
    """Parameters, momenta and denominators; ``shift`` moves them off multiples of 16 bytes."""
    made = []
    for kind in range(3):
        draw, one = torch.Generator().manual_seed(kind), []
        for shape in SHAPES:
            x = torch.randn(shape, generator=draw)
            x = x.abs() + 0.1 if kind > 1 else x.to(dtype if kind == 0 else torch.float32)
            around = torch.empty(x.numel() + shift, dtype=x.dtype, device=device)
            one.append(around[shift:].view(shape).copy_(x))
        made.append(one)
    return Applied(*made)


def both(mine, known, shrink, size):
    """Each tensor after a step by the kernel, and after one by the definition, which may round less often."""
    cuda.apply_momentum_(mine.params[0], mine, shrink, size)
    with reference_only():
        apply_momentum.apply_momentum_(known.params[0], known, shrink, size)
    pairs = zip(mine, known, strict=True)
    return [(a.cpu(), b) for found, expected in pairs for a, b in zip(found, expected, strict=True)]


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step(dtype, shift):
    """Parameters of 16 bits take the definition's way."""
    for found, expected in both(parts(DEVICE, dtype, shift), parts("cpu", dtype), 0.99, -0.03):
        torch.testing.assert_close(found, expected)


def test_every_operation_is_rounded_by_itself():
    mine, known = parts(DEVICE), parts("cpu")
    cuda.apply_momentum_(mine.params[0], mine, 0.99, -0.03)
    shrink, size = torch.tensor(0.99), torch.tensor(-0.03)
    for found, p, x, d in zip(mine.params, *known, strict=True):
        assert torch.equal(found.cpu(), shrink * p + size * (x / d))


def test_tensors_that_move_are_found_again():
    for seed in range(3):
        mine, known = parts(DEVICE), parts("cpu")
        held = mine if seed else None
        for found, expected in both(mine, known, 1.0, 0.5):
            torch.testing.assert_close(found, expected)
        del held
