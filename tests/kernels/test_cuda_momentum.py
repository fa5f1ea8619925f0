"""Momentum that a gradient enters, and signs of blocks, by the Triton kernels: bit for bit as defined."""

import importlib.util
import os

import pytest
import torch

from gradwire.core.layout import Scattered, in_one_place
from gradwire.kernels import fused, momentum, quantize
from gradwire.kernels.dispatch import reference_only
from gradwire.kernels.fused import Accumulation
from gradwire.kernels.groups import block_lengths
from gradwire.kernels.momentum import Momentum

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is no GPU, and TRITON_INTERPRET=1 is not set", allow_module_level=True)

from gradwire.kernels import cuda
from gradwire.kernels.cuda import block_signs
from gradwire.kernels.cuda.places import by_block, by_tile
from gradwire.kernels.cuda.tables import BLOCK, grid

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


def in_pieces(x, cuts, gap=4):
    """The same vector in pieces of these lengths, with ``gap`` entries between them."""
    around = torch.full((x.numel() + gap * (len(cuts) + 1),), torch.nan, device=DEVICE)
    pieces, at = [], gap
    for part in x.split(list(cuts)):
        pieces.append(around[at : at + part.numel()].copy_(part))
        at += part.numel() + gap
    return Scattered(tuple(pieces)), around


# Blocks of 1024 that lie in one piece each, at addresses aligned to 16 bytes or not; and one that lies in two.
CUTS = {"aligned": ((3072, 1064, 2051), 4), "odd": ((3072, 1064, 2051), 3), "astride": ((3000, 1136, 2051), 4)}


@pytest.mark.parametrize("cuts", CUTS)
def test_signs_of_momentum_of_a_gradient_in_pieces(cuts):
    lengths, (sizes, gap) = TABLES["blocks"], CUTS[cuts]
    g, e, m, d = inputs(sum(lengths))
    left = e.clone()
    expected = plain(momentum.momentum_sign_, g, left, Momentum(m, d, 0.9), 1.0, lengths, False)
    pieces, around = in_pieces(g, sizes, gap)
    kept, memory = around.clone(), e.to(DEVICE)
    theirs = Momentum(m.to(DEVICE), d.to(DEVICE), 0.9)
    assert (by_block(pieces, lengths) is None) == (cuts == "astride")
    found = cuda.momentum_sign_(pieces, memory, theirs, 1.0, lengths, False)
    for a, b in zip((*found, memory), (*expected, left), strict=True):
        same(a, b)
    assert torch.equal(around.nan_to_num(), kept.nan_to_num())  # it is only read


@pytest.mark.parametrize("cuts", CUTS)
def test_a_product_is_written_to_pieces(cuts):
    lengths, (sizes, gap) = TABLES["blocks"], CUTS[cuts]
    _, e, _, d = inputs(sum(lengths))
    counts = torch.tensor(lengths)
    data, mean = plain(quantize.sign_encode, e, counts, False), torch.empty_like(e)
    product = torch.empty_like(e)
    plain(momentum.sign_decode_times_, data, counts, mean, d, product)
    pieces, around = in_pieces(torch.zeros_like(e), sizes, gap)
    found = torch.empty_like(e, device=DEVICE)
    cuda.sign_decode_times_(data.to(DEVICE), counts.to(DEVICE), found, d.to(DEVICE), pieces)
    same(found, mean)
    same(in_one_place(pieces), product)
    assert int(around.isnan().sum()) == gap * (len(sizes) + 1)  # nothing between them was written


SELECTED = {  # lengths, of which some are small, short of nothing, or cross tiles; and how many of each are wanted
    "one": ((9000,), (90,)),
    "several": ((5000, 0, 3001, 16), (50, 0, 0, 16)),
    "dense": ((6000, 4096), (2000, 40)),
    "many": ((70000,), (3000,)),
    "none": ((700,), (0,)),
}


