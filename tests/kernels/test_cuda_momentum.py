"""Momentum that a gradient enters, and signs of blocks, by the Triton kernels: bit for bit as defined."""

import importlib.util
import os

import pytest
import torch

from gradwire.kernels import fused, momentum, quantize
from gradwire.kernels.dispatch import reference_only
from gradwire.kernels.groups import block_lengths
from gradwire.kernels.momentum import Momentum

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is no GPU, and TRITON_INTERPRET=1 is not set", allow_module_level=True)

from gradwire.kernels import cuda
from gradwire.kernels.cuda import block_signs
from gradwire.kernels.cuda.tables import grid

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # the interpreter divides by NumPy
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Whole blocks and a tail, a block alone, odd starts, segments that are too long or too short for one program.
TABLES = {
    "blocks": block_lengths((3 * 1024, 1024 + 40, 0, 2048 + 3), 1024),
    "one": (700,),
    "odd": (1000, 3, 1001),
    "long": (20000, 1024),
    "short": (64, 64, 9),
    "uneven": (1024, *(8,) * 40),
}
BY_BLOCKS = ("blocks", "one")


def same(found, expected):
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert torch.equal(found.cpu(), expected), (found.cpu() != expected).nonzero().flatten()[:10]


def inputs(n, dtype=torch.float32, bad=True):
    """Gradient, residual, momentum and denominators, of which some are zero or tiny."""
    draw = torch.Generator().manual_seed(n)
    g, e, m, d = (torch.randn(n, generator=draw) for _ in range(4))
    d = torch.where(torch.rand(n, generator=draw) < 0.1, 0.0, d.abs())
    if bad:
        g[n // 2] = torch.nan
        g[n // 3], d[n // 3] = 1e38, 1e-30  # a finite gradient whose quotient is not
    return g.to(dtype), e, m, d


def plain(function, *args):
    with reference_only():
        return function(*args)


@pytest.mark.parametrize("table", TABLES)
def test_which_segments_are_blocks(table):
    assert block_signs.are_blocks(grid(TABLES[table], torch.device(DEVICE))) == (table in BY_BLOCKS)


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [0, 5, 2048, 5000])
def test_next_momentum(n, dtype, divides, bad):
    g, _, m, d = inputs(n, dtype, bad and n > 0)
    d = d if divides else None
    expected, mine = torch.full((n,), torch.nan), m.to(DEVICE)
    flag = plain(momentum.next_momentum_, g, Momentum(m, d, 0.8), expected)
    theirs = Momentum(mine, None if d is None else d.to(DEVICE), 0.8)
    found = torch.full((n,), torch.nan, device=DEVICE)
    same(cuda.next_momentum_(g.to(DEVICE), theirs, found), flag)
    same(found, expected)
    same(cuda.next_momentum_(g.to(DEVICE), theirs, mine), flag)  # where the last one lies
    same(mine, expected)
    assert bool(flag) == (bad and n > 0) and expected.isfinite().all()


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize("table", TABLES)
def test_signs_of_momentum(table, divides, norm, keeps):
    lengths = TABLES[table]
    n = sum(lengths)
    g, e, m, d = inputs(n)
    d = d if divides else None
    left, kept = e.clone(), torch.full((n,), torch.nan) if keeps else None
    expected = plain(momentum.momentum_sign_, g, left, Momentum(m, d, 0.9), 0.7, lengths, norm, None, kept)
    theirs = Momentum(m.to(DEVICE), None if d is None else d.to(DEVICE), 0.9)
    before, in_place = e.to(DEVICE), e.clone().to(DEVICE)
    for memory, held in ((torch.full_like(before, torch.nan), before), (in_place, None)):
        out = torch.full((n,), torch.nan, device=DEVICE) if keeps else None
        found = cuda.momentum_sign_(g.to(DEVICE), memory, theirs, 0.7, lengths, norm, held, out)
        for a, b in zip((*found, memory), (*expected, left), strict=True):
            same(a, b)
        if out is not None:
            same(out, kept)
    same(before, e)
    same(theirs.last, m)
    assert bool(expected[1])


def test_a_gradient_of_sixteen_bits_that_begins_anywhere():
    lengths = TABLES["blocks"]
    g, e, m, d = inputs(sum(lengths), torch.bfloat16, bad=False)
    left = e.clone()
    expected = plain(momentum.momentum_sign_, g, left, Momentum(m, d, 0.9), 1.0, lengths, False)
    around = torch.full((g.numel() + 3,), torch.nan, dtype=g.dtype, device=DEVICE)
    moved, memory = around[3:].copy_(g), e.to(DEVICE)
    found = cuda.momentum_sign_(moved, memory, Momentum(m.to(DEVICE), d.to(DEVICE), 0.9), 1.0, lengths, False)
    for a, b in zip((*found, memory), (*expected, left), strict=True):
        same(a, b)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("table", TABLES)
def test_signs_of_blocks(table, norm):
    """The same kernel encodes what is there, and what a gradient makes of a residual."""
    lengths = TABLES[table]
    g, e, _, _ = inputs(sum(lengths))
    counts = torch.tensor(lengths)
    same(cuda.sign_encode(e.to(DEVICE), counts.to(DEVICE), norm), plain(quantize.sign_encode, e, counts, norm))
    left, memory = e.clone(), e.clone().to(DEVICE)
    expected = plain(fused.feedback_sign_, g, left, 0.9, lengths, norm)
    found = cuda.feedback_sign_(g.to(DEVICE), memory, 0.9, lengths, norm)
    for a, b in zip((*found, memory), (*expected, left), strict=True):
        same(a, b)


@pytest.mark.parametrize("indebted", [False, True])
@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("table", TABLES)
def test_a_servers_turn(table, ranks, indebted):
    lengths, norm = TABLES[table], ranks == 3
    n, counts = sum(lengths), torch.tensor(lengths)
    rows = [plain(quantize.sign_encode, torch.randn(n, generator=draw(rank)), counts, norm) for rank in range(ranks)]
    error = torch.randn(n, generator=draw(9)) if indebted else None
    data, left = plain(fused.merge_sign, torch.stack(rows), error, lengths, norm)
    for odd in (0, 1):  # messages may begin anywhere
        around = torch.zeros(ranks, rows[0].numel() + 3, dtype=torch.uint8)
        around[:, odd : odd + rows[0].numel()] = torch.stack(rows)
        mine = around.to(DEVICE)[:, odd : odd + rows[0].numel()]
        found, mine_left = cuda.merge_sign(mine, None if error is None else error.to(DEVICE), lengths, norm)
        same(found, data)
        assert (mine_left is None) == (left is None)
        if left is not None:
            same(mine_left, left)
            there = error.clone().to(DEVICE)
            same(cuda.merge_sign_into_(mine, there, lengths, norm, there), data)
            same(there, left)


def draw(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("table", TABLES)
def test_a_product_with_what_signs_say(table, odd):
    lengths = TABLES[table]
    n, counts = sum(lengths), torch.tensor(lengths)
    data = plain(quantize.sign_encode, torch.randn(n, generator=draw(1)), counts, False)
    factor = torch.rand(n, generator=draw(2))
    expected = [torch.full((n,), torch.nan) for _ in range(2)]
    plain(momentum.sign_decode_times_, data, counts, expected[0], factor, expected[1])
    around = torch.zeros(data.numel() + 1, dtype=torch.uint8, device=DEVICE)
    mine = around[odd : odd + data.numel()].copy_(data)
    found = [torch.full((n,), torch.nan, device=DEVICE) for _ in range(2)]
    cuda.sign_decode_times_(mine, counts.to(DEVICE), found[0], factor.to(DEVICE), found[1])
    for a, b in zip(found, expected, strict=True):
        same(a, b)
