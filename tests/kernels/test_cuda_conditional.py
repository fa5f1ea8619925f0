"""What the device undoes of a dropped step, and leaves alone of any other."""

import importlib.util
import os

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is no GPU, and TRITON_INTERPRET=1 is not set", allow_module_level=True)

from gradwire.kernels import cuda

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(7,), (1, 5000, 33, 4096, 9)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dropped", [True, False])
def test_as_defined(dropped: bool, sizes: tuple[int, ...]) -> None:
    flag = torch.tensor(dropped, device=DEVICE)
    written = [torch.randn(n).to(DEVICE) for n in sizes]
    written[0][0] = torch.nan
    before = [torch.randn(n).to(DEVICE) for n in sizes]
    now, updates = [x.clone() for x in written], [x.clone() for x in written]
    cuda.copy_if_(flag, now, before)
    cuda.zero_if_(flag, updates)
    for x, update, known, old in zip(now, updates, written, before, strict=True):
        assert torch.equal(x.nan_to_num(5.0), old if dropped else known.nan_to_num(5.0))
        assert torch.equal(update.nan_to_num(5.0), torch.zeros_like(known) if dropped else known.nan_to_num(5.0))


def test_tensors_without_elements_are_left_out() -> None:
    flag = torch.tensor(True, device=DEVICE)
    empty, full = torch.zeros(0, device=DEVICE), torch.ones(5, device=DEVICE)
    cuda.copy_if_(flag, [], [])
    cuda.zero_if_(flag, [])
    cuda.zero_if_(flag, [empty, full, empty])
    assert not full.any()
    cuda.copy_if_(flag, [empty, full], [empty, torch.ones(5, device=DEVICE)])
    assert full.all()
