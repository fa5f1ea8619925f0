"""Index coders: positions come back exactly, in the bytes that were promised."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire.codecs.indices import Bitmap, Gap16, Int32, Int64, Rice, Rows
from gradwire.codecs.stage import IndexCoder
from gradwire.core.keys import Key
from gradwire.core.payload import CorruptMessageError
from gradwire.core.segments import Segments
from gradwire.core.spec import parse
from gradwire.kernels import rice
from gradwire.kernels.rows import encode_in_rows

CODERS = (Int32(), Int64(), Gap16(), Bitmap(), Rice(), Rice(static=True), Rows())
KEY = Key(seed=0, step=3, rank=1)
each_coder = pytest.mark.parametrize("coder", CODERS, ids=str)


@st.composite
def supports(draw: st.DrawFn) -> tuple[Tensor, int]:
    """Rising positions below n: scattered, in runs, all, one, or none."""
    n = draw(st.sampled_from((1, 7, 8, 9, 511, 513, 3000, 70_000, 300_000)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    shape = draw(st.sampled_from(("scattered", "runs", "all", "one", "last", "none")))
    density = draw(st.sampled_from((1e-4, 0.01, 0.5, 0.99)))
    share = torch.rand(n, generator=generator)
    rows = torch.rand(n // 64 + 1, generator=generator).repeat_interleave(64)[:n]
    chosen = {
        "scattered": share < density,
        "runs": (rows < 0.05) & (share < 0.9),
        "all": share >= 0,
        "one": share == share.max(),
        "last": torch.arange(n) == n - 1,
        "none": share < 0,
    }
    return chosen[shape].nonzero().flatten(), n


def random_support(n: int, k: int) -> Tensor:
    generator = torch.Generator().manual_seed(k)
    return torch.randperm(n, generator=generator)[:k].sort().values


def fewest_bits(n: int, k: int) -> float:
    """log2 of the number of supports."""
    log = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return log / math.log(2)


def assert_returns(coder: IndexCoder, indices: Tensor, n: int) -> int:
    """Encode, put foreign bytes behind, decode. Returns how many bytes it took."""
    before = indices.clone()
    data = coder.encode(indices, n)
    assert torch.equal(indices, before)
    assert data.dtype == torch.uint8
    foreign = torch.full((9,), 0xA5, dtype=torch.uint8)
    back, used = coder.decode(torch.cat((data, foreign)), indices.numel(), n)
    assert used == data.numel()
    assert back.dtype == torch.int64
    assert torch.equal(back, indices)
    return used


@given(support=supports(), coder=st.sampled_from(CODERS))
@settings(max_examples=150, deadline=None)
def test_positions_come_back_in_the_bytes_promised(support: tuple[Tensor, int], coder: IndexCoder) -> None:
    indices, n = support
    kept = coder.drop_overflow(indices, n, KEY) if coder.drop_overflow else indices
    used = assert_returns(coder, kept, n)
    promised = coder.size(indices.numel(), n)
    assert used == promised if coder.fixed else used <= promised


@each_coder
def test_specs_name_the_coders(coder: IndexCoder) -> None:
    assert str(coder) in coder.examples
    assert parse(str(coder)) == coder
    for text in coder.examples:
        assert type(parse(text)) is type(coder)
        assert str(parse(text)) == text


@pytest.mark.parametrize("coder", [Int32(), Int64(), Rice(), Rows(), Gap16()], ids=str)
def test_positions_beyond_what_floats_can_count_are_exact(coder: IndexCoder) -> None:
    assert_returns(coder, torch.tensor([0, 2**24 + 1, 2**24 + 3, 2**31 - 1]), 2**31)


@pytest.mark.parametrize("coder", [Int64(), Rice(), Rows(), Gap16()], ids=str)
def test_positions_beyond_32_bits_are_exact(coder: IndexCoder) -> None:
    assert_returns(coder, torch.tensor([2**24 + 1, 2**31 + 1, 2**33 + 5]), 2**34)


@pytest.mark.parametrize("n", [2**31, 2**32 + 1, 2**40, 2**41])
def test_rice_takes_a_lone_position_anywhere(n: int) -> None:
    for indices in (torch.tensor([n - 1]), torch.tensor([0, n - 1])):
        used = assert_returns(Rice(), indices, n)
        assert used <= Rice().size(indices.numel(), n)


def test_positions_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="int64"):
        Int32().size(1, 2**31 + 1)
    with pytest.raises(ValueError, match="int64"):
        Int32().encode(torch.tensor([2**31]), 2**31 + 1)
    with pytest.raises(ValueError, match="int64"):
        Rice().size(1, 2**41 + 1)


@given(
    coder=st.sampled_from(CODERS),
    raw=st.binary(max_size=200),
    count=st.integers(0, 1500),
    n=st.sampled_from((1500, 10_000, 2**31)),
)
@settings(max_examples=300, deadline=None)
def test_garbage_is_refused_or_yields_garbage(coder: IndexCoder, raw: bytes, count: int, n: int) -> None:
    data = torch.tensor(list(raw), dtype=torch.uint8)
    try:
        indices, used = coder.decode(data, count, n)
    except CorruptMessageError:
        return
    assert indices.shape == (count,)
    assert 0 <= used <= data.numel()


@given(coder=st.sampled_from(CODERS), where=st.integers(0, 2**20), flip=st.integers(1, 255))
@settings(max_examples=200, deadline=None)
def test_one_damaged_byte_is_refused_or_yields_garbage(coder: IndexCoder, where: int, flip: int) -> None:
    data = coder.encode(random_support(9000, 700), 9000)
    data[where % data.numel()] ^= flip
    try:
        indices, used = coder.decode(data, 700, 9000)
    except CorruptMessageError:
        return
    assert indices.shape == (700,)
    assert 0 <= used <= data.numel()


@each_coder
def test_a_message_cut_short_is_refused(coder: IndexCoder) -> None:
    data = coder.encode(random_support(9000, 700), 9000)
    for keep in (0, 1, data.numel() // 2, data.numel() - 1):
        with pytest.raises(CorruptMessageError):
            coder.decode(data[:keep], 700, 9000)


def test_bitmap_counts_its_bits() -> None:
    data = Bitmap().encode(torch.tensor([0, 3, 9]), 10)
    assert data.tolist() == [0b1001, 0b10]
    with pytest.raises(CorruptMessageError, match=r"3 positions.* 2"):
        Bitmap().decode(data, 2, 10)


def test_gap16_sends_fillers_for_long_gaps() -> None:
    n = 200_000
    # Gaps 0, 0, 65534, 65535 (one filler), 0.
    data = Gap16().encode(torch.tensor([0, 1, 65_536, 131_072, 131_073]), n)
    words = data.view(torch.int16).long() & 0xFFFF
    assert words.tolist() == [0, 0, 65_534, 65_535, 0, 0]


def test_gap16_takes_two_bytes_at_usual_densities() -> None:
    n, k = 1_000_000, 1000
    indices = random_support(n, k)
    assert Gap16().drop_overflow(indices, n, KEY) is indices
    assert Gap16().encode(indices, n).numel() == Gap16().size(k, n) == 2 * k


def test_gap16_drops_just_enough_when_fillers_overflow() -> None:
    n, k = 1_000_000, 100
    indices = torch.arange(n - k, n)  # 15 fillers before the first, and no room for them
    kept = Gap16().drop_overflow(indices, n, KEY)
    assert kept.numel() == k - 15
    assert Gap16().encode(kept, n).numel() == Gap16().size(k, n)
    assert bool(torch.isin(kept, indices).all()) and bool((kept.diff() > 0).all())


def test_gap16_drops_every_position_equally_often() -> None:
    n, k, draws = 1_000_000, 40, 300
    indices = torch.arange(n - k, n)
    times = torch.zeros(k)
    for step in range(draws):
        times[Gap16().drop_overflow(indices, n, Key(0, step, 0)) - (n - k)] += 1
    share = (k - 15) / k
    assert float((times - draws * share).abs().max()) < 4.5 * math.sqrt(draws * share * (1 - share))


def test_gap16_always_keeps_one() -> None:
    n = 10 * 65_535
    for k in (1, 2, 9, 10, 11):
        indices = torch.arange(n - k, n)
        kept = Gap16().drop_overflow(indices, n, KEY)
        assert kept.numel() >= 1
        assert Gap16().encode(kept, n).numel() <= Gap16().size(k, n)


@pytest.mark.parametrize("density", [0.001, 0.01, 0.02])
def test_rice_is_near_the_fewest_bits(density: float) -> None:
    n, k = 1_000_000, int(1_000_000 * density)
    used = assert_returns(Rice(), random_support(n, k), n)
    assert used * 8 <= 1.02 * fewest_bits(n, k)
    assert Rice().size(k, n) * 8 <= fewest_bits(n, k) + 1.5 * k


@pytest.mark.parametrize(
    ("width", "rows", "inside", "bound"),
    [(250, 0.05, 0.2, 0.6), (64, 0.05, 0.2, 0.8), (64, 0.01, 1.0, 0.25), (4000, 0.05, 0.5, 0.4)],
)
def test_rice_profits_from_clustered_rows(width: int, rows: float, inside: float, bound: float) -> None:
    n = 1_000_000 // width * width
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(n // width, 1, generator=generator) < rows
    support = chosen & (torch.rand(n // width, width, generator=generator) < inside)
    indices = support.flatten().nonzero().flatten()
    used = assert_returns(Rice(), indices, n)
    assert used * 8 < bound * fewest_bits(n, indices.numel())


@given(support=supports())
@settings(max_examples=40, deadline=None)
def test_rice_parameters_are_the_best(support: tuple[Tensor, int]) -> None:
    gaps = torch.diff(support[0], prepend=torch.tensor([-1])) - 1
    words = rice.encode_blocks(gaps, 3).tolist()
    for i in range(-(-gaps.numel() // rice.BLOCK)):
        block = gaps[rice.BLOCK * i : rice.BLOCK * (i + 1)]
        costs = [b * block.numel() + int((block >> b).sum()) for b in range(32)]
        bits, capped = words[2 * i] & 31, words[2 * i] >> 5 & 1
        excess = words[2 * i] >> 6 | words[2 * i + 1] << 2
        sent = (block >> bits).clamp(max=8 if capped else None, min=0)
        escapes = int((block >> bits >= 8).sum()) * capped
        assert excess == int(sent.sum())
        cost = bits * block.numel() + excess + 24 * escapes
        assert cost < min(costs) if capped else cost == min(costs)


def by_hand(data: bytes, count: int, width: int) -> list[int]:
    """The rice format read bit by bit, each block apart, as its specification says."""
    num_blocks = -(-count // 512)
    heads = [int.from_bytes(data[2 * i : 2 * i + 2], "little") for i in range(num_blocks)]
    sizes = [min(512, count - 512 * i) for i in range(num_blocks)]
    spans = [size + (head >> 6) for size, head in zip(sizes, heads, strict=True)]
    start = 2 * num_blocks
    middle = start + -(-sum(spans) // 8)
    quotients = [data[start + i // 8] >> i % 8 & 1 for i in range(sum(spans))]
    stop = middle + -(-sum(c * (head & 31) for c, head in zip(sizes, heads, strict=True)) // 8)
    remainders = int.from_bytes(data[middle:stop], "little")
    gaps, at = [], 0
    for i, (size, head) in enumerate(zip(sizes, heads, strict=True)):
        bits, first = head & 31, sum(spans[:i])
        ones = [j for j in range(spans[i]) if quotients[first + j]]
        assert len(ones) == size and ones[-1] == spans[i] - 1
        for a, b in pairwise((-1, *ones)):
            quotient = b - a - 1
            if head >> 5 & 1 and quotient == 8:
                quotient += int.from_bytes(data[stop : stop + width], "little")
                stop += width
            gaps.append((quotient << bits) + (remainders >> at & (1 << bits) - 1))
            at += bits
    assert stop == len(data)
    return gaps


def test_rice_bytes_are_as_specified() -> None:
    # Gaps 5, 0, 10 under b = 2: quotients 1, 0, 2 and remainders 1, 0, 2.
    golden = [2 | 3 << 6, 0, 0b100110, 0b100001]
    assert rice.encode_blocks(torch.tensor([5, 0, 10]), 2).tolist() == golden
    # Ten gaps of 0 and one of 3000 under b = 0, capped: 8 zeros for the last, 2992 apart.
    jump = torch.tensor([0] * 10 + [3000])
    golden = [0 | 1 << 5 | (8 & 3) << 6, 8 >> 2, 0xFF, 0b11, 0b100, 2992 & 0xFF, 2992 >> 8]
    assert rice.encode_blocks(jump, 2).tolist() == golden


def test_rice_blocks_can_be_read_one_by_one() -> None:
    generator = torch.Generator().manual_seed(1)
    scale = torch.tensor([0.0, 3.0, 1e3, 1e6]).repeat_interleave(400)
    gaps = (scale * -torch.rand(1600, generator=generator).log()).long()
    gaps[::37] += 2**20
    data = rice.encode_blocks(gaps, 3)
    assert by_hand(bytes(data.tolist()), 1600, 3) == gaps.tolist()
    assert torch.equal(rice.decode_blocks(data, 1600, 3)[0], gaps)


def read_rows(data: Tensor, count: int, widths: list[int]) -> list[int]:
    """The format of rows read bit by bit, as its specification says; only blocks of numbers are read by rice."""
    named, at = int.from_bytes(bytes(data[:4].tolist()), "little"), 4
    empty, more = [0] * named, 0
    if named < len(widths):
        found, used = rice.decode_blocks(data[at:], named, rice.width_of(len(widths)))
        empty, at, more = found.tolist(), at + used, 1
    found, used = rice.decode_blocks(data[at:], named, rice.width_of(count + 1))
    at += used
    bits = "".join(f"{byte:08b}"[::-1] for byte in data[at:].tolist())
    unary = bits.split("1", count)
    remainders = bits[-(-(sum(map(len, unary[:count])) + count) // 8) * 8 :]
    positions, row, place, quotients = list[int](), -1, 0, iter(unary)
    for passed, own in zip(empty, found.tolist(), strict=True):
        row += passed + 1
        width, within = widths[row], -1
        low = max(0, int(math.log2(max(1, (width - own - more) / (own + more + 1)))))
        for _ in range(own + more):
            remainder = int(remainders[place : place + low][::-1] or "0", 2)
            place += low
            within += (len(next(quotients)) << low) + remainder + 1
            positions.append(sum(widths[:row]) + within)
        assert within < width
    assert len(remainders) == -(-place // 8) * 8 and "1" not in remainders[place:]
    return positions


def over(*shapes: tuple[int, ...]) -> IndexCoder:
    return Rows().bind(Segments(tuple(map(str, range(len(shapes)))), shapes))


def test_bytes_of_rows_are_as_specified() -> None:
    # Row 0 has gaps 3, 0, 4 under b = 1, row 2 has 15 under b = 2; all four rows are named: 3, 0, 1, 0 under b = 0.
    golden = [4, 0, 0, 0, 0 | (4 & 3) << 6, 4 >> 2, 0b11011000, 0b00100110, 0b10, 0b11001]
    assert encode_in_rows(torch.tensor([3, 4, 9, 47]), ((4, 16),)).tolist() == golden
    # Row 5 of 62 has all its 16: one is named, 5 under b = 3 and 16 - 1 under b = 4, and no gap has a remainder.
    golden = [1, 0, 0, 0, 3, 0, 1, 5, 4, 0, 1, 15, 0xFF, 0xFF]
    assert encode_in_rows(torch.arange(80, 96), ((62, 16),)).tolist() == golden


@pytest.mark.parametrize(
    ("shapes", "widths"),
    [
        (((1000,),), [1000]),
        (((30, 4, 5), (0, 7), (3, 4000), (110,)), [20] * 30 + [4000] * 3 + [110]),
        (((500, 20),), [20] * 500),
        (((690, 3), (500,)), [9] * 230 + [500]),  # narrower than 8: three are taken together
        (((700, 3), (3, 200)), [9] * 233 + [3] + [200] * 3),  # and one is left
    ],
)
@pytest.mark.parametrize("scattered", [True, False])
def test_rows_can_be_read_bit_by_bit(shapes: tuple[tuple[int, ...], ...], widths: list[int], scattered: bool) -> None:
    n = sum(widths)
    k = n // 150  # so that 8 is the largest power of two in n / 16k
    indices = random_support(n, k) if scattered else torch.arange(n // 3, n // 3 + k)
    data = encode_in_rows(
        indices, tuple((shape[0], math.prod(shape[1:])) if shape[1:] else (1, *shape) for shape in shapes)
    )
    assert read_rows(data, k, widths) == indices.tolist()


def test_rows_are_sent_as_gaps_where_that_is_shorter() -> None:
    coder, n = over((100, 100)), 10_000
    alike = random_support(n, 200)
    apart = torch.arange(0, n, 5)[(torch.arange(0, n, 5) // 100) % 7 == 0]
    assert coder.encode(alike, n).tolist() == [1, *Rice().encode(alike, n).tolist()]
    assert coder.encode(apart, n).tolist() == [0, *encode_in_rows(apart, ((100, 100),)).tolist()]
    with pytest.raises(CorruptMessageError, match="2"):
        coder.decode(torch.tensor([2, 0, 0], dtype=torch.uint8), 1, n)


@pytest.mark.parametrize("n", [2**33, 2**40, 2**41])
def test_rows_too_wide_to_be_packed_are_sent_as_gaps(n: int) -> None:
    coder = over((1, n))
    assert_returns(coder, torch.tensor([5, 2**32 + 7, n - 1]), n)
    assert int(coder.encode(torch.tensor([n - 1]), n)[0]) == 1


@pytest.mark.parametrize(
    ("width", "rows", "inside", "bound"),
    [
        (250, 0.05, 0.2, 0.5),
        (64, 0.05, 0.2, 0.56),
        (64, 0.01, 1.0, 0.18),
        (4000, 0.05, 0.5, 0.36),
        (700, 0.1, 0.01, 0.83),
    ],
)
def test_rows_take_few_bits_where_they_differ(width: int, rows: float, inside: float, bound: float) -> None:
    n, generator = 1_000_000 // width * width, torch.Generator().manual_seed(0)
    chosen = torch.rand(n // width, 1, generator=generator) < rows
    indices = (chosen & (torch.rand(n // width, width, generator=generator) < inside)).flatten().nonzero().flatten()
    coder = over((n // width, width))
    used = assert_returns(coder, indices, n)
    assert used <= coder.size(indices.numel(), n)
    assert used * 8 < bound * fewest_bits(n, indices.numel())
    assert used < Rice().encode(indices, n).numel()


@pytest.mark.parametrize("density", [0.001, 0.005, 0.02])
@pytest.mark.parametrize("shape", [(1_000_000,), (1_000_000, 1), (111_111, 3, 3), (250, 4000)])
def test_rows_take_little_more_where_they_do_not_differ(shape: tuple[int, ...], density: float) -> None:
    n, coder = math.prod(shape), over(shape)
    k = int(n * density)
    used = assert_returns(coder, random_support(n, k), n)
    assert used <= coder.size(k, n)
    assert used * 8 <= 1.02 * fewest_bits(n, k)
