"""Long segments, whose rows are added up group by group first, against torch's sums and the definitions."""

import importlib.util
import os
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from gradwire.core.keys import Key
from gradwire.kernels import fused, quantize
from gradwire.kernels.dispatch import reference_only

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is no GPU, and TRITON_INTERPRET=1 is not set", allow_module_level=True)

from gradwire.kernels import cuda
from gradwire.kernels.cuda import segment_stats
from gradwire.kernels.cuda.segment_stats import GROUP, LONG, MEAN, NORM, PEAK, ROOT, SIDES, conclude, room
from gradwire.kernels.cuda.tables import BLOCK, Grid, grid

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KEY = Key(seed=3, step=1, rank=0)
STATS = {"mean": MEAN, "root": ROOT, "norm": NORM, "sides": SIDES, "peak": PEAK}
MIXED = (3, 2 * LONG + 17, 0, 1, GROUP - 1, LONG - 5, 2, GROUP + 1, 0)
SEGMENTS = {
    "one": (BLOCK * LONG + 1,),
    "whole groups": tuple(BLOCK * rows for rows in (GROUP, LONG + GROUP, GROUP, 0, 2 * GROUP)),
    "mixed": tuple(BLOCK * rows - 5 if rows else 0 for rows in MIXED),
}


def rows_of(lengths: tuple[int, ...]) -> tuple[Grid, Tensor]:
    """What tiles might have written down, with what is no number in a short segment, and where nothing was written."""
    where = grid(lengths, torch.device(DEVICE))
    parts = torch.full_like(room(where, torch.device(DEVICE)), torch.nan)
    torch.manual_seed(0)
    parts[: 2 * where.rows] = torch.rand(2 * where.rows, dtype=torch.float64) * BLOCK
    parts[2 * where.rows : 3 * where.rows] = torch.randint(BLOCK, (where.rows,)).double()
    if len(lengths) > 4:
        parts[where.segment_row[4]] = torch.inf
    return where, parts


def by_torch(kinds: Tensor, count: int, stat: str, clip: float) -> tuple[Tensor, Tensor]:
    one, two, three = kinds.sum(1)
    if stat == "sides":
        return one / max(three, 1), two / max(count - three, 1)
    if stat == "peak":
        limit = clip * (one / max(count, 1)).sqrt() if one else torch.tensor(torch.inf)
        peak = kinds[1].max() if kinds.shape[1] else one
        return torch.minimum(peak, limit), limit
    value = {"mean": one / max(count, 1), "root": (one / max(count, 1)).sqrt(), "norm": one.sqrt()}[stat]
    return value, torch.tensor(0.0)


@pytest.mark.parametrize("stat", STATS)
@pytest.mark.parametrize("lengths", SEGMENTS.values(), ids=SEGMENTS)
def test_sums_of_long_segments(stat: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    (where, parts), clip = rows_of(lengths), 1e4
    kinds, edges = parts[: 3 * where.rows].view(3, -1).cpu(), where.segment_row.tolist()
    sums = [by_torch(kinds[:, a:b], n, stat, clip) for (a, b), n in zip(pairwise(edges), lengths, strict=True)]
    expected = torch.tensor(sums).T.float()
    found = []
    for most in (LONG, LONG, 2**62):  # twice by groups, and once by one program for each segment
        monkeypatch.setattr(segment_stats, "LONG", most)
        scales = torch.zeros(2, len(lengths), device=DEVICE)
        conclude(parts, where, STATS[stat], scales[0], scales[1], clip)
        found.append(scales.cpu())
        torch.testing.assert_close(found[-1], expected, rtol=2**-23, atol=0.0)
    assert torch.equal(found[0].view(torch.int32), found[1].view(torch.int32))


@pytest.mark.parametrize("skew", [0, 1])
def test_messages_of_long_segments(skew: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that asks for a number per segment, bit for bit, with groups so small that a few tiles fill them."""
    monkeypatch.setattr(segment_stats, "LONG", 2)
    monkeypatch.setattr(segment_stats, "GROUP", 4)
    lengths = (3001, 20_000, 0, 16, 10_345)
    torch.manual_seed(0)
    x, table, names = torch.randn(sum(lengths)), torch.tensor(lengths), ("a", "b", "c", "d", "e")
    lies = torch.cat((x[:skew], x)).to(DEVICE)[skew:]
    ways: list[tuple[str, tuple[object, ...]]] = [("sign", (False,)), ("sign", (True,)), ("onebit", ())]
    ways += [("qsgd", (names, KEY, 7, None)), ("ternary", (names, KEY, 2.5))]
    for name, how in ways:
        with reference_only():
            expected = getattr(quantize, f"{name}_encode")(x, table, *how)
        assert torch.equal(getattr(cuda, f"{name}_encode")(lies, table.to(DEVICE), *how).cpu(), expected), name


def test_steps_and_turns_of_long_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_stats, "LONG", 2)
    monkeypatch.setattr(segment_stats, "GROUP", 4)
    lengths = (3000, 30_000, 0, 16, 12_345)
    torch.manual_seed(0)
    (g, e), table = torch.randn(2, sum(lengths)), torch.tensor(lengths)
    left, mine = e.clone(), e.clone().to(DEVICE)
    with reference_only():
        expected, _ = fused.feedback_sign_(g, left, 0.9, lengths, False)
        rows = torch.stack([quantize.sign_encode(x, table, False) for x in (g, e)])
        merged = fused.merge_sign(rows, e, lengths, False)
    found, nonfinite = cuda.feedback_sign_(g.to(DEVICE), mine, 0.9, lengths, False)
    assert torch.equal(found.cpu(), expected) and torch.equal(mine.cpu(), left) and not nonfinite
    for one, other in zip(cuda.merge_sign(rows.to(DEVICE), e.to(DEVICE), lengths, False), merged, strict=True):
        assert one is not None and other is not None and torch.equal(one.cpu(), other)


def test_short_segments_need_no_launch_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_stats, "_gather", None)
    where, parts = rows_of((BLOCK * LONG, BLOCK * LONG, 5))
    scales = torch.zeros(3, device=DEVICE)
    conclude(parts, where, MEAN, scales)
    assert bool((scales > 0).all())
    with pytest.raises(TypeError):
        conclude(parts, grid((BLOCK * LONG + 1,), torch.device(DEVICE)), MEAN, scales)
