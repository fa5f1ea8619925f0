"""Rice codes by Numba: the bytes of the definition, its gaps, and its words about what is damaged."""

from inspect import unwrap

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.kernels import rice
from gradwire.kernels.cpu import rice as fast

encode, decode = unwrap(rice.encode_blocks), unwrap(rice.decode_blocks)


@st.composite
def gaps(draw: st.DrawFn) -> torch.Tensor:
    count = draw(st.integers(0, 1500))
    top = draw(st.sampled_from((2, 40, 3000, 10**8)))
    drawn = torch.randint(top, (count,), generator=torch.Generator().manual_seed(draw(st.integers(0, 2**31))))
    return torch.where(torch.arange(count) % 97 == 5, 10**7, drawn)  # now and then a long jump


@settings(deadline=None, max_examples=60)
@given(gaps(), st.integers(4, 5))
def test_bytes_and_gaps_are_those_of_the_definition(numbers: torch.Tensor, width: int) -> None:
    message = encode(numbers, width)
    assert torch.equal(fast.encode_blocks(numbers, width), message)
    found, used = fast.decode_blocks(torch.cat([message, message]), numbers.numel(), width)
    assert torch.equal(found, numbers) and used == message.numel()


@settings(deadline=None, max_examples=60)
@given(gaps(), st.integers(0, 2**31), st.integers(1, 255))
def test_damage_reads_as_by_the_definition(numbers: torch.Tensor, where: int, flips: int) -> None:
    message = encode(numbers, 4)
    if message.numel():
        message[where % message.numel()] ^= flips
    assert _read(fast.decode_blocks, message, numbers.numel()) == _read(decode, message, numbers.numel())


def _read(reader: object, message: torch.Tensor, count: int) -> object:
    try:
        found, used = reader(message, count, 4)
        return found.tolist(), used
    except rice.CorruptMessageError as wrong:
        return str(wrong)
