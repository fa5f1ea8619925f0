"""Positions row by row on a GPU: the same bytes as on a CPU, and back."""

import pytest
import torch

from gradwire.codecs.indices import Rows
from gradwire.core.payload import CorruptMessageError
from gradwire.core.segments import Segments

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

TABLE = Segments(("conv", "bias", "embedding", "narrow"), ((64, 32, 3, 3), (300,), (500, 700), (9000, 1)))


@pytest.mark.parametrize("density", [0.0, 0.001, 0.02, 0.6, 1.0])
def test_bytes_and_positions_are_those_of_the_definition(density):
    coder, n = Rows().bind(TABLE), TABLE.total
    busy = torch.rand(n // 100 + 1, generator=torch.Generator().manual_seed(1)).repeat_interleave(100)[:n]
    indices = (torch.rand(n, generator=torch.Generator().manual_seed(2)) < 2 * density * busy).nonzero().flatten()
    data = coder.encode(indices, n)
    found = coder.encode(indices.cuda(), n)
    assert torch.equal(found.cpu(), data)
    back, used = coder.decode(found, indices.numel(), n)
    assert torch.equal(back.cpu(), indices) and used == data.numel()
    if data.numel() > 1:
        with pytest.raises(CorruptMessageError):
            coder.decode(found[:-1], indices.numel(), n)