@pytest.mark.parametrize("subtract", [0, 1, 2])
@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize("table", SELECTED)
def test_selections_of_momentum(table, divides, subtract):
    lengths, counts = SELECTED[table]
    n = sum(lengths)
    _, e, m, d = inputs(n, bad=False)
    first, kept = e.clone(), m.clone()
    residual, last = e.to(DEVICE), m.to(DEVICE)
    for step in range(3):
        g = inputs(n + step)[0][:n] if step == 1 else inputs(n + step, bad=False)[0][:n]
        known = Momentum(kept, d if divides else None, 0.8)
        expected = plain(momentum.momentum_topk_, g, (first, first), known, kept, subtract, 0.9, lengths, counts)
        theirs = Momentum(last, d.to(DEVICE) if divides else None, 0.8)
        held = residual.clone(), last.clone()
        new = residual if step == 2 else torch.full_like(residual, torch.nan)  # in place, at last
        out = last if step == 2 else torch.full_like(last, torch.nan)
        found = cuda.momentum_topk_(g.to(DEVICE), (residual, new), theirs, out, subtract, 0.9, lengths, counts)
        for a, b in zip((*found, new, out), (*expected, first, kept), strict=True):
            same(a, b)
        if step < 2:
            same(residual, held[0].cpu())
            same(last, held[1].cpu())
        assert bool(expected.nonfinite) == (step == 1)
        residual, last = new, out


def test_a_selection_without_momentum_of_its_own_leaves_the_common_one():
    lengths, counts = SELECTED["several"]
    g, e, m, d = inputs(sum(lengths))
    left = e.clone()
    expected = plain(momentum.momentum_topk_, g, (left, left), Momentum(m, d, 0.9), None, 1, 1.0, lengths, counts)
    residual, theirs = e.to(DEVICE), Momentum(m.clone().to(DEVICE), d.to(DEVICE), 0.9)
    found = cuda.momentum_topk_(g.to(DEVICE), (residual, residual), theirs, None, 1, 1.0, lengths, counts)
    for a, b in zip((*found, residual, theirs.last), (*expected, left, m), strict=True):
        same(a, b)


# Tiles of 2048 that lie in one piece each, aligned or not; and one that lies in two.
TILES = {"aligned": ((4096, 2048, 1900), 4), "odd": ((4096, 2048, 1900), 1), "astride": ((4000, 2144, 1900), 4)}


@pytest.mark.parametrize("cuts", TILES)
def test_selections_of_momentum_of_a_gradient_in_pieces(cuts):
    sizes, gap = TILES[cuts]
    lengths, counts = (3000, 5044), (40, 60)
    g, e, m, d = inputs(sum(lengths))
    left, kept = e.clone(), m.clone()
    expected = plain(momentum.momentum_topk_, g, (left, left), Momentum(m, d, 0.9), kept, 2, 1.0, lengths, counts)
    pieces, _ = in_pieces(g, sizes, gap)
    assert (by_tile(pieces, BLOCK) is None) == (cuts == "astride")
    residual, theirs = e.to(DEVICE), Momentum(m.to(DEVICE), d.to(DEVICE), 0.9)
    out = torch.full_like(residual, torch.nan)
    found = cuda.momentum_topk_(pieces, (residual, residual), theirs, out, 2, 1.0, lengths, counts)
    for a, b in zip((*found, residual, out), (*expected, left, kept), strict=True):
        same(a, b)


@pytest.mark.parametrize("mask", [None, False, True])
@pytest.mark.parametrize("cuts", TILES)
def test_selections_of_a_gradient_in_pieces(cuts, mask):
    """Without ``mask`` what is selected stays in the memories."""
    sizes, gap = TILES[cuts]
    budget = Accumulation(momentum=0.9), (3000, 5044), (40, 60)
    g, v, u, _ = inputs(sum(sizes), bad=False)
    g[5] = torch.inf
    pieces, around = in_pieces(g, sizes, gap)
    kept, theirs = around.clone(), (v.clone().to(DEVICE), u.clone().to(DEVICE))
    after = tuple(torch.full_like(x, torch.nan) for x in theirs)
    subtract = 0 if mask is None else 1 + mask
    expected = plain(fused.carry_topk_, g, (v, u), (v, u), *budget, subtract)
    found = cuda.carry_topk_(pieces, theirs, after, *budget, subtract)
    for a, b in zip((*found, *after), (*expected, v, u), strict=True):
        same(a, b)
    assert torch.equal(around.nan_to_num(), kept.nan_to_num())  # it is only read


