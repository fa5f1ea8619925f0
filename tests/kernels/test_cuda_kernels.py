"""The Triton kernels against their definitions, bit for bit.

They run on a GPU where there is one; else under Triton's interpreter, if ``TRITON_INTERPRET=1`` was set beforehand.
"""

import importlib.util
import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradwire.core.keys import Key
from gradwire.core.segments import Segments
from gradwire.engine import Engine, Lockstep, build, default_rules
from gradwire.exchanges.servers import server_slice
from gradwire.kernels import chunks, dispatch, fused, quantize, select
from gradwire.kernels.dispatch import reference_only
from gradwire.kernels.fused import Accumulation

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is no GPU, and TRITON_INTERPRET=1 is not set", allow_module_level=True)

from gradwire.kernels import cuda
from gradwire.kernels.cuda import merge
from gradwire.kernels.cuda.topk import selection, workspace
from gradwire.kernels.cuda.topk.workspace import plan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1,), (7,), (8, 0, 9), (1000,), (5000, 0, 3001), (16, 4096, 24, 5000)]
RULES = [Accumulation(decay=0.7), Accumulation(0.9), Accumulation(0.9, nesterov=True)]
KEY = Key(seed=7, step=2**33 + 3, rank=1)


def draw(kind, n, seed=0):
    torch.manual_seed(seed)
    x = torch.randn(n)
    if kind == "ties":
        x = x.round()
    elif kind == "zeros":
        x[torch.rand(n) > 0.002] = 0.0
    elif kind == "equal":
        x = torch.full((n,), -2.0)
    elif kind == "near":
        x = 1.2 + 0.02 * torch.rand(n)
    return x


def plain(function, *args):
    with reference_only():
        return function(*args)


def on(device, *args):
    return [a.to(device) if isinstance(a, torch.Tensor) else a for a in args]


def same(found, expected):
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert torch.equal(found.cpu(), expected), (found.cpu() != expected).nonzero().flatten()[:10]


