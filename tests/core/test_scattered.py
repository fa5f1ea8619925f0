"""Vectors that lie in several places are the same vectors."""

import pytest
import torch
from torch import Tensor

from gradwire.core.layout import Flat, Scattered, in_one_place

SIZES = (3, 1, 6)


def scattered(x: Tensor) -> Scattered:
    return Scattered(tuple(part.clone() for part in x.split(SIZES)))


@pytest.mark.parametrize("start", range(11))
@pytest.mark.parametrize("length", range(11))
def test_a_stretch_is_that_of_the_whole(start: int, length: int) -> None:
    x = torch.arange(10.0)
    stop = min(start + length, 10)
    parts = scattered(x)
    vectors: list[Flat] = [x, parts]
    for vector in vectors:
        assert torch.equal(in_one_place(vector[start:stop]), x[start:stop])
    parts[start:stop].copy_(-x[start:stop])
    expected = x.clone()
    expected[start:stop] *= -1
    assert torch.equal(in_one_place(parts), expected)


def test_a_stretch_in_one_place_is_no_copy() -> None:
    parts = scattered(torch.arange(10.0))
    found = parts[5:9]
    assert isinstance(found, Tensor) and found.data_ptr() == parts.parts[2][1:].data_ptr()
