"""The compiled CPU kernels say, bit for bit, what their plain-torch definitions say."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from gradwire.core.keys import Key
from gradwire.kernels import chunks, fused, quantize, select
from gradwire.kernels.cpu import buffer_pool
from gradwire.kernels.dispatch import reference_only, versions

KEY = Key(seed=1, step=2**33 + 5, rank=2, purpose="test")
TABLES = [(1,), (7,), (8,), (9,), (1000,), (300, 0, 5, 695), (70_001, 1, 29_998)]

QUANTIZERS = {
    "sign": (lambda x, n, names: quantize.sign_encode(x, n, False), quantize.sign_decode),
    "sign of the norm": (lambda x, n, names: quantize.sign_encode(x, n, True), quantize.sign_decode),
    "onebit": (lambda x, n, names: quantize.onebit_encode(x, n), quantize.onebit_decode),
    "ternary": (lambda x, n, names: quantize.ternary_encode(x, n, names, KEY, 2.5), quantize.ternary_decode),
    "ternary unclipped": (lambda x, n, names: quantize.ternary_encode(x, n, names, KEY, 0.0), quantize.ternary_decode),
    "natural": (
        lambda x, n, names: quantize.natural_encode(x, n, names, KEY),
        lambda data, n: quantize.natural_decode(data, int(n.sum())),
    ),
}
for levels, bucket in ((127, 512), (7, None), (1, 3), (1000, 100), (65535, None)):
    QUANTIZERS[f"qsgd {levels} {bucket}"] = (
        lambda x, n, names, a=levels, b=bucket: quantize.qsgd_encode(x, n, names, KEY, a, b),
        lambda data, n, a=levels, b=bucket: quantize.qsgd_decode(data, n, a, b, True),
    )
for bits, block in ((8, 256), (4, 128), (2, 64), (4, 5)):
    QUANTIZERS[f"int{bits} {block}"] = (
        lambda x, n, names, a=bits, b=block: quantize.integer_encode(x, n, a, b),
        lambda data, n, a=bits, b=block: quantize.integer_decode(data, n, a, b),
    )


def inputs(n: int) -> dict[str, Tensor]:
    torch.manual_seed(n)
    x = torch.randn(n)
    spike = torch.zeros(n)
    spike[n // 2] = -3.0
    return {"normal": x, "zeros": torch.zeros(n), "spike": spike, "tiny": x * 1e-41, "huge": x * 1e30}


def test_the_compiled_versions_are_there() -> None:
    assert versions("cpu") is not None


@pytest.mark.parametrize("name", QUANTIZERS)
def test_quantizers(name: str) -> None:
    encode, decode = QUANTIZERS[name]
    for lengths in TABLES:
        counts = torch.tensor(lengths)
        names = tuple(f"unit{i}" for i in range(len(lengths)))
        for kind, x in inputs(sum(lengths)).items():
            fast = encode(x, counts, names)
            with reference_only():
                slow = encode(x, counts, names)
            assert torch.equal(fast, slow), (lengths, kind)
            heard = decode(fast, counts)
            with reference_only():
                assert torch.equal(heard, decode(fast, counts)), (lengths, kind)


@pytest.mark.parametrize("lengths", TABLES)
@pytest.mark.parametrize("ratio", [0.0, 0.001, 0.3, 1.0])
def test_topk(lengths: tuple[int, ...], ratio: float) -> None:
    counts = tuple(min(n, round(ratio * n)) for n in lengths)
    for kind, x in inputs(sum(lengths)).items():
        with reference_only():
            slow = fused.topk(x, lengths, counts)
        assert torch.equal(fused.topk(x, lengths, counts), slow), kind


RULES = {
    "residual": (False, fused.Accumulation(decay=0.9)),
    "momentum": (True, fused.Accumulation(momentum=0.9)),
    "nesterov": (True, fused.Accumulation(momentum=0.9, nesterov=True)),
}


@pytest.mark.parametrize("rule", RULES)
def test_accumulate_and_select_over_several_steps(rule: str) -> None:
    """Gradients grow a hundredfold and shrink again."""
    heavy, how = RULES[rule]
    for lengths in TABLES:
        n, counts = sum(lengths), tuple(-(-size // 50) for size in lengths)
        fast, slow = ([torch.zeros(n), torch.zeros(n) if heavy else None] for _ in range(2))
        for step, scale in enumerate((1.0, 1.0, 100.0, 0.01, 1.0)):
            grad = inputs(n)["normal"].roll(step) * scale
            if step == 3:
                grad[0] = float("nan")
            found = fused.carry_topk_(grad, fast, fast, how, lengths, counts)
            with reference_only():
                known = fused.carry_topk_(grad, slow, slow, how, lengths, counts)
            for mine, theirs in zip(found[:2], known[:2], strict=True):
                assert torch.equal(mine, theirs), (lengths, step)
            assert bool(found.nonfinite) == bool(known.nonfinite) == (step == 3)
            for memories in (fast, slow):
                fused.subtract_sent_(*memories, found.indices, found.values)
            assert torch.equal(fast[0], slow[0])
            assert not heavy or torch.equal(fast[1], slow[1])


@pytest.mark.parametrize("lengths", TABLES)
def test_chunks(lengths: tuple[int, ...]) -> None:
    for k, chunk in ((1, 3), (4, 4096), (7, 100), (40, 300), (70, 1000)):
        for x in inputs(sum(lengths)).values():
            found = chunks.chunk_topk(x, lengths, k, chunk)
            with reference_only():
                assert torch.equal(found, chunks.chunk_topk(x, lengths, k, chunk))


@pytest.mark.parametrize("lengths", TABLES)
def test_error_feedback(lengths: tuple[int, ...]) -> None:
    calls = [
        lambda g, v, *before: fused.feedback_sign_(g, v, 0.9, lengths, False, *before),
        lambda g, v, *before: fused.feedback_sign_(g, v, 1.0, lengths, True, *before),
        lambda g, v, *before: fused.feedback_integer_(g, v, 1.0, lengths, 8, 256, *before),
        lambda g, v, *before: fused.feedback_integer_(g, v, 1.0, lengths, 4, 100, *before),
    ]
    for call in calls:
        for grad in inputs(sum(lengths)).values():
            fast, slow = grad.flip(0).clone(), grad.flip(0).clone()
            data, nonfinite = call(grad, fast)
            with reference_only():
                known, _ = call(grad, slow)
            assert torch.equal(data, known)
            assert torch.equal(fast, slow)
            assert not nonfinite
            for dtype in (torch.float32, torch.float64):
                old, new = grad.flip(0).to(dtype), torch.full_like(grad, torch.nan)
                carried, _ = call(grad, new, old)
                assert torch.equal(carried, known) and torch.equal(new, slow)
                assert torch.equal(old, grad.flip(0).to(dtype))


@pytest.mark.parametrize("indebted", [False, True])
@pytest.mark.parametrize("lengths", TABLES)
def test_a_server_s_turn(lengths: tuple[int, ...], indebted: bool) -> None:
    n, counts = sum(lengths), torch.tensor(lengths)
    ways = [
        (fused.merge_sign, (False,), lambda x: quantize.sign_encode(x, counts, False)),
        (fused.merge_sign, (True,), lambda x: quantize.sign_encode(x, counts, True)),
        (fused.merge_integer, (8, 256), lambda x: quantize.integer_encode(x, counts, 8, 256)),
        (fused.merge_integer, (4, 100), lambda x: quantize.integer_encode(x, counts, 4, 100)),
        (fused.merge_integer, (2, 7), lambda x: quantize.integer_encode(x, counts, 2, 7)),
    ]
    for merge, how, encode in ways:
        rows = torch.stack([encode(x) for x in list(inputs(n).values())[:3]])
        debt = torch.randn(n) if indebted else None
        data, left = merge(rows, debt, lengths, *how)
        with reference_only():
            known, owed = merge(rows, debt, lengths, *how)
        assert torch.equal(data, known)
        assert (left is None) == (owed is None) == (not indebted)
        assert left is None or torch.equal(left, owed)


def test_sixteen_bit_gradients_are_widened() -> None:
    lengths, counts = (500,), (9,)
    for dtype in (torch.bfloat16, torch.float16):
        grad = torch.randn(500).to(dtype)
        fast, slow = torch.ones(500), torch.ones(500)
        found = fused.carry_topk_(grad, (fast, None), (fast, None), fused.Accumulation(), lengths, counts)
        with reference_only():
            known = fused.carry_topk_(grad, (slow, None), (slow, None), fused.Accumulation(), lengths, counts)
        assert torch.equal(found.indices, known.indices)
        assert torch.equal(fast, slow)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_casts(dtype: torch.dtype) -> None:
    bits = torch.randint(-(2**31), 2**31, (100_003,), generator=torch.Generator().manual_seed(0))
    edges = torch.tensor([65504.0, 65519.996, 65520.0, 3.39e38, 2.0**-14, 6e-8, 2.0**-25, -(2.0**-25), 1e-40, -0.0])
    for x in (bits.to(torch.int32).view(torch.float32), torch.randn(1001) * 1e-5, edges, torch.tensor([])):
        narrow = quantize.cast_encode(x, dtype)
        with reference_only():
            known = quantize.cast_encode(x, dtype)
        whole = ~x.isnan()
        assert torch.equal(narrow.view(torch.int16)[whole], known.view(torch.int16)[whole])
        assert bool(narrow[~whole].isnan().all())
        wide = quantize.cast_decode(known)
        assert torch.equal(wide[whole], known.float()[whole]) and wide.dtype == torch.float32


def test_draws() -> None:
    tables = [((1,), (1,)), ((5,), (5,)), ((1000, 1, 30, 17), (1000, 1, 0, 4)), ((10_000_019, 64), (9000, 64))]
    for lengths, counts in tables:
        names = tuple(f"unit{i}" for i in range(len(lengths)))
        drawn = select.draw(KEY, names, lengths, counts, torch.device("cpu"))
        with reference_only():
            assert torch.equal(drawn, select.draw(KEY, names, lengths, counts, torch.device("cpu")))


def test_mean_of_sparse_messages() -> None:
    torch.manual_seed(0)
    for n, k, world in ((100, 30, 4), (1_000_000, 5000, 3), (7, 0, 2)):
        places = [torch.randperm(n)[:k] for _ in range(world)]
        bounds = tuple(range(0, world * k + 1, k)) if k else (0,) * (world + 1)
        indices, values = torch.cat(places), torch.randn(world * k)
        mean = fused.scatter_mean(values, indices, bounds, n, world)
        with reference_only():
            assert torch.equal(mean, fused.scatter_mean(values, indices, bounds, n, world))


@pytest.mark.parametrize(
    ("n", "k", "world"), [(100, 30, 4), (3_000_000, 300_000, 3), (7, 0, 2), (0, 0, 2), (5000, 5000, 4)]
)
def test_mean_of_sparse_messages_in_place(n: int, k: int, world: int) -> None:
    torch.manual_seed(0)
    indices = torch.cat([torch.randperm(n)[:k].sort().values for _ in range(world)])
    values, bounds = torch.randn(world * k), tuple(k * rank for rank in range(world + 1))
    mean, known = torch.full((2, n), torch.nan)
    fused.scatter_mean_(mean, values, indices, bounds, world)
    with reference_only():
        fused.scatter_mean_(known, values, indices, bounds, world)
        whole = fused.scatter_mean(values, indices, bounds, n, world)
    assert torch.equal(mean, known) and torch.equal(mean, whole)


@pytest.mark.parametrize("values", [0, 100, 3000, 40_000])
def test_selection_of_a_gradient_that_is_mostly_zeros(values: int) -> None:
    """As that of an embedding: there may be fewer numbers than are sent, or fewer than candidates should be."""
    n, counts = 400_000, (4000,)
    torch.manual_seed(0)
    states = []
    for plain in (False, True):
        draw, residual = torch.Generator().manual_seed(1), torch.zeros(n)
        taken = []
        for step in range(4):
            grad = torch.zeros(n)
            grad[torch.randperm(n, generator=draw)[:values]] = torch.randn(values, generator=draw)
            grad[7 * step] = 0.0 if values == 100 else 1e-42  # neither zero nor normal
            grad[n - 1] = -0.0
            with reference_only() if plain else nullcontext():
                found = fused.carry_topk_(grad, (residual, None), (residual, None), fused.Accumulation(), (n,), counts)
                fused.subtract_sent_(residual, None, found.indices, 0.9 * found.values)
            taken += [found.indices, found.values]
        states.append([residual, *taken])
    assert all(map(torch.equal, *states))


def test_selection_where_all_that_is_large_lies_together() -> None:
    """Candidates of one place may take the room of all others."""
    n, lengths, counts = 300_000, (200_000, 100_000), (200, 100)
    grad = torch.randn(n)
    grad[50_000:50_600] *= 1000
    grad[250_000:250_050] = 7.0  # ties
    fast, slow = torch.zeros(n), torch.zeros(n)
    found = fused.carry_topk_(grad, (fast, None), (fast, None), fused.Accumulation(), lengths, counts)
    with reference_only():
        known = fused.carry_topk_(grad, (slow, None), (slow, None), fused.Accumulation(), lengths, counts)
    assert torch.equal(found.indices, known.indices)
    assert torch.equal(found.values, known.values)
    assert torch.equal(fast, slow)


def test_large_buffers_make_room_for_each_other() -> None:
    """What half of 25.6 million entries takes stays; beyond that, the oldest goes."""
    sizes = [13 * 2**23, 13 * 2**22, 2**23, 2**24]
    held = [buffer_pool.pooled_empty(size, "uint8") for size in sizes]
    where = {array.ctypes.data for array in held}
    del held
    held = [buffer_pool.pooled_empty(size, "uint8") for size in sizes]
    assert {array.ctypes.data for array in held} == where
    large = buffer_pool.pooled_empty(2**28, "uint8")
    del held, large
    assert sum(memory.size for memory in buffer_pool._idle.values()) == 2**28


def test_large_buffers_come_back_when_nothing_refers_to_them() -> None:
    first = torch.from_numpy(buffer_pool.pooled_empty(2_000_000, "float32"))
    where = first.data_ptr()
    held = first[5:10]
    del first
    assert torch.from_numpy(buffer_pool.pooled_empty(2_000_000, "float32")).data_ptr() != where
    del held
    assert torch.from_numpy(buffer_pool.pooled_empty(2_000_000, "float32")).data_ptr() == where
