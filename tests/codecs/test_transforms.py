"""Transforms: hand-computed, orthonormal, and the same on every rank."""

import pytest
import torch

from gradwire.codecs.transforms import DCT, Hadamard
from gradwire.core.keys import Key
from gradwire.core.segments import Segments
from gradwire.kernels.hadamard import walsh

KEY = Key(seed=1, step=2, rank=0)
MIXED = Segments(("a", "none", "b", "one", "c", "d"), ((3, 5), (0,), (64,), (1,), (100,), (13,)))


def test_walsh_of_four_values() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 6.0]])
    assert walsh(x).tolist() == [[6.0, -2.0, -3.0, 1.0]]  # sums over sqrt(4)


def test_forward_flips_signs_and_then_sums() -> None:
    x, table = torch.tensor([1.0, 2.0, 4.0, 8.0]), Segments.single(4)
    y = Hadamard().forward(x, table, KEY)
    flipped = walsh(y.view(1, 4)).flatten()
    assert torch.equal(flipped.abs(), x)
    assert torch.equal(y, walsh(flipped.view(1, 4)).flatten())


def test_padding_is_to_the_block_or_the_next_power_of_two() -> None:
    wide = Hadamard(block=32).widen(MIXED)
    assert wide.names == MIXED.names
    assert wide.lengths == (16, 0, 64, 1, 128, 16)


@pytest.mark.parametrize("block", [1, 2, 32, 1024])
def test_inverse_undoes_forward(block: int) -> None:
    x = torch.linspace(-1, 2, MIXED.total)
    before = x.clone()
    y = Hadamard(block).forward(x, MIXED, KEY)
    assert y.numel() == Hadamard(block).widen(MIXED).total
    assert torch.allclose(Hadamard(block).inverse(y, MIXED, KEY), x, atol=1e-6)
    assert torch.equal(x, before)


def test_the_rotation_is_orthonormal() -> None:
    table = Segments(("a", "b"), ((6,), (11,)))
    rows = torch.stack([Hadamard(8).forward(e, table, KEY) for e in torch.eye(17)])
    assert torch.allclose(rows @ rows.T, torch.eye(17), atol=1e-6)


def test_a_spike_is_spread_over_its_block() -> None:
    x = torch.zeros(1024)
    x[7] = 32.0
    y = Hadamard().forward(x, Segments.single(1024), KEY)
    assert torch.equal(y.abs(), torch.ones(1024))


def test_ranks_agree_and_steps_differ() -> None:
    x, table = torch.linspace(-1, 1, 64), Segments.single(64)
    mine = Hadamard().forward(x, table, KEY)
    assert torch.equal(mine, Hadamard().forward(x, table, KEY.of(5)))
    later = Key(seed=1, step=3, rank=0)
    assert not torch.equal(mine, Hadamard().forward(x, table, later))


def test_no_segments_at_all() -> None:
    empty = Segments((), ())
    assert Hadamard().forward(torch.zeros(0), empty, KEY).shape == (0,)
    assert Hadamard().inverse(torch.zeros(0), empty, KEY).shape == (0,)


@pytest.mark.parametrize("block", [0, -4, 12, 2.0])
def test_the_block_must_be_a_power_of_two(block: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        Hadamard(block=block)


def test_cosines_of_one_tile() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])  # rows (1, 2) and (3, 4)
    y = DCT(2).forward(x, Segments(("a",), ((2, 2),)), KEY)
    assert torch.allclose(y, torch.tensor([5.0, -1.0, -2.0, 0.0]), atol=1e-6)  # sum / 2, then differences


@pytest.mark.parametrize("side", [1, 2, 5, 64])
def test_cosines_are_orthonormal(side: int) -> None:
    transform = DCT(side)
    rows = torch.stack([transform.forward(e, MIXED, KEY) for e in torch.eye(MIXED.total)])
    assert torch.allclose(rows @ rows.T, torch.eye(MIXED.total), atol=1e-5)
    assert torch.allclose(transform.inverse(rows[7], MIXED, KEY), torch.eye(MIXED.total)[7], atol=1e-5)


def test_a_tile_lies_end_to_end_and_a_constant_is_one_entry() -> None:
    x = torch.arange(4.0).repeat_interleave(2).repeat(4)  # eight columns, four rows: two tiles, of side 4
    y = DCT(4).forward(x, Segments(("a",), ((4, 8),)), KEY).view(2, 16)
    flat = DCT(4).forward(torch.ones(32), Segments(("a",), ((4, 8),)), KEY).view(2, 16)
    assert torch.allclose(flat, torch.tensor([4.0] + [0.0] * 15).expand(2, 16), atol=1e-6)
    assert torch.allclose(y.norm(dim=1).square(), torch.tensor([8.0, 104.0]), atol=1e-3)