@pytest.mark.parametrize("cuts", TILES)
@pytest.mark.parametrize("density", [0.004, 0.3])
def test_a_mean_is_written_to_pieces(density, cuts):
    sizes, gap = TILES[cuts]
    draw = torch.Generator().manual_seed(3)
    chosen = [(torch.rand(sum(sizes), generator=draw) < density).nonzero().flatten() for _ in range(3)]
    bounds, indices = (0, *torch.tensor([x.numel() for x in chosen]).cumsum(0).tolist()), torch.cat(chosen)
    values, expected = torch.randn(indices.numel(), generator=draw), torch.empty(sum(sizes))
    plain(fused.scatter_mean_, expected, values, indices, bounds, 3)
    pieces, around = in_pieces(torch.ones(sum(sizes)), sizes, gap)
    cuda.scatter_mean_(pieces, values.to(DEVICE), indices.to(DEVICE), bounds, 3)
    same(in_one_place(pieces), expected)
    assert int(around.isnan().sum()) == gap * (len(sizes) + 1)


@pytest.mark.parametrize("cuts", [None, *TILES])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("density", [0.004, 0.3])
def test_entries_times_a_factor(density, ranks, cuts):
    """Few entries of a tile are held by threads, and many are read in turn."""
    sizes, gap = TILES[cuts or "aligned"]
    n = sum(sizes)
    draw = torch.Generator().manual_seed(ranks)
    chosen = [(torch.rand(n, generator=draw) < density).nonzero().flatten() for _ in range(ranks)]
    bounds = (0, *torch.tensor([x.numel() for x in chosen]).cumsum(0).tolist())
    indices = torch.cat(chosen)
    values, factor = torch.randn(indices.numel(), generator=draw), torch.rand(n, generator=draw)
    expected = torch.full((n,), torch.nan)
    plain(momentum.scatter_product_, expected, values, indices, bounds, ranks, factor)
    pieces, around = in_pieces(torch.ones(n), sizes, gap)
    out = torch.ones(n, device=DEVICE) if cuts is None else pieces
    cuda.scatter_product_(out, values.to(DEVICE), indices.to(DEVICE), bounds, ranks, factor.to(DEVICE))
    same(out if cuts is None else in_one_place(pieces), expected)
    assert int(around.isnan().sum()) == gap * (len(sizes) + 1)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("density", [0.004, 0.3])
def test_factors_that_are_not_finite_count_where_something_was_sent(density, bad):
    n, draw = 5000, torch.Generator().manual_seed(1)
    chosen = [(torch.rand(n, generator=draw) < density).nonzero().flatten() for _ in range(2)]
    bounds, indices = (0, chosen[0].numel(), sum(x.numel() for x in chosen)), torch.cat(chosen)
    values, factor = torch.randn(indices.numel(), generator=draw).round(), torch.rand(n, generator=draw)
    factor[::3] = bad
    expected, out = torch.full((n,), torch.nan), torch.ones(n, device=DEVICE)
    plain(momentum.scatter_product_, expected, values, indices, bounds, 2, factor)
    cuda.scatter_product_(out, values.to(DEVICE), indices.to(DEVICE), bounds, 2, factor.to(DEVICE))
    same(out.isnan(), expected.isnan())
    same(out.nan_to_num(), expected.nan_to_num())


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
            same(cuda.merge_sign(mine, there, lengths, norm, there)[0], data)
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
