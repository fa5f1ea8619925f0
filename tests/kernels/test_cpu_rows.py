"""Codes row by row by Numba: the bytes of the definition, its positions, and its words about what is damaged."""

from contextlib import nullcontext
from inspect import unwrap
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire.kernels import rows
from gradwire.kernels.cpu import rows as fast
from gradwire.kernels.rice import encode_blocks

encode, decode = unwrap(rows.encode_in_rows), unwrap(rows.decode_in_rows)

TABLES: tuple[rows.Runs, ...] = (
    ((1, 1),),
    ((1, 9),),
    ((1, 20_000),),  # a vector, which is one row
    ((3000, 1),),  # rows that are joined, or not, by how many positions there are
    ((0, 7), (5, 0), (700, 9), (1, 0), (1, 40)),  # among tensors that are empty
    ((64, 27), (1, 64), (64, 288), (1, 128), (10, 128), (1, 10)),
    ((2000, 11),),  # more rows than a block of counts
    ((3, 8000), (7, 11)),
)


@st.composite
def supports(draw: st.DrawFn) -> tuple[Tensor, rows.Runs]:
    """Rising positions in a table: scattered, in few rows, in all, everywhere, at both ends, one, or none."""
    runs = draw(st.sampled_from(TABLES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    density = draw(st.sampled_from((0.0005, 0.01, 0.2, 0.97)))
    starts, widths = rows.table(tuple(run for run in runs if run[1]), torch.device("cpu"))
    n = int(widths.sum())
    share, place = torch.rand(n, generator=generator), torch.arange(n)
    lucky = (torch.rand(widths.numel(), generator=generator) < 0.05).repeat_interleave(widths)
    chosen = {
        "scattered": share < density,
        "few rows": lucky & (share < density),
        "every row": torch.isin(place, starts) | (share < density),
        "all": share >= 0,
        "ends": (place < 3) | (place >= n - n // 200 - 1),  # a long gap between
        "one": share == share.max(),
        "first and last": (place == 0) | (place == n - 1),
        "none": share < 0,
    }
    return chosen[draw(st.sampled_from(sorted(chosen)))].nonzero().flatten(), runs


@settings(max_examples=100)
@given(supports())
def test_bytes_and_positions_are_those_of_the_definition(support: tuple[Tensor, rows.Runs]) -> None:
    indices, runs = support
    message = encode(indices, runs)
    assert torch.equal(fast.encode_in_rows(indices, runs), message)
    with nullcontext() if indices.numel() == 0 else patch.object(fast, "unwrap"):  # nobody needs to be asked
        found, used = fast.decode_in_rows(torch.cat([message, message]), indices.numel(), runs)
    assert torch.equal(found, indices) and used == message.numel()


@settings(max_examples=100)
@given(supports(), st.integers(0, 2**31), st.integers(1, 255), st.booleans())
def test_damage_reads_as_by_the_definition(
    support: tuple[Tensor, rows.Runs], where: int, flips: int, early: bool
) -> None:
    indices, runs = support
    message = encode(indices, runs)
    if message.numel():
        message[where % (min(message.numel(), 12) if early else message.numel())] ^= flips
    assert _read(fast.decode_in_rows, message, indices.numel(), runs) == _read(decode, message, indices.numel(), runs)


@settings(max_examples=50)
@given(supports(), st.integers(0, 200), st.sampled_from((-1, 0, 0, 1)))
def test_what_is_cut_or_miscounted_reads_as_by_the_definition(
    support: tuple[Tensor, rows.Runs], lost: int, more: int
) -> None:
    indices, runs = support
    message, count = encode(indices, runs), max(0, indices.numel() + more)
    message = message[: max(0, message.numel() - (lost % 3 if lost % 2 else lost))]
    assert _read(fast.decode_in_rows, message, count, runs) == _read(decode, message, count, runs)


@settings(max_examples=50)
@given(st.binary(max_size=120), st.integers(0, 40), st.sampled_from(TABLES), st.booleans())
def test_noise_reads_as_by_the_definition(raw: bytes, count: int, runs: rows.Runs, named: bool) -> None:
    head = (count if named else sum(many for many, _ in rows.joined(runs, max(count, 1)))).to_bytes(4, "little")
    message = torch.tensor(list(head + raw), dtype=torch.uint8)
    assert _read(fast.decode_in_rows, message, count, runs) == _read(decode, message, count, runs)


@pytest.mark.parametrize(
    ("named", "empty", "counts", "ones", "remainders", "said"),
    [
        (3, [], [2, 0, 1], [0b1011], [0], None),
        (2, [0, 1], [1, 0], [0b1011], [0b1], None),
        (3, [], [2, 0, 2], [0b1011], [0], "do not have 3 positions"),
        (3, [], [7, 0, 1], [0xFF], [0], "do not have 8 positions"),
        (4, [], [2, 0, 1], [0b1011], [0], "names 4 of 3 rows"),
        (2, [0, 2], [1, 0], [0b1011], [0], "behind the last of 3"),
        (3, [], [2, 0, 1], [0b10011], [1], None),
        (3, [], [2, 0, 1], [0b100011], [0], "behind its end"),
        (3, [], [2, 0, 1], [0b11], [], "need more than"),
    ],
)
def test_what_no_sender_writes(
    named: int, empty: list[int], counts: list[int], ones: list[int], remainders: list[int], said: str | None
) -> None:
    runs, count = ((3, 6),), 8 if 7 in counts else 3
    numbers = [encode_blocks(torch.tensor(part, dtype=torch.int64), 1) for part in (empty, counts)]
    parts = torch.tensor([named, 0, 0, 0]), *numbers, torch.tensor(ones + remainders)
    message = torch.cat([part.to(torch.uint8) for part in parts])
    heard = _read(fast.decode_in_rows, message, count, runs)
    assert heard == _read(decode, message, count, runs)
    assert said in heard if said else isinstance(heard, tuple)


def test_numbers_that_wrap_around() -> None:
    """Gaps and counts of four bytes, as tables of more than 2**24 rows have them, times 2**31."""
    gap = [31 | 1 << 5 | (8 & 3) << 6, 8 >> 2, 0, 1, 0, 0, 0, 0, 255, 255, 255, 255]  # 8 and an escape
    message = torch.tensor([1, 0, 0, 0, *gap, 0, 0, 1], dtype=torch.uint8)
    with pytest.raises(rows.CorruptMessageError, match="behind the last"):
        rows.read_counts(message, 2**24 + 1, 10)
    for table in ([-1, 4, 0], [3 - 2**62, -(2**62), -(2**63)]):
        with (
            patch.object(rows, "read_counts", return_value=(torch.tensor(table), 4)),
            pytest.raises(rows.CorruptMessageError),
        ):
            decode(message, 3, ((3, 6),))


def test_rows_of_every_width_and_number_have_the_definition_s_parameter() -> None:
    widths = torch.arange(1, 200).repeat_interleave(200)
    counts = torch.arange(200).repeat(199).minimum(widths)
    expected = rows._parameters(counts, widths).tolist()
    pairs = zip(counts.tolist(), widths.tolist(), strict=True)
    assert [fast._parameter(count, width) for count, width in pairs] == expected


@pytest.mark.parametrize("stride", [1, 3])
def test_a_message_may_lie_anywhere(stride: int) -> None:
    runs, indices = ((700, 9), (1, 40)), torch.arange(5, 6000, 7)
    message = encode(indices, runs)
    memory = torch.zeros(stride * message.numel() + 5, dtype=torch.uint8)
    memory[5::stride] = message
    found, used = fast.decode_in_rows(memory[5::stride], indices.numel(), runs)
    assert torch.equal(found, indices) and used == message.numel()
    spread = torch.zeros(stride * indices.numel(), dtype=torch.int64)
    spread[::stride] = indices
    assert torch.equal(fast.encode_in_rows(spread[::stride], runs), message)


def _read(reader: object, message: Tensor, count: int, runs: rows.Runs) -> object:
    try:
        found, used = reader(message, count, runs)
        return found.tolist(), used
    except rows.CorruptMessageError as wrong:
        return str(wrong)
