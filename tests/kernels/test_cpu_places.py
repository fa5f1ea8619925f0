"""Kernels of a CPU read and write vectors that lie in several places, bit for bit as if they lay in one."""

from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from gradwire.core.keys import Key
from gradwire.core.layout import Flat, Scattered, in_one_place
from gradwire.kernels import fused, quantize
from gradwire.kernels.dispatch import reference_only
from gradwire.kernels.momentum import Momentum, next_momentum_

KEY = Key(seed=1, step=5, rank=2, purpose="test")
PARTS = (1, 5000, 0, 2047, 2500, 453)  # most tiles lie in one place, some in two or three


def scattered(x: Tensor) -> Scattered:
    """The same vector in several places, the last of which comes first in memory."""
    far = [part.clone() for part in reversed(x.split(PARTS))]
    return Scattered(tuple(reversed(far)))


def test_vectors_in_several_places_are_read_there() -> None:
    torch.manual_seed(0)
    x, lengths, n = torch.randn(sum(PARTS)), (3000, 6901, 100), torch.tensor((3000, 6901, 100))
    x[4321] = torch.nan
    memory, rule = (torch.randn(x.numel()), torch.randn(x.numel())), fused.Accumulation(momentum=0.9)
    names = tuple("abc")

    def read(grad: Flat) -> list[Tensor]:
        one, two, three, four = (memory[0].clone() for _ in range(4))
        signs, flag = fused.feedback_sign_(grad, one, 1.0, lengths, False)
        codes, _ = fused.feedback_integer_(grad, two, 0.5, lengths, 4, 100)
        both = three, (momentum := memory[1].clone())
        found = fused.carry_topk_(grad, both, both, rule, lengths, (9, 3000, 0))
        next_momentum_(grad, Momentum(memory[1], None, 0.9), four)
        levels = [quantize.qsgd_encode(grad, n, names, KEY, 127, bucket) for bucket in (512, None)]
        return [signs, flag, codes, *found, momentum, one, two, three, four, *levels]

    for fast in (read(scattered(x)), read(x)):
        with reference_only():
            known = read(scattered(x))
        assert all(map(torch.equal, (x.view(torch.uint8) for x in fast), (x.view(torch.uint8) for x in known)))


def test_values_are_written_to_several_places() -> None:
    torch.manual_seed(0)
    x, n = torch.randn(sum(PARTS)), torch.tensor((3000, 6901, 100))
    signs, codes = quantize.sign_encode(x, n, False), quantize.integer_encode(x, n, 4, 100)
    levels = quantize.qsgd_encode(x, n, tuple("abc"), KEY, 127, 512)
    spots, values = torch.arange(3, x.numel(), 7), torch.randn(x[3::7].numel())
    entries = values, spots, (0, values.numel()), 1
    for write, known in (
        (partial(quantize.sign_decode, signs, n), quantize.sign_decode(signs, n)),
        (partial(quantize.integer_decode, codes, n, 4, 100), quantize.integer_decode(codes, n, 4, 100)),
        (partial(quantize.qsgd_decode, levels, n, 127, 512, True), quantize.qsgd_decode(levels, n, 127, 512, True)),
        (lambda out: fused.scatter_mean_(out, *entries), torch.zeros_like(x).index_copy(0, spots, values)),
    ):
        for context in (nullcontext(), reference_only()):
            out = scattered(torch.full_like(x, torch.nan))
            with context:
                write(out)
            assert torch.equal(in_one_place(out), known)


def test_a_stretch_of_a_vector_in_several_places() -> None:
    x = torch.randn(sum(PARTS))
    for start, stop in ((0, x.numel()), (4999, 7100), (20, 20), (9999, 10_001)):
        assert torch.equal(in_one_place(scattered(x)[start:stop]), x[start:stop])
