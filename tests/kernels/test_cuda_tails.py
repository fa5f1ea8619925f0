"""Buffers of more than 2^31 entries: what lies at their end is treated as if it were all there is.

Plain torch need not hold such a buffer: zeros come first, and definitions see the rest of it. Under the interpreter,
the zeros are few, and only this reasoning is tested.
"""

import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from gradwire.core.keys import Key
from gradwire.kernels import chunks, fused, quantize, select
from gradwire.kernels.dispatch import reference_only
from gradwire.kernels.fused import Accumulation
from gradwire.kernels.philox import philox

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is no GPU, and TRITON_INTERPRET=1 is not set", allow_module_level=True)

from gradwire.kernels import cuda

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Zeros in whole blocks and whole bytes, whatever the code; the tail begins below 2^31 and ends beyond it.
HEAD, TAIL = (2**31 // 20480 * 20480 - 40960, 60_003) if DEVICE == "cuda" else (20480, 6003)
N = HEAD + TAIL
KEY = Key(seed=7, step=2**33 + 5, rank=1)
CUTS = {"one segment": (N,), "two segments": (HEAD, TAIL)}

pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and torch.cuda.get_device_properties(0).total_memory < 64e9, reason="needs 64 GB of GPU memory"
)


@pytest.fixture(autouse=True)
def room() -> Iterator[None]:
    yield
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def tail(seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Eighths: sums of them, and of their squares, are exact in any order."""
    torch.manual_seed(seed)
    return (torch.randn(TAIL) * 8).round().to(dtype) / 8


def long(x: Tensor) -> Tensor:
    whole = torch.zeros(N, dtype=x.dtype, device=DEVICE)
    whole[HEAD:] = x.to(DEVICE)
    return whole


def ends_with(found: Tensor, expected: Tensor) -> None:
    """Zeros, and then what is expected."""
    assert found.shape == (N,) and found.dtype == expected.dtype
    assert torch.equal(found[HEAD:].cpu(), expected)
    assert not found[:HEAD].any()


def draws(start: int, n: int, name: str) -> Tensor:
    """What elements from ``start`` on read of a unit's stream."""
    at = torch.arange(start, start + n)
    block = at // 4
    k0, k1 = (torch.full_like(at, word) for word in KEY.words(name))
    step = torch.full_like(at, KEY.step & 0xFFFFFFFF), torch.full_like(at, KEY.step >> 32)
    words = philox((block & 0xFFFFFFFF, block >> 32, *step), (k0, k1))
    return (words.gather(0, at[None] % 4)[0] >> 8).float() * 2.0**-24


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rule", [Accumulation(decay=0.5), Accumulation(0.5)], ids=["decay", "momentum"])
def test_selection_with_feedback(rule: Accumulation, dtype: torch.dtype, cut: str) -> None:
    lengths = CUTS[cut]
    few = (40,) if len(lengths) == 1 else (0, 40)
    short = torch.zeros(TAIL), None if rule.momentum == 0 else torch.zeros(TAIL)
    before = tuple(x if x is None else long(x) for x in short)
    after = tuple(x if x is None else torch.empty_like(x) for x in before)
    for step in range(3):
        g = tail(step, dtype)
        with reference_only():
            expected = fused.carry_topk_(g, short, short, rule, (TAIL,), (40,), 1 + (step != 1))
        if step == 1:
            found = cuda.carry_topk_(long(g), before, after, rule, lengths, few)
            cuda.subtract_sent_(after[0], None, found.indices, found.values)
        else:
            found = cuda.carry_topk_(long(g), before, after, rule, lengths, few, 2)
        assert torch.equal(found.indices.cpu(), expected.indices + HEAD)
        assert torch.equal(found.values.cpu(), expected.values)
        assert not found.nonfinite
        for new, wanted in zip(after, short, strict=True):
            if new is not None and wanted is not None:
                ends_with(new, wanted)
        before, after = after, before


def test_selection_in_place_and_what_is_not_finite() -> None:
    rule, g = Accumulation(0.5, nesterov=True), tail()
    g[-1] = float("nan")
    v, u = torch.zeros(TAIL), torch.zeros(TAIL)
    v2, u2, g2 = long(v), long(u), long(g)
    g2[3] = 100.0
    with reference_only():
        expected = fused.carry_topk_(g, (v, u), (v, u), rule, (TAIL,), (9,))
    found = cuda.carry_topk_(g2, (v2, u2), (v2, u2), rule, (N,), (10,))
    assert found.indices.tolist() == [3, *(expected.indices + HEAD).tolist()]
    assert torch.equal(found.values[1:].cpu(), expected.values) and found.values[0] == 150.0
    assert found.nonfinite
    cuda.subtract_sent_(v2, u2, found.indices[:1], found.values[:1])
    ends_with(v2, v)
    ends_with(u2, u)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("how", [(8, 256), (4, 256), (2, 64)])
def test_feedback_with_integers(how: tuple[int, int], cut: str) -> None:
    g, e = tail(0, torch.bfloat16), tail(1)
    g2, e2 = long(g), long(e)
    with reference_only():
        data, _ = fused.feedback_integer_(g, e, 0.5, (TAIL,), *how)
    found, nonfinite = cuda.feedback_integer_(g2, e2, 0.5, CUTS[cut], *how)
    same_body(found, data, 4 * -(-TAIL // how[1]))
    assert not nonfinite
    ends_with(e2, e)


@pytest.mark.parametrize("norm", [False, True])
def test_feedback_with_signs(norm: bool) -> None:
    g, e = tail(0, torch.bfloat16), tail(1)
    g2, e2 = long(g), long(e)
    with reference_only():
        data, _ = fused.feedback_sign_(g, e, 0.5, (TAIL,), norm)
    found, nonfinite = cuda.feedback_sign_(g2, e2, 0.5, (HEAD, TAIL), norm)
    same_body(found, data, 4)
    assert torch.equal(found[4:8].cpu(), data[:4]) and not nonfinite
    ends_with(e2, e)


def same_body(found: Tensor, expected: Tensor, head: int) -> None:
    """Codes come last, and those of the tail begin with a byte of their own."""
    body = expected[head:]
    assert torch.equal(found[-body.numel() :].cpu(), body)


NAMES = {1: ("tail",), 2: ("head", "tail")}
CODERS = {
    "int8": ("integer", 256, (8, 256), (8, 256)),
    "int4": ("integer", 256, (4, 256), (4, 256)),
    "int2": ("integer", 64, (2, 64), (2, 64)),
    "qsgd": ("qsgd", 512, ("names", KEY, 127, 512), (127, 512, False)),
    "qsgd, few levels": ("qsgd", 64, ("names", KEY, 7, 64), (7, 64, True)),
    "qsgd, whole": ("qsgd", None, ("names", KEY, 15, None), (15, None, False)),
    "ternary": ("ternary", None, ("names", KEY, 0.0), ()),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("coder", CODERS)
def test_coders(coder: str, cut: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, block, how, back = CODERS[coder]
    x, lengths = tail(), CUTS[cut]
    start = HEAD if len(lengths) == 1 else 0
    monkeypatch.setattr(quantize, "uniform", lambda key, names, sizes: draws(start, TAIL, "tail"))
    encode, decode = f"{name}_encode", f"{name}_decode"
    short, table = torch.tensor([TAIL]), torch.tensor(lengths, device=DEVICE)
    with reference_only():
        data = getattr(quantize, encode)(x, short, *_named(how, 1))
        expected = getattr(quantize, decode)(data, short, *back)
    found = getattr(cuda, encode)(long(x), table, *_named(how, len(lengths)))
    same_body(found, data, 4 if block is None else 4 * -(-TAIL // block))
    ends_with(getattr(cuda, decode)(found, table, *back), expected)


def _named(how: tuple[object, ...], segments: int) -> tuple[object, ...]:
    return tuple(NAMES[segments] if part == "names" else part for part in how)


def test_clipped_ternary() -> None:
    """Its bar depends on all of a segment, hence two of them."""
    x, short, table = tail(), torch.tensor([TAIL]), torch.tensor([HEAD, TAIL], device=DEVICE)
    with reference_only():
        data = quantize.ternary_encode(x, short, ("tail",), KEY, 2.5)
        expected = quantize.ternary_decode(data, short)
    found = cuda.ternary_encode(long(x), table, ("head", "tail"), KEY, 2.5)
    same_body(found, data, 4)
    ends_with(cuda.ternary_decode(found, table), expected)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name, how", [("sign", (False,)), ("sign", (True,)), ("onebit", ())])
def test_signs(name: str, how: tuple[bool, ...], cut: str) -> None:
    x, lengths = tail(), CUTS[cut]
    short, table = torch.tensor([TAIL]), torch.tensor(lengths, device=DEVICE)
    encode, decode = f"{name}_encode", f"{name}_decode"
    with reference_only():
        data = getattr(quantize, encode)(x, short, *how)
        expected = getattr(quantize, decode)(data, short)
    found = getattr(cuda, encode)(long(x), table, *how)
    same_body(found, data, 4 if name == "sign" else 8)
    heard = getattr(cuda, decode)(found, table)
    if len(lengths) == 2:
        ends_with(heard, expected)
        return
    up, down = _one_scale(name, how, x)
    assert torch.equal(heard[HEAD:].cpu(), torch.where(x >= 0, up, down))
    assert (heard[:HEAD] == up.to(DEVICE)).all()


def _one_scale(name: str, how: tuple[bool, ...], x: Tensor) -> tuple[Tensor, Tensor]:
    """What zeros leave of the scales: they count as not negative."""
    x = x.double()
    if name == "sign":
        scale = ((x.square().sum() / N).sqrt() if how[0] else x.abs().sum() / N).float()
        return scale, -scale
    below = x < 0
    up = x[~below].sum() / (N - int(below.sum()))
    return up.float(), (x[below].sum() / below.sum()).float()


@pytest.mark.parametrize("cut", CUTS)
def test_natural(cut: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, lengths = tail() * 1.3, CUTS[cut]
    start = HEAD if len(lengths) == 1 else 0
    monkeypatch.setattr(quantize, "uniform", lambda key, names, sizes: draws(start, TAIL, "tail"))
    with reference_only():
        data = quantize.natural_encode(x, torch.tensor([TAIL]), ("tail",), KEY)
        expected = quantize.natural_decode(data, TAIL)
    found = cuda.natural_encode(long(x), torch.tensor(lengths, device=DEVICE), NAMES[len(lengths)], KEY)
    same_body(found, data, 0)
    ends_with(cuda.natural_decode(found, N), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_casts(dtype: torch.dtype) -> None:
    x = tail() * 1.3
    with reference_only():
        expected = quantize.cast_encode(x, dtype)
    found = cuda.cast_encode(long(x), dtype)
    ends_with(found, expected)
    ends_with(cuda.cast_decode(found), expected.float())


@pytest.mark.parametrize("owes", [False, True])
@pytest.mark.parametrize("name, how", [("sign", (False,)), ("integer", (4, 128)), ("integer", (8, 256))])
def test_a_servers_turn(name: str, how: tuple[int, ...], owes: bool) -> None:
    said, heard = [], []
    short, table = torch.tensor([TAIL]), torch.tensor([HEAD, TAIL], device=DEVICE)
    for rank in range(2):
        with reference_only():
            said.append(getattr(quantize, f"{name}_encode")(tail(rank), short, *how))
        heard.append(getattr(cuda, f"{name}_encode")(long(tail(rank)), table, *how))
    served = tail(9) if owes else None
    with reference_only():
        data, left = getattr(fused, f"merge_{name}")(torch.stack(said), served, (TAIL,), *how)
    whole = None if served is None else long(served)
    found, left2 = getattr(cuda, f"merge_{name}")(torch.stack(heard), whole, (HEAD, TAIL), *how)
    same_body(found, data, 4 if name == "sign" else 4 * -(-TAIL // how[1]))
    assert (left is None) == (left2 is None)
    if left is not None:
        ends_with(left2, left)


@pytest.mark.parametrize("world", [1, 3])
def test_scatter_mean(world: int) -> None:
    torch.manual_seed(0)
    places = [torch.randperm(TAIL)[: 40 * (r + 1)].sort().values for r in range(world)]
    bounds = (0, *torch.tensor([p.numel() for p in places]).cumsum(0).tolist())
    indices, values = torch.cat(places), torch.randn(bounds[-1])
    with reference_only():
        expected = fused.scatter_mean(values, indices, bounds, TAIL, world)
    there = values.to(DEVICE), (indices + HEAD).to(DEVICE), bounds
    ends_with(cuda.scatter_mean(*there, N, world), expected)
    out = torch.ones(N, device=DEVICE)
    cuda.scatter_mean_(out, *there, world)
    ends_with(out, expected)


def test_chunks() -> None:
    x = tail()
    with reference_only():
        expected = chunks.chunk_topk(x, (TAIL,), 4, 4096)
    found = cuda.chunk_topk(long(x), (HEAD, TAIL), 4, 4096)
    assert torch.equal(found[-expected.numel() :].cpu(), expected + HEAD)
    zeros = torch.arange(HEAD // 4096, device=DEVICE)[:, None] * 4096 + torch.arange(4, device=DEVICE)
    assert torch.equal(found[: -expected.numel()], zeros.flatten())


def test_draws() -> None:
    lengths, counts = (N, 1000), (3000, 10)
    with reference_only():
        expected = select.permute(torch.tensor(lengths), ("a", "b"), KEY, lengths, counts)
    found = cuda.permute(torch.tensor(lengths, device=DEVICE), ("a", "b"), KEY, lengths, counts)
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("dropped", [True, False])
def test_dropped_steps(dropped: bool) -> None:
    flag = torch.tensor(dropped, device=DEVICE)
    known, old = tail(0), tail(1)
    now, update = long(known), long(known)
    cuda.copy_if_(flag, [now], [long(old)])
    cuda.zero_if_(flag, [update])
    ends_with(now, old if dropped else known)
    ends_with(update, torch.zeros(TAIL) if dropped else known)
