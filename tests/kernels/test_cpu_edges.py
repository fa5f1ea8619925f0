"""Fused CPU kernels equal their definitions at the edges: NaN, infinity, 16 bits, k = 0 and k = n, odd addresses."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from gradwire.kernels import fused
from gradwire.kernels.dispatch import reference_only

INF, NAN = float("inf"), float("nan")
SPECIALS = [(), (NAN,), (INF,), (-INF, NAN), (INF,) * 7]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def spoiled(n: int, special: tuple[float, ...]) -> Tensor:
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    for i, value in enumerate(special):
        x[i * 97 % n] = value
    return x


def memories(n: int, momentum: bool) -> tuple[Tensor, Tensor | None]:
    x = spoiled(n, ())
    return x.flip(0).clone(), x.roll(1).clone() if momentum else None


def same(run: Callable[[], tuple[Tensor | None, ...]]) -> None:
    outcomes = []
    for definitions in (False, True):
        with reference_only() if definitions else nullcontext():
            outcomes.append(run())
    for mine, known in zip(*outcomes, strict=True):
        assert (mine is None) == (known is None)
        if mine is not None and known is not None:
            assert mine.dtype == known.dtype
            torch.testing.assert_close(mine, known, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("n", [1, 5, 3000, 300_001])
def test_topk_of_what_is_not_finite(n: int) -> None:
    for special in SPECIALS:
        x = spoiled(n, special)
        odd = torch.cat((torch.zeros(1), x))[1:]  # no longer at a multiple of 8 bytes
        for k in {0, 1, min(n, 3), n // 2, n}:
            for values in (x, odd):
                same(lambda values=values, k=k: (fused.topk(values, (n,), (k,)),))
            assert fused.topk(x, (n,), (k,)).numel() == k


def test_topk_of_16_bits_and_of_more_than_there_are() -> None:
    x = spoiled(3000, ())
    for dtype in DTYPES:
        same(lambda dtype=dtype: (fused.topk(x.to(dtype), (2950, 50), (5, 60)),))


def test_nan_is_larger_than_infinity() -> None:
    x = torch.tensor([1.0, INF, 2.0, NAN, -INF, 3.0])
    for definitions in (False, True):
        with reference_only() if definitions else nullcontext():
            assert fused.topk(x, (6,), (1,)).tolist() == [3]
            assert fused.topk(x, (6,), (2,)).tolist() == [1, 3]
            assert fused.topk(x, (6,), (4,)).tolist() == [1, 3, 4, 5]


@pytest.mark.parametrize("momentum", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 5, 3000])
def test_selection(n: int, dtype: torch.dtype, momentum: bool) -> None:
    rule = fused.Accumulation(momentum=0.9 if momentum else 0.0)
    for special in SPECIALS:
        grad = spoiled(n, special).to(dtype)
        for k in {0, 1, n // 2, n}:

            def accumulate(grad: Tensor = grad, k: int = k) -> tuple[Tensor | None, ...]:
                held = memories(n, momentum)
                found = fused.carry_topk_(grad, held, held, rule, (n,), (k,))
                return *found[:3], *held

            def send(grad: Tensor = grad, k: int = k) -> tuple[Tensor | None, ...]:
                before = memories(n, momentum)
                after = tuple(None if held is None else torch.empty_like(held) for held in before)
                assert len(after) == 2 and after[0] is not None
                found = fused.carry_topk_(grad, before, (after[0], after[1]), rule, (n,), (k,), 2)
                return *found[:3], *before, *after

            same(accumulate)
            same(send)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 5, 3000])
def test_error_feedback_of_dense_codecs(n: int, dtype: torch.dtype) -> None:
    calls = [
        lambda g, v: fused.feedback_sign_(g, v, 0.9, (n,), False),
        lambda g, v: fused.feedback_sign_(g, v, 0.9, (n,), True),
        *(lambda g, v, bits=bits: fused.feedback_integer_(g, v, 1.0, (n,), bits, 256) for bits in (8, 4, 2)),
    ]
    for special in SPECIALS:
        grad = spoiled(n, special).to(dtype)
        for call in calls:

            def speak(grad: Tensor = grad, call: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = call):
                residual, _ = memories(n, False)
                return *call(grad, residual), residual

            same(speak)
            assert bool(speak()[1]) == bool(special)
