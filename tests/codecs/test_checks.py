"""What a stage of one's own returns is checked, and the stage is named, before an index coder or a receiver sees it."""

import pytest
import torch
from torch import Tensor

from gradwire.codecs.addends import dtype_of
from gradwire.codecs.codec import Codec
from gradwire.codecs.quantizers import FP32
from gradwire.codecs.stage import EncodeInput, Quantizer, Selector
from gradwire.core.keys import Key
from gradwire.core.traits import Traits
from strategies import signal, table


class Chosen(Selector):
    """The positions that a test says, as many as it says."""

    name = "chosen"
    traits = Traits()

    def __init__(self, positions: list[int], most: int = 2, fixed: bool = True, dtype: torch.dtype = torch.int64):
        self.positions, self.most, self.traits = torch.tensor(positions, dtype=dtype), most, Traits(fixed=fixed)

    def __str__(self) -> str:
        return "chosen"

    def capacity(self, n: int) -> int:
        return self.most

    def select(self, signal: EncodeInput, key: Key) -> Tensor:
        return self.positions


def encode(selector: Selector, *lengths: int) -> Tensor | None:
    chain = Codec(None, selector, FP32(), Codec.of((selector,)).indices)
    return chain.encode(signal(table(*lengths)), Key(0, 0, 0)).sent.indices


@pytest.mark.parametrize(
    ("selector", "sentence"),
    [
        (Chosen([1, 4, 7, 9]), r"chosen selected position 9 of a buffer of length 9"),
        (Chosen([-1, 4, 7, 8]), r"chosen selected position -1 of a buffer of length 9"),
        (Chosen([1, 4, 4, 7]), r"chosen selected position 4 after 4; positions must rise"),
        (Chosen([4, 1, 7, 8]), r"chosen selected position 1 after 4; positions must rise"),
        (
            Chosen([0, 1, 2, 8]),
            r"chosen selected 3 positions of 'w0', a segment of length 5, but its capacity\(5\) is 2",
        ),
        (Chosen([0, 7, 8]), r"chosen selected 1 positions of 'w0', .*, but its capacity\(5\) is 2 and its traits are"),
        (Chosen([0, 1, 7, 8], dtype=torch.int32), r"chosen selected a tensor of torch.int32 and shape \(4,\)"),
        (Chosen([0, 1, 7, 8], most=5), r"may send 5 entries of a segment of length 4, by its capacity\(4\)"),
    ],
)
def test_wrong_positions_are_refused_by_name(selector: Selector, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        encode(selector, 5, 4)


def test_right_positions_are_taken() -> None:
    assert torch.equal(encode(Chosen([0, 4, 5, 8]), 5, 4), torch.tensor([0, 4, 5, 8]))
    assert torch.equal(encode(Chosen([0, 7, 8], fixed=False), 5, 4), torch.tensor([0, 7, 8]))


def test_an_empty_segment_has_nothing_to_send() -> None:
    with pytest.raises(ValueError, match=r"may send 1 entries of a segment of length 0, by its capacity\(0\); return"):
        encode(Chosen([0], most=1), 5, 0)


class Written(Quantizer):
    """The bytes that a test says."""

    name = "written"
    traits = Traits(linear=True)

    def __init__(self, data: Tensor) -> None:
        self.data = data

    def __str__(self) -> str:
        return "written"

    def size(self, lengths: tuple[int, ...]) -> int:
        return sum(lengths)

    def encode(self, values: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key) -> Tensor:
        return self.data

    def decode(self, data: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key) -> Tensor:
        return data.float()


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (torch.zeros(8).byte(), r"written: size\(\) says 9 bytes, encode wrote 8, for segments of \(5, 4\) values"),
        (torch.zeros(10).byte(), r"written: size\(\) says 9 bytes, encode wrote 10"),
        (torch.zeros(9), r"written: encode wrote a tensor of torch.float32 and shape \(9,\); return flat uint8"),
    ],
)
def test_values_take_the_bytes_that_size_says(data: Tensor, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Codec.of((Written(data),)).encode(signal(table(5, 4)), Key(0, 0, 0))


def test_a_linear_stage_says_which_numbers_it_sends() -> None:
    with pytest.raises(ValueError, match="written promises linear, but has no dtype; leave linear out"):
        dtype_of(Codec.of((Written(torch.zeros(0)),)))
