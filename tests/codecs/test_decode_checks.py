"""A damaged message is refused or decoded wrongly. It never crashes and never writes outside the buffer."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire.codecs.codec import Codec, codec
from gradwire.core.keys import Key
from gradwire.core.payload import CorruptMessageError, Payload
from gradwire.core.segments import Segments
from strategies import CODECS, codecs, signal, signals, table

KEY = Key(seed=3, step=5, rank=1)
SEGMENTS = table(9, 300, 1)


def decode(chain: Codec, data: Tensor, segments: Segments) -> Tensor | None:
    """The decoded values, or None where the message is refused; any other error is a bug."""
    try:
        decoded = chain.decode(Payload(data), segments, KEY)
    except CorruptMessageError:
        return None
    assert decoded.shape == (segments.total,) and decoded.dtype == torch.float32
    return decoded


def octets(raw: bytes) -> Tensor:
    return torch.tensor(list(raw), dtype=torch.uint8)


def message(chain: Codec, segments: Segments = SEGMENTS) -> Tensor:
    return chain.encode(signal(segments), KEY).payload.data


@settings(max_examples=300)
@given(chain=codecs(), raw=st.binary(max_size=300), n=st.sampled_from([1, 7, 8, 9, 64, 1000]))
def test_noise_is_refused_or_decoded_wrongly(chain: Codec, raw: bytes, n: int) -> None:
    decode(chain, octets(raw), table(n))


@settings(max_examples=300)
@given(chain=codecs(), where=st.integers(0, 10**6), byte=st.integers(0, 255))
def test_one_damaged_byte_is_refused_or_decoded_wrongly(chain: Codec, where: int, byte: int) -> None:
    data = message(chain).clone()
    data[where % data.numel()] = byte
    decode(chain, data, SEGMENTS)


@settings(max_examples=150)
@given(
    chain=codecs(), damage=st.lists(st.tuples(st.integers(0, 40), st.sampled_from([0, 1, 127, 128, 255])), min_size=1)
)
def test_damaged_heads_are_refused_or_decoded_wrongly(chain: Codec, damage: list[tuple[int, int]]) -> None:
    data = message(chain).clone()
    for where, byte in damage:
        data[min(where, data.numel() - 1)] = byte
    decode(chain, data, SEGMENTS)


@pytest.mark.parametrize("chain", CODECS.values(), ids=str)
def test_a_message_cut_short_is_refused(chain: Codec) -> None:
    data = message(chain)
    for keep in {0, 1, 3, data.numel() // 2, data.numel() - 1} - {data.numel()}:
        assert decode(chain, data[:keep], SEGMENTS) is None, f"{keep} of {data.numel()} bytes"


@settings(max_examples=100)
@given(chain=codecs(), what=signals(), padding=st.binary(min_size=1, max_size=64))
def test_padding_is_ignored(chain: Codec, what: object, padding: bytes) -> None:
    """Gathers pad messages to one length, so bytes after a message must not matter."""
    segments = what.segments
    data = chain.encode(what, KEY).payload.data
    decoded = decode(chain, data, segments)
    longer = decode(chain, torch.cat((data, octets(padding))), segments)
    assert decoded is not None and longer is not None and torch.equal(decoded, longer)


@pytest.mark.parametrize("count", [5, 2**31 - 1, 2**31, 2**32 - 1])
def test_a_count_beyond_the_budget_is_refused_before_anything_is_allocated(count: int) -> None:
    chain = codec("topk(0.01)")  # sends 4 of these
    data = torch.cat((octets(count.to_bytes(4, "little")), message(chain, table(400))[4:]))
    with pytest.raises(CorruptMessageError, match=str(count)):
        chain.decode(Payload(data), table(400), KEY)


@pytest.mark.parametrize(
    "positions",
    [
        [-1, 3],
        [3, 3],
        [5, 2],
        [2, 10],
        [10, 11],
        [2**62, -(2**62)],
        [3 * 2**61, -(2**62)],  # their difference wraps around to a positive number
        [0, -(2**63)],
        [2**63 - 1, -(2**63)],
    ],
)
def test_positions_outside_the_buffer_are_refused(positions: list[int]) -> None:
    chain = codec("topk(0.2) | int64")
    data = torch.cat((torch.tensor(positions).view(torch.uint8), torch.ones(2).view(torch.uint8)))
    with pytest.raises(CorruptMessageError, match="positions"):
        chain.decode(Payload(data), table(10), KEY)


GROWING = [x for x in CODECS.values() if x.traits.fixed and x.size(table(100)) < x.size(table(1000))]


@pytest.mark.parametrize("chain", GROWING, ids=str)
def test_a_message_of_a_smaller_model_is_refused_where_lengths_are_fixed(chain: Codec) -> None:
    assert decode(chain, message(chain, table(100)), table(1000)) is None


@pytest.mark.parametrize(
    "spec", ["topk(0.3)", "topk(0.3) | gap16", "sampled_topk(0.1, sample=0.2)", "topk(0.3) | sign"]
)
def test_a_message_of_a_larger_model_is_refused(spec: str) -> None:
    assert decode(codec(spec), message(codec(spec), table(1000)), table(100)) is None