def budgets(lengths):
    return {
        "few": tuple(min(n, max(1, n // 100)) for n in lengths),
        "some": tuple(n // 3 for n in lengths),
        "mixed": tuple((0, n, n // 50)[i % 3] for i, n in enumerate(lengths)),
    }


@pytest.mark.parametrize("lengths", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "equal"])
def test_topk(lengths, kind):
    x = draw(kind, sum(lengths))
    for counts in budgets(lengths).values():
        same(cuda.topk(x.to(DEVICE), lengths, counts), plain(fused.topk, x, lengths, counts))


@pytest.mark.parametrize("rule", RULES, ids=["decay", "momentum", "nesterov"])
@pytest.mark.parametrize("lengths", [(7,), (1000,), (5000, 0, 3001), (16, 4096, 24, 9000)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_one_pass_selection(lengths, rule, dtype):
    n = sum(lengths)
    counts = budgets(lengths)["few"]
    v, u = torch.zeros(n), None if rule.momentum == 0 else torch.zeros(n)
    v2, u2 = on(DEVICE, v.clone(), None if u is None else u.clone())
    for step in range(3):
        g = draw("normal", n, step).to(dtype)
        if step == 1:
            g[n // 2], g[0] = float("nan"), float("-inf")
        expected = plain(fused.carry_topk_, g, (v, u), (v, u), rule, lengths, counts)
        found = cuda.carry_topk_(g.to(DEVICE), (v2, u2), (v2, u2), rule, lengths, counts)
        for a, b in zip(found, expected, strict=True):
            same(a, b)
        plain(fused.subtract_sent_, v, u, expected.indices, expected.values)
        cuda.subtract_sent_(v2, u2, found.indices, found.values)
        same(v2, v)
        if u is not None:
            same(u2, u)


@pytest.mark.parametrize("rule", RULES, ids=["decay", "momentum", "nesterov"])
@pytest.mark.parametrize("turns", [False, True])
def test_accumulation(rule, turns):
    n = 5003
    g, v, u = draw("normal", n), draw("normal", n, 1), None if rule.momentum == 0 else draw("normal", n, 2)
    g[7] = float("inf")
    v2, u2, old = on(DEVICE, v.clone(), None if u is None else u.clone(), v.neg() if turns else None)
    same(
        cuda.accumulate_(g.to(DEVICE), v2, u2, rule, old),
        plain(fused.accumulate_, g, v, u, rule, v.neg() if turns else None),
    )
    same(v2, v)
    if u is not None:
        same(u2, u)


@pytest.mark.parametrize("rule", RULES, ids=["decay", "momentum", "nesterov"])
@pytest.mark.parametrize("mask", [False, True])
def test_memories_that_take_turns(rule, mask):
    lengths, counts = (5000, 0, 3001, 16), (50, 0, 0, 16)
    n = sum(lengths)
    first = torch.zeros(n), None if rule.momentum == 0 else torch.zeros(n)
    before = tuple(x if x is None else x.clone().to(DEVICE) for x in first)
    after = tuple(x if x is None else torch.empty_like(x) for x in before)
    for step in range(3):
        g = draw("normal", n, step)
        if step == 1:
            g[6000] = float("inf")  # where nothing is wanted
        held = [x if x is None else x.clone() for x in before]
        expected = plain(fused.carry_topk_, g, first, first, rule, lengths, counts, 1 + mask)
        if step == 2:
            found = cuda.carry_topk_(g.to(DEVICE), before, after, rule, lengths, counts)
            cuda.subtract_sent_(after[0], after[1] if mask else None, found.indices, found.values)
        else:
            found = cuda.carry_topk_(g.to(DEVICE), before, after, rule, lengths, counts, 1 + mask)
        for a, b in zip(found, expected, strict=True):
            same(a, b)
        for old, kept, new, wanted in zip(before, held, after, first, strict=True):
            if old is not None:
                assert torch.equal(old, kept)
                same(new, wanted)
        before, after = after, before


@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "equal"])
def test_selection_of_odd_magnitudes(kind):
    lengths, counts = (9000, 300, 6000), (60, 10, 6)
    g = draw(kind, sum(lengths))
    v = torch.zeros(sum(lengths))
    v2, g2 = on(DEVICE, v.clone(), g)
    expected = plain(fused.carry_topk_, g, (v, None), (v, None), Accumulation(), lengths, counts)
    found = cuda.carry_topk_(g2, (v2, None), (v2, None), Accumulation(), lengths, counts)
    for a, b in zip(found, expected, strict=True):
        same(a, b)


def mislead(monkeypatch, low, high):
    """Replace the ranges that a sample gives by one of these magnitudes."""
    keys = [int(torch.tensor(size).view(torch.int32)) for size in (low, high)]
    launch = selection.launch

    def launch_and_replace(kernel, programs, facts, fresh, rest, **options):
        launch(kernel, programs, facts, fresh, rest, **options)
        if kernel is selection.refine:
            dense = rest[1][:, workspace.KIND.value] == workspace.DENSE.value
            rest[3][:, workspace.LOW.value] = keys[0]
            rest[3][:, workspace.HIGH.value] = torch.where(dense, max(keys), 0x7FFFFFFF)

    monkeypatch.setattr(selection, "launch", launch_and_replace)


@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("octaves", [0.0, 30.0, 90.0])
def test_a_sample_of_even_magnitudes_finds_a_narrow_range(octaves, ratio, monkeypatch):
    """Spread over so many octaves, so that the range reaches over several coarse bins; 0: normal magnitudes."""
    n, ranges = 300_000, []
    launch = selection.launch

    def launch_and_look(kernel, programs, facts, fresh, rest, **options):
        launch(kernel, programs, facts, fresh, rest, **options)
        if kernel is selection.refine:
            ranges.append(rest[3][0, [workspace.LOW.value, workspace.HIGH.value]].tolist())

    monkeypatch.setattr(selection, "launch", launch_and_look)
    even = torch.rand(n, generator=torch.Generator().manual_seed(7)) - 0.8
    x = draw("normal", n) if octaves == 0 else torch.exp2(octaves * even)
    k = int(n * ratio)
    cuda.topk(x.to(DEVICE), (n,), (k,))
    ((low, high),) = ranges
    keys = x.abs().view(torch.int32)
    assert low <= int(keys.sort(descending=True).values[k - 1]) < high
    assert int(((keys >= low) & (keys < high)).sum()) < n // 16


@pytest.mark.parametrize("low", [0.0, 1e-45, 1e-30, 0.5, 3.0, 1e30, float("inf")])
@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "equal", "near"])
def test_any_range_gives_the_same(low, kind, monkeypatch):
    """Candidates are too few, or too many, or just enough."""
    mislead(monkeypatch, low, float("inf"))
    test_selection_of_odd_magnitudes(kind)


@pytest.mark.parametrize(
    "ends", [(0.0, 1e-45), (1e-45, 1.0), (0.5, 0.9), (0.5, 1e30), (1.5, 3.0), (1e30, 1e31)], ids=str
)
@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "equal", "near"])
def test_any_range_of_half_gives_the_same(ends, kind, monkeypatch):
    mislead(monkeypatch, *ends)
    lengths = (70_001, 0, 3001, 16)
    x = draw(kind, sum(lengths))
    for counts in (tuple(n // 2 for n in lengths), (70_001, 0, 100, 0)):
        same(cuda.topk(x.to(DEVICE), lengths, counts), plain(fused.topk, x, lengths, counts))


@pytest.mark.parametrize("kind", ["near", "far", "same"])
@pytest.mark.parametrize("ratio", [0.01, 0.5])
def test_a_sample_that_misleads(kind, ratio):
    """Magnitudes near each other lie in one coarse bin; where the sampled ones are larger, all of it is wrong."""
    lengths = (140_000, 3001)
    x = 1.2 + 0.02 * torch.rand(sum(lengths))
    if kind == "far":
        x[torch.arange(x.numel()) % (140_000 // 96) < 64] *= 3
    if kind == "same":
        x = x.round(decimals=3)  # a few hundred values
    x[::2] *= -1
    counts = tuple(int(n * ratio) for n in lengths)
    same(cuda.topk(x.to(DEVICE), lengths, counts), plain(fused.topk, x, lengths, counts))


@pytest.mark.parametrize("spread", [1e-6, 1e-4, 1e-3])
def test_magnitudes_that_crowd_into_one_bin(spread):
    """The bin that holds the last winner is cut into finer ones."""
    lengths, counts = (300_000, 70), (2500, 3)
    x = 1.1 + spread * torch.rand(sum(lengths), generator=torch.Generator().manual_seed(3))
    x[::7] *= 1.5
    same(cuda.topk(x.to(DEVICE), lengths, counts), plain(fused.topk, x, lengths, counts))
    x[::7] /= 1.5
    same(cuda.topk(x.to(DEVICE), lengths, counts), plain(fused.topk, x, lengths, counts))


@pytest.mark.parametrize("lengths", [(100_000,), (70, 60_001, 0, 5003)], ids=str)
def test_winners_that_lie_together(lengths):
    """Some slabs have more candidates than slots, and most have none."""
    n = sum(lengths)
    counts = tuple(m // 100 for m in lengths)
    x = draw("normal", n)
    x[n // 3 : n // 3 + n // 90] *= 50
    v, v2 = torch.zeros(n), torch.zeros(n, device=DEVICE)
    expected = plain(fused.carry_topk_, x, (v, None), (v, None), Accumulation(), lengths, counts, 1)
    found = cuda.carry_topk_(x.to(DEVICE), (v2, None), (v2, None), Accumulation(), lengths, counts, 1)
    for a, b in zip((*found, v2), (*expected, v), strict=True):
        same(a, b)


def test_very_many_of_the_largest_numbers_among_zeros():
    """Their bin ends above the highest key there is."""
    lengths, counts = (60_000,), (1_400,)
    x = torch.zeros(60_000)
    x[torch.randperm(60_000, generator=torch.Generator().manual_seed(0))[:1_500]] = torch.linspace(2e38, 3e38, 1_500)
    same(cuda.topk(x.to(DEVICE), lengths, counts), plain(fused.topk, x, lengths, counts))


@pytest.mark.parametrize("larger", [(), (199_000,), (70_000, 140_001)], ids=str)
def test_most_chunks_of_equals_have_no_winner(larger):
    x = torch.ones(200_000)
    x[list(larger)] = 2.0
    lengths, counts = (200_000,), (100,)
    same(cuda.topk(x.to(DEVICE), lengths, counts), plain(fused.topk, x, lengths, counts))


@pytest.mark.parametrize("filled", [0.05, 0.25])
def test_many_equals_in_several_chunks(filled):
    """More are wanted than are not zero; or very many are equal."""
    lengths, counts = (5, 80_000, 31), (1, 4_900, 10)
    n = sum(lengths)
    g = draw("normal", n).sign() * (torch.rand(n) < filled)
    v, v2 = torch.zeros(n), torch.zeros(n, device=DEVICE)
    expected = plain(fused.carry_topk_, g, (v, None), (v, None), Accumulation(), lengths, counts, 1)
    found = cuda.carry_topk_(g.to(DEVICE), (v2, None), (v2, None), Accumulation(), lengths, counts, 1)
    for a, b in zip((*found, v2), (*expected, v), strict=True):
        same(a, b)


@pytest.mark.parametrize("rule", RULES, ids=["decay", "momentum", "nesterov"])
@pytest.mark.parametrize("ratio", [0.005, 0.5])
def test_gradients_that_repeat_and_jump(rule, ratio):
    lengths = (90_001, 5000, 300)
    counts = tuple(int(n * ratio) for n in lengths)
    n = sum(lengths)
    v, u = torch.zeros(n), None if rule.momentum == 0 else torch.zeros(n)
    v2, u2 = on(DEVICE, v.clone(), None if u is None else u.clone())
    for size in (1.0, 1.0, 1.0, 1000.0, 1e-3):
        g = size * draw("normal", n)
        expected = plain(fused.carry_topk_, g, (v, u), (v, u), rule, lengths, counts, 2)
        found = cuda.carry_topk_(g.to(DEVICE), (v2, u2), (v2, u2), rule, lengths, counts, 2)
        for a, b in zip((*found, v2, u2), (*expected, v, u), strict=True):
            assert a is b is None or torch.equal(a.cpu(), b)


def test_selection_leaves_its_scratch_clean():
    lengths, counts = (9000, 100), (90, 3)
    for seed in range(3):
        x = draw("normal" if seed else "equal", sum(lengths), seed)
        same(cuda.topk(x.to(DEVICE), lengths, counts), plain(fused.topk, x, lengths, counts))


@pytest.mark.parametrize(
    ("length", "count", "run"),
    [(589_824, 5898, 16), (65_536, 300, 64), (589_824, 590, 64), (589_824, 58_982, 64)],
    ids=["one percent", "a small matrix", "few entries", "many entries"],
)
def test_short_samples_where_they_suffice(length, count, run):
    assert plan((length, 100, 5000), (count, 1, 0), torch.device(DEVICE)).run == run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [0, 7, 2048, 5003])
@pytest.mark.parametrize("bad", [None, torch.nan, -torch.inf])
def test_zeros_for_what_is_not_finite(bad, n, dtype):
    x = draw("normal", n).to(dtype)
    x[1::3] = -0.0
    if bad is not None:
        x[::3] = bad
    found, flag = cuda.finite_or_zero(x.to(DEVICE))
    expected, known = plain(fused.finite_or_zero, x)
    assert torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8)) and flag.item() == known.item()


@pytest.mark.parametrize("lengths", SHAPES, ids=str)
def test_draws(lengths):
    names, sizes = tuple(map(str, range(len(lengths)))), torch.tensor(lengths)
    for counts in budgets(lengths).values():
        expected = plain(select.permute, sizes, names, KEY, lengths, counts)
        same(cuda.permute(sizes.to(DEVICE), names, KEY, lengths, counts), expected)


def coders(lengths):
    """Encode and decode by name, with all arguments but the tensor and the lengths."""
    names = tuple(map(str, range(len(lengths))))
    yield "sign_encode", "sign_decode", (False,), ()
    yield "sign_encode", "sign_decode", (True,), ()
    yield "onebit_encode", "onebit_decode", (), ()
    for bits, block in ((8, 256), (4, 256), (2, 64), (4, 10), (2, 13), (8, 100)):
        yield "integer_encode", "integer_decode", (bits, block), (bits, block)
    for levels, bucket in ((127, 512), (7, None), (3, 64), (1, 13), (15, 100), (2, None), (255, None), (255, 64)):
        for biased in (False, True):
            yield "qsgd_encode", "qsgd_decode", (names, KEY, levels, bucket), (levels, bucket, biased)
    for clip in (0.0, 2.5):
        yield "ternary_encode", "ternary_decode", (names, KEY, clip), ()


@pytest.mark.parametrize("lengths", SHAPES, ids=str)
def test_coders_decode_to_where_they_are_told(lengths):
    n = sum(lengths)
    x, table = draw("normal", n), torch.tensor(lengths)
    decoders = {
        plain(quantize.sign_encode, x, table, False): (quantize.sign_decode,),
        plain(quantize.integer_encode, x, table, 4, 128): (quantize.integer_decode, 4, 128),
        plain(quantize.integer_encode, x, table, 2, 100): (quantize.integer_decode, 2, 100),
    }
    for data, (decode, *options) in decoders.items():
        expected = plain(decode, data, table, *options)
        for device in {"cpu", DEVICE}:
            out = torch.full((n + 1,), 7.0, device=device)
            found = decode(data.to(device), table.to(device), *options, out[1:])
            same(found, expected)
            assert found.data_ptr() == out[1:].data_ptr() and out[0] == 7.0


@pytest.mark.parametrize("lengths", SHAPES, ids=str)
def test_coders(lengths):
    x, table = draw("normal", sum(lengths)), torch.tensor(lengths)
    x[::7] = 0.0
    x2, table2 = on(DEVICE, x, table)
    for encode, decode, how, back in coders(lengths):
        data = plain(getattr(quantize, encode), x, table, *how)
        same(getattr(cuda, encode)(x2, table2, *how), data)
        same(
            getattr(cuda, decode)(data.to(DEVICE), table2, *back), plain(getattr(quantize, decode), data, table, *back)
        )


@pytest.mark.parametrize("lengths", [(64,) * 70 + (10, 0, 64, 64, 7, 0), (256, 33, 1, 200)], ids=["many", "few"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_signs_of_short_blocks(lengths, dtype):
    x, table = draw("normal", sum(lengths)).to(dtype), torch.tensor(lengths)
    x[::7] = 0.0
    for norm in (False, True):
        data = plain(quantize.sign_encode, x, table, norm)
        same(cuda.sign_encode(*on(DEVICE, x, table), norm), data)


@pytest.mark.parametrize("lengths", [(16, 4096, 24, 5003), (16, 4096, 20, 5003)], ids=str)
def test_messages_that_lie_anywhere(lengths):
    """Bytes at odd addresses, with segments that start at multiples of eight, and with others."""
    x, table = draw("normal", sum(lengths)), torch.tensor(lengths)
    for encode, decode, how, back in coders(lengths):
        data = plain(getattr(quantize, encode), x, table, *how)
        expected = plain(getattr(quantize, decode), data, table, *back)
        odd = torch.cat((data.new_zeros(1), data)).to(DEVICE)[1:]
        same(getattr(cuda, decode)(odd, table.to(DEVICE), *back), expected)


@pytest.mark.parametrize("n", [0, 1, 7, 5000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_casts(n, dtype):
    x = draw("normal", n) * 10.0 ** torch.randint(-45, 39, (n,))
    x[::7] = float("inf")
    x[1::7] = -3.4e38
    narrow = plain(quantize.cast_encode, x, dtype)
    same(cuda.cast_encode(x.to(DEVICE), dtype), narrow)
    same(cuda.cast_decode(narrow.to(DEVICE)), plain(quantize.cast_decode, narrow))
    assert cuda.cast_encode(torch.full((3,), float("nan"), device=DEVICE), dtype).isnan().all()


@pytest.mark.parametrize("lengths", SHAPES, ids=str)
def test_natural(lengths):
    n, names = sum(lengths), tuple(map(str, range(len(lengths))))
    x = draw("normal", n) * 10.0 ** torch.randint(-40, 38, (n,))
    x[::7] = float("inf")
    x2, table = on(DEVICE, x, torch.tensor(lengths))
    data = plain(quantize.natural_encode, x, table.cpu(), names, KEY)
    same(cuda.natural_encode(x2, table, names, KEY), data)
    same(cuda.natural_decode(data.to(DEVICE), n), plain(quantize.natural_decode, data, n))


@pytest.mark.parametrize("lengths", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_feedback(lengths, dtype):
    n = sum(lengths)
    g, e = draw("normal", n, 1).to(dtype), draw("normal", n, 2)
    g[n // 2] = float("nan")
    hows = [("feedback_sign_", (False,)), ("feedback_sign_", (True,))]
    hows += [("feedback_integer_", how) for how in ((4, 256), (8, 100), (2, 64), (4, 10))]
    for name, how in hows:
        left, left2, g2 = e.clone(), e.clone().to(DEVICE), g.to(DEVICE)
        expected = plain(getattr(fused, name), g, left, 0.9, lengths, *how)
        fresh, before = torch.full_like(left2, torch.nan), e.to(DEVICE)
        for memory, held in ((left2, ()), (fresh, (before,))):
            found = getattr(cuda, name)(g2, memory, 0.9, lengths, *how, *held)
            for a, b in zip((*found, memory), (*expected, left), strict=True):
                same(a, b)
        same(before, e)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("rule", [Accumulation(), *RULES], ids=["plain", "decay", "momentum", "nesterov"])
@pytest.mark.parametrize("n", [1, 1000, 2048, 5003])
def test_feedback_of_values_as_they_are(n, rule, in_place):
    g, memories = draw("normal", n, 1), (draw("normal", n, 2), draw("normal", n, 3) if rule.momentum else None)
    g[n // 2], limit = float("inf"), 1.5
    copies = [tuple(None if x is None else x.to(where).clone() for x in memories) for where in ("cpu", DEVICE)]
    news = copies if in_place else [tuple(None if x is None else torch.full_like(x, 7) for x in c) for c in copies]
    expected = plain(fused.feedback_sum_, g, copies[0], news[0], rule, limit)
    found = cuda.feedback_sum_(g.to(DEVICE), copies[1], news[1], rule, limit)
    for a, b in zip((*found, *news[1]), (*expected, *news[0]), strict=True):
        if b is not None:
            same(a, b)
    for a, b in zip(copies[1], memories, strict=True):
        if not in_place and b is not None:
            same(a, b)


def shifted(x, by):
    """The same entries, so many places into a buffer whose rest is NaN."""
    around = torch.full((by + x.numel() + 3,), torch.nan, dtype=x.dtype, device=DEVICE)
    return around, around[by : by + x.numel()].copy_(x)


@pytest.mark.parametrize("places", [(0, 1, 0), (0, 0, 3), (1, 3, 2), (0, 4, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_feedback_from_one_place_to_another(places, dtype):
    """Gradient, old and new memory may each begin anywhere; nothing is written but the new memory's entries."""
    lengths = (16, 0, 2048, 24, 3001)
    g, e = draw("normal", sum(lengths), 1).to(dtype), draw("normal", sum(lengths), 2)
    hows = [("feedback_sign_", (False,)), ("feedback_integer_", (4, 256)), ("feedback_integer_", (8, 100))]
    for name, how in hows:
        left = e.clone()
        expected = plain(getattr(fused, name), g, left, 0.9, lengths, *how)
        (_, grad), (_, before) = shifted(g, places[0]), shifted(e, places[1])
        around, memory = shifted(torch.full_like(e, torch.nan), places[2])
        found = getattr(cuda, name)(grad, memory, 0.9, lengths, *how, before)
        for a, b in zip((*found, memory, before), (*expected, left, e), strict=True):
            same(a, b)
        assert int(around.isnan().sum()) == places[2] + 3


def test_feedback_copies_a_memory_that_no_kernel_can_walk():
    lengths = (1000, 24)
    g, e = draw("normal", 1024, 1), draw("normal", 1024, 2)
    strange = [e.to(DEVICE).double(), torch.stack((e, e), 1).to(DEVICE)[:, 0]]
    for name, how in (("feedback_sign_", (True,)), ("feedback_integer_", (4, 256)), ("feedback_integer_", (4, 9000))):
        left = e.clone()
        expected = plain(getattr(fused, name), g, left, 0.9, lengths, *how)
        for before in strange:
            memory = torch.full((1024,), torch.nan, device=DEVICE)
            found = getattr(cuda, name)(g.to(DEVICE), memory, 0.9, lengths, *how, before)
            for a, b in zip((*found, memory), (*expected, left), strict=True):
                same(a, b)


@pytest.mark.parametrize("lengths", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["normal", "ties"])
def test_chunks(lengths, kind):
    x = draw(kind, sum(lengths))
    for k, chunk in ((1, 1000), (4, 4096), (9, 64 if sum(lengths) < 2000 else 700)):
        expected = plain(chunks.chunk_topk, x, lengths, k, chunk)
        same(cuda.chunk_topk(x.to(DEVICE), lengths, k, chunk), expected)


@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "equal"])
@pytest.mark.parametrize("k, chunk", [(4, 4096), (5, 8), (8, 8), (3, 3), (8, 8192), (41, 4096), (700, 4096)])
def test_chunks_of_all_kinds(k, chunk, kind):
    """Few and many of wide and narrow chunks, of segments that begin at multiples of four, and of others."""
    scale = 1 if chunk > 100 else 400
    for lengths in ((8200 // scale, 0, 4096 // scale * 4 + 8), (4099 // scale, 4100 // scale)):
        x = draw(kind, sum(lengths))
        x[2::97] = float("inf")
        x[lengths[0] - 1], x[-1] = float("nan"), float("-inf")
        expected = plain(chunks.chunk_topk, x, lengths, k, chunk)
        same(cuda.chunk_topk(x.to(DEVICE), lengths, k, chunk), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_chunks_of_16_bits_that_lie_anywhere(dtype):
    x = draw("normal", 3 * 4096 + 5).to(dtype)
    for k in (4, 9):
        expected = plain(chunks.chunk_topk, x, (x.numel(),), k, 4096)
        for by in (0, 1, 4):
            same(cuda.chunk_topk(shifted(x, by)[1], (x.numel(),), k, 4096), expected)


@pytest.mark.parametrize("world", [1, 2, 3, 9])
def test_scatter_mean(world):
    torch.manual_seed(0)
    n = 5000
    places = [torch.randperm(n)[: 40 * (r + 1)].sort().values for r in range(world)]
    bounds = (0, *torch.tensor([p.numel() for p in places]).cumsum(0).tolist())
    indices, values = torch.cat(places), torch.randn(bounds[-1])
    expected = plain(fused.scatter_mean, values, indices, bounds, n, world)
    same(cuda.scatter_mean(*on(DEVICE, values, indices), bounds, n, world), expected)


@pytest.mark.parametrize("world", [1, 4, 7])
def test_scatter_mean_where_many_meet(world):
    torch.manual_seed(1)
    n = 30_000
    crowd = [torch.randperm(700)[:400].sort().values + 9000 for _ in range(world)]
    places = [torch.cat((torch.randperm(9000)[: 9 * r].sort().values, c)) for r, c in enumerate(crowd)]
    bounds = (0, *torch.tensor([p.numel() for p in places]).cumsum(0).tolist())
    indices, values = torch.cat(places), torch.randn(bounds[-1])
    expected = plain(fused.scatter_mean, values, indices, bounds, n, world)
    same(cuda.scatter_mean(*on(DEVICE, values, indices), bounds, n, world), expected)


@pytest.mark.parametrize("world", [1, 3])
def test_scatter_mean_into_what_is_there(world):
    torch.manual_seed(2)
    n = 7000
    crowd = torch.arange(3001, 3101)  # more in a tile than are held at once
    places = [torch.cat((torch.randperm(n)[: 50 * (r + 1)], crowd)).unique() for r in range(world)]
    bounds = (0, *torch.tensor([p.numel() for p in places]).cumsum(0).tolist())
    indices, values = torch.cat(places), torch.randn(sum(p.numel() for p in places))
    whole = plain(fused.scatter_mean, values, indices, bounds, n, world)
    ranks = torch.repeat_interleave(torch.arange(world), torch.tensor(bounds).diff())
    for start, stop in ((0, n), (1, n), (700, 3050), (3051, 3052), (513, 1025), (40, 40)):
        mine = (indices >= start) & (indices < stop)
        some = values[mine], indices[mine] - start
        ends = (0, *torch.bincount(ranks[mine], minlength=world).cumsum(0).tolist())
        for offset in (0, 1, 4):
            known = torch.full((n + 8,), 7.0, device=DEVICE)
            out = known[offset : offset + stop - start]
            cuda.scatter_mean_(out, *on(DEVICE, *some), ends, world)
            same(out, whole[start:stop])
            assert bool((known[:offset] == 7.0).all() and (known[offset + stop - start :] == 7.0).all())


def test_no_damaged_message_writes_elsewhere():
    known = torch.full((3000,), 7.0, device=DEVICE)
    indices = torch.tensor([1000, -995, 900, -1000, 1999, 0, 700, -997], device=DEVICE)
    cuda.scatter_mean_(known[1000:2000], torch.ones(8, device=DEVICE), indices, (0, 8), 1)
    assert bool((known[:1000] == 7.0).all() and (known[2000:] == 7.0).all())


class Largest(TorchDispatchMode):
    """Notes how many bytes the largest new tensor has."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in known:
                self.nbytes = max(self.nbytes, x.untyped_storage().nbytes())
        return out


def test_a_step_in_place_needs_no_vector(monkeypatch):
    monkeypatch.setattr(dispatch, "faster", lambda device: {name: x for name, x in vars(cuda).items() if callable(x)})
    n = 50_000 if DEVICE == "cpu" else 5_000_000
    plan = build({"weight": (n // 1000, 1000)}, default_rules("dgc(0.001)"), 1).with_fixed_length()
    session = Engine(plan, 0, 1, 0, torch.empty(0, device=DEVICE).device, rollback=False)  # with its number
    for step in range(3):
        grad = draw("normal", n, step).view(-1, 1000).to(DEVICE)
        with Largest() as largest:
            (verdict,) = Lockstep(1).drive([session.run({"weight": grad})])
        assert verdict.updates["weight"].data_ptr() == grad.data_ptr()
        assert 0 < int(grad.count_nonzero()) <= n // 1000
        assert 0 < largest.nbytes < grad.nbytes / 2


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_large_segments_in_a_graph():
    lengths = (3_000_001, 70_000, 1_000_000)
    counts = (3000, 70, 1000)
    n = sum(lengths)
    g, v, u = torch.randn(n, device=DEVICE), torch.zeros(n, device=DEVICE), torch.zeros(n, device=DEVICE)
    cuda.carry_topk_(g, (v, u), (torch.empty_like(v), torch.empty_like(u)), RULES[1], lengths, counts)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = cuda.carry_topk_(g, (v, u), (v, u), RULES[1], lengths, counts)
    v.zero_()
    u.zero_()
    v2, u2 = v.clone(), u.clone()
    for _ in range(4):
        g.normal_()
        graph.replay()
        expected = plain(fused.carry_topk_, g, (v2, u2), (v2, u2), RULES[1], lengths, counts)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)


def test_streams_share_a_plan_and_no_scratch(monkeypatch):
    """While a graph is captured no table can be made, and scratch must be its own."""
    counts, device = (9,), torch.empty(0, device=DEVICE).device
    made = plan((9001,), counts, device)
    first, second = made.pool.take(made, 1), made.pool.take(made, 2)
    for scratch, stream in ((first, 1), (second, 2)):
        made.pool.give(scratch, stream)
    assert made.pool.take(made, 2) is second and made.pool.take(made, 1) is first
    made.pool.give(first, 1)
    assert made.pool.take(made, None) is not first
    monkeypatch.setattr(workspace, "_plan", None)  # then nothing can be made
    for _ in range(workspace._PLANS):
        assert plan(tuple([9001]), counts, device) is made, "by whatever tuple"


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("rule", RULES, ids=["decay", "momentum", "nesterov"])
def test_long_segments_whose_gradients_jump(rule):
    lengths, counts = (6_000_001, 5000), (6000, 50)
    n = sum(lengths)
    v, u = torch.zeros(n, device=DEVICE), None if rule.momentum == 0 else torch.zeros(n, device=DEVICE)
    v2, u2 = v.clone(), None if u is None else u.clone()
    for step, size in enumerate((1.0, 100.0, 1.0, 1e-4, 1e4, 0.0)):
        g = size * draw("ties" if step == 4 else "normal", n, step).to(DEVICE)
        expected = plain(fused.carry_topk_, g, (v, u), (v, u), rule, lengths, counts, 2)
        found = cuda.carry_topk_(g, (v2, u2), (v2, u2), rule, lengths, counts, 2)
        for a, b in zip((*found, v2, u2), (*expected, v, u), strict=True):
            assert a is b is None or torch.equal(a, b)
        if step == 2:  # so that less may be more than what is left
            for memory in (v, u, v2, u2):
                if memory is not None:
                    memory.zero_()


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_more_than_int32_elements():
    n = 2**31 + 5000
    x = torch.zeros(n, device=DEVICE)
    at = torch.tensor([3, 2**31 - 1, 2**31 + 7, n - 1], device=DEVICE)
    x[at] = torch.tensor([1.0, -2.0, 3.0, -4.0], device=DEVICE)
    assert torch.equal(cuda.topk(x, (n,), (3,)), at[1:])
    assert torch.equal(cuda.topk(x, (n - 10, 10), (2, 1)), at[1:])
    x[at] = 0.0
    assert torch.equal(cuda.topk(x, (n,), (5,)), torch.arange(5, device=DEVICE))


@pytest.mark.parametrize("lengths", [(7,), (16, 4096, 24, 5003), (0, 2048, 0), (1000,)], ids=str)
@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("owes", [False, True])
def test_a_servers_turn(lengths, ranks, owes):
    n, table = sum(lengths), torch.tensor(lengths)
    served = draw("normal", n, 9) if owes else None
    hows = [("sign", (norm,)) for norm in (False, True)] + [("integer", how) for how in ((4, 128), (8, 256), (2, 64))]
    for name, how in hows:
        encode = getattr(quantize, f"{name}_encode")
        said = [plain(encode, draw("normal", n, rank), table, *how) for rank in range(ranks)]
        for spare in (1, 8 - said[0].numel() % 4):  # with odd bytes, nothing is aligned
            rows = torch.stack([torch.cat((one, one.new_zeros(spare))) for one in said])
            expected = plain(getattr(fused, f"merge_{name}"), rows[:, :-spare], served, lengths, *how)
            found = getattr(cuda, f"merge_{name}")(rows.to(DEVICE)[:, :-spare], *on(DEVICE, served), lengths, *how)
            same(found[0], expected[0])
            assert (found[1] is None) == (served is None)
            if owes:
                same(found[1], expected[1])


@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "equal"])
@pytest.mark.parametrize("lengths", [(200_003, 0, 3001), (70_000, 16, 131_072, 5)], ids=str)
def test_half_of_long_segments(lengths, kind):
    x = draw(kind, sum(lengths))
    for counts in (tuple(n // 2 for n in lengths), tuple((n, 0)[i % 2] for i, n in enumerate(lengths))):
        same(cuda.topk(x.to(DEVICE), lengths, counts), plain(fused.topk, x, lengths, counts))


def test_half_of_magnitudes_far_apart():
    x = draw("normal", 90_000) * 10.0 ** torch.randint(-38, 38, (90_000,))
    for n in (90_000, 10):
        same(cuda.topk(x[:n].to(DEVICE), (n,), (n // 2,)), plain(fused.topk, x[:n], (n,), (n // 2,)))


@pytest.mark.parametrize("rule", RULES, ids=["decay", "momentum", "nesterov"])
@pytest.mark.parametrize("mask", [False, True])
def test_memories_of_which_half_is_sent(rule, mask):
    lengths, counts = (70_001, 0, 3001, 16), (35_000, 0, 0, 16)
    n = sum(lengths)
    held = torch.zeros(n), None if rule.momentum == 0 else torch.zeros(n)
    before = tuple(x if x is None else x.clone().to(DEVICE) for x in held)
    after = tuple(x if x is None else torch.empty_like(x) for x in before)
    for step in range(3):
        g = draw("normal", n, step)
        if step == 1:
            g[71_000] = float("inf")  # where nothing is wanted
        expected = plain(fused.carry_topk_, g, held, held, rule, lengths, counts, 1 + mask)
        found = cuda.carry_topk_(g.to(DEVICE), before, after, rule, lengths, counts, 1 + mask)
        for a, b in zip(found, expected, strict=True):
            same(a, b)
        for new, wanted in zip(after, held, strict=True):
            if new is not None:
                same(new, wanted)
        before, after = after, before


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_half_of_large_segments_in_a_graph():
    lengths, counts = (6_000_001, 70_000, 1_000_000), (3_000_000, 35_000, 500_000)
    x = torch.randn(sum(lengths), device=DEVICE)
    cuda.topk(x, lengths, counts)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = cuda.topk(x, lengths, counts)
    for spread in (0, 4, 30):  # octaves to either side
        x.normal_().mul_(torch.rand_like(x).mul_(2 * spread).sub_(spread).exp2_())
        graph.replay()
        assert torch.equal(found, plain(fused.topk, x, lengths, counts))


@pytest.mark.parametrize("lengths", [*SHAPES, (40_000, 3, 70_001)], ids=str)
def test_draws_in_their_order(lengths):
    names, sizes = tuple(map(str, range(len(lengths)))), torch.tensor(lengths)
    for counts in budgets(lengths).values():
        expected = plain(select.scattered, sizes, names, KEY, lengths, counts)
        same(cuda.scattered(sizes.to(DEVICE), names, KEY, lengths, counts), expected)


def test_draws_from_more_than_int32():
    lengths, counts = (2**31 + 5000, 70), (600, 7)
    sizes = torch.tensor(lengths)
    expected = plain(select.permute, sizes, ("a", "b"), KEY, lengths, counts)
    same(cuda.permute(sizes.to(DEVICE), ("a", "b"), KEY, lengths, counts), expected)
    same(
        cuda.scattered(sizes.to(DEVICE), ("a", "b"), KEY, lengths, counts),
        (expected + (torch.arange(607) >= 600) * lengths[0]).sort().values,
    )


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize(("name", "how"), [("sign", (False,)), ("integer", (4, 256)), ("integer", (2, 64))], ids=str)
def test_every_shard_is_served_by_the_kernel(world, name, how, monkeypatch):
    units = Segments(("conv", "norm", "fc", "bias"), ((16, 3, 3, 3), (16,), (10, 40), (10,)))
    by_definition = []
    monkeypatch.setattr(merge, "definition", lambda kernel: by_definition.append(kernel) or kernel.__wrapped__)
    for rank in range(world):
        lengths = units.window(*server_slice(units.total, world, rank)).lengths
        message = plain(getattr(quantize, f"{name}_encode"), draw("normal", sum(lengths)), torch.tensor(lengths), *how)
        getattr(cuda, f"merge_{name}")(torch.stack([message] * world).to(DEVICE), None, lengths, *how)
    assert not by_definition  # which would be slower by two orders, and wait for the device
