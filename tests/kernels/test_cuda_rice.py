"""Rice codes by the Triton kernels against their definition, bit for bit."""

import importlib.util
import os

import pytest
import torch

from gradwire.core.payload import CorruptMessageError
from gradwire.kernels import rice
from gradwire.kernels.dispatch import reference_only

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is no GPU, and TRITON_INTERPRET=1 is not set", allow_module_level=True)

from gradwire.kernels import cuda
from gradwire.kernels.cuda import rice_writer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def support(kind, count, n, seed=0):
    """Rising positions: anywhere, in clusters with long jumps between them, or next to each other."""
    draw = torch.Generator().manual_seed(seed)
    if kind == "random":
        return torch.randperm(n, generator=draw)[:count].sort().values if n < 10**7 else wide(count, n, draw)
    if kind == "clustered":
        starts = torch.randint(n // 64, (max(1, count // 16),), generator=draw).unique() * 64
        return (starts[:, None] + torch.arange(16)).flatten()[:count]
    return torch.arange(count) + (n - count)


def wide(count, n, draw):
    return torch.randint(n, (2 * count,), generator=draw).unique()[:count]


CASES = [
    ("random", 1, 1),
    ("random", 1, 70_000),
    ("random", 7, 7),
    ("random", 513, 100_000),
    ("random", 1024, 2000),
    ("random", 1025, 10**6),
    ("random", 700, 2**40),
    ("clustered", 1600, 2**22),
    ("clustered", 1030, 2**33),
    ("next", 515, 9000),
    ("next", 600, 2**30),
]


@pytest.mark.parametrize("kind, count, n", CASES)
def test_codes(kind, count, n):
    indices = support(kind, count, n)
    with reference_only():
        expected, used = rice.rice_encode(indices, n)
    data, length = cuda.rice_encode(indices.to(DEVICE), n)
    assert int(length) == int(used)
    assert torch.equal(data.cpu(), expected)


@pytest.mark.parametrize("kind, count, n", [("random", 3 * 512 * 256 + 77, 2**20), ("clustered", 5003, 2**33)])
def test_sizes_by_groups(kind, count, n, monkeypatch):
    """Of very many blocks, groups are added up first."""
    monkeypatch.setattr(rice_writer, "_MANY", 2)
    count = count if DEVICE == "cuda" else min(count, 140_003)
    test_codes(kind, count, n)
    test_several_messages_at_once(kind, count, n)


def test_damaged_messages_by_groups(monkeypatch):
    monkeypatch.setattr(rice_writer, "_MANY", 1)
    test_damaged_messages_are_told_and_stay_inside()


@pytest.mark.parametrize("kind, count, n", CASES)
def test_several_messages_at_once(kind, count, n):
    supports = [support(kind, count, n, seed) for seed in range(3)]
    count = min(map(len, supports))
    with reference_only():
        rows = torch.stack([torch.cat((torch.zeros(3), rice.rice_encode(s[:count], n)[0])) for s in supports]).byte()
        expected = rice.rice_decode(rows[:, 3:], count, n)
    found = cuda.rice_decode(rows.to(DEVICE)[:, 3:], count, n)
    assert torch.equal(found.indices.cpu(), torch.stack([s[:count] for s in supports]))
    assert torch.equal(found.indices.cpu(), expected.indices)
    assert torch.equal(found.used.cpu(), expected.used)
    assert not found.faults.any() and not expected.faults.any()


def test_damaged_messages_are_told_and_stay_inside():
    n, count = 50_000, 1100
    with reference_only():
        data, used = rice.rice_encode(support("random", count, n), n)
    data = data[: int(used)]
    draw = torch.Generator().manual_seed(1)
    rows = data.repeat(12, 1)
    for i, row in enumerate(rows):
        row[torch.randint(6 if i % 2 else len(data), (1,), generator=draw)] ^= 1 << i % 8
    with reference_only():
        expected = rice.rice_decode(rows, count, n)
    found = cuda.rice_decode(rows.to(DEVICE), count, n)
    assert torch.equal(found.faults.cpu().any(1), expected.faults.any(1))
    fine = ~expected.faults.any(1)
    assert 0 < int(fine.sum()) < 12
    assert torch.equal(found.indices.cpu()[fine], expected.indices[fine])
    assert int(found.indices.min()) >= 0 and int(found.indices.max()) < n
    short = cuda.rice_decode(data[None, :-1].to(DEVICE), count, n)
    assert short.faults.any()
    assert cuda.rice_decode(data[None, :3].to(DEVICE), count, n).faults.any()


@pytest.mark.parametrize("count, most, width", [(0, 1, 1), (3, 200, 1), (700, 40, 2), (1500, 10_000, 3)])
def test_blocks_of_any_gaps(count, most, width):
    gaps = torch.randint(most, (count,), generator=torch.Generator().manual_seed(count))
    with reference_only():
        expected = rice.encode_blocks(gaps, width)
    data = cuda.encode_blocks(gaps.to(DEVICE), width)
    assert torch.equal(data.cpu(), expected)
    back, used = cuda.decode_blocks(torch.nn.functional.pad(data, (0, 9)), count, width)
    assert torch.equal(back.cpu(), gaps) and used == expected.numel()
    if count:
        with pytest.raises(CorruptMessageError):
            cuda.decode_blocks(data[:-1], count, width)
