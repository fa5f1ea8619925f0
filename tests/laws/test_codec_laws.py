"""Laws of every codec: what any chain of registered stages promises."""

import random
from contextlib import suppress
from dataclasses import replace

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradwire.codecs.addends import as_addend
from gradwire.codecs.checks import is_of_package
from gradwire.codecs.codec import Codec
from gradwire.codecs.quantizers import QSGD, Natural
from gradwire.codecs.selectors import RandomK
from gradwire.codecs.stage import EncodeInput, Memory
from gradwire.core.keys import Key
from gradwire.core.segments import Segments
from strategies import CODECS, KINDS, SIZES, STAGE_NAMES, codecs, dense, keys, signal, signals, table, tensor

KEY = Key(seed=3, step=5, rank=1)
QUANTUM = 2.0**-149  # the smallest float32: no arithmetic near it is finer


def stochastic(chain: Codec) -> bool:
    """Whether it rounds or selects at random; of stages of one's own, as their draws show."""
    if isinstance(chain.quantizer, QSGD | Natural) or isinstance(chain.selector, RandomK):
        return True
    if all(is_of_package(stage) for stage in (chain.selector, chain.quantizer) if stage):
        return False
    with suppress(Exception):  # a stage that fails does so in its laws, not while tests are collected
        plain, input_ = replace(chain, transform=None), signal(table(300))
        first, other = (plain.encode(input_, Key(3, step, 1)).payload.data for step in (5, 6))
        return not torch.equal(first, other)
    return False


def promising(trait: str) -> list[Codec]:
    return [chain for chain in CODECS.values() if getattr(chain.traits, trait)]


def loss(chain: Codec, input_: EncodeInput, key: Key) -> Tensor:
    """x - C(x) of each value, in float64."""
    return input_.target.double() - chain.decode(chain.encode(input_, key).payload, input_.segments, key).double()


def check_message(chain: Codec, input_: EncodeInput, key: Key) -> None:
    """The laws of one message."""
    n = input_.segments.total
    encoded = chain.encode(input_, key)
    size, used = chain.size(input_.segments), encoded.payload.nbytes
    at_most = "" if chain.traits.fixed else "at most "
    assert used == size if chain.traits.fixed else used <= size, (
        f"{chain}: size() says {at_most}{size} bytes, encode wrote {used}"
    )
    decoded = chain.decode(encoded.payload, input_.segments, key)
    form = decoded.dtype, decoded.device, tuple(decoded.shape)
    assert form == (torch.float32, input_.target.device, (n,)), f"{chain} decodes {n} values to {form}"
    assert decoded.isfinite().all(), f"{chain} decodes finite values to others"
    assert torch.equal(decoded, dense(encoded.sent, n)), f"{chain} reports other values than it sent"


each_stage = pytest.mark.parametrize("stage", STAGE_NAMES)
each_codec = pytest.mark.parametrize("chain", CODECS.values(), ids=str)


def each_promising(trait: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("chain", promising(trait), ids=str)


@each_codec
def test_every_codec_takes_every_kind_of_tensor(chain: Codec) -> None:
    for kind in KINDS:
        check_message(chain, signal(table(*SIZES), kind), KEY)


@each_codec
def test_every_codec_takes_a_lone_tensor_of_any_size(chain: Codec) -> None:
    for n in SIZES:
        check_message(chain, signal(table(n)), KEY)


@each_codec
def test_every_codec_takes_empty_segments_among_others(chain: Codec) -> None:
    for lengths in ((0, 9), (9, 0, 0, 1000), (300, 0)):
        check_message(chain, signal(table(*lengths)), KEY)


@each_codec
def test_the_same_key_gives_the_same_bytes(chain: Codec) -> None:
    input_ = signal(table(*SIZES))
    first, again, other = (chain.encode(input_, key).payload.data for key in (KEY, KEY, Key(3, 6, 1)))
    assert torch.equal(first, again), f"{chain} wrote other bytes under the same key"
    if stochastic(chain):
        assert not torch.equal(first, other), f"{chain} draws the same at every step"


class NoRandomOps(TorchDispatchMode):
    """Refuses every operation of torch that draws random numbers, whatever the generator."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert torch.Tag.nondeterministic_seeded not in func.tags, f"{func} draws numbers that the key does not decide"
        return func(*args, **(kwargs or {}))


def refused(*_: object, **__: object) -> None:
    raise AssertionError("random numbers come from a generator, and not from the key")


@each_codec
def test_randomness_comes_from_the_key_alone(chain: Codec) -> None:
    input_ = signal(table(*SIZES))
    with NoRandomOps(), pytest.MonkeyPatch.context() as patch:
        first = chain.encode(input_, KEY).payload.data  # also imports what torch needs for such modes
        for module, name in ((random, "Random"), (numpy.random, "default_rng"), (numpy.random, "RandomState")):
            patch.setattr(module, name, refused)
        patch.setattr(torch, "Generator", refused)
        again, other = (chain.encode(input_, key).payload.data for key in (KEY, Key(3, 6, 1)))
    assert torch.equal(first, again), f"{chain} wrote other bytes under the same key"
    if chain.traits.unbiased and not chain.traits.linear:
        assert not torch.equal(first, other), f"{chain} promises unbiased, but draws the same at every step"


def decoded_units(chain: Codec, units: dict[str, Tensor], key: Key = KEY) -> dict[str, Tensor]:
    """What receivers decode of each unit of one buffer."""
    flat = torch.cat([*units.values()])
    segments = Segments(tuple(units), tuple((x.numel(),) for x in units.values()))
    input_ = EncodeInput(flat, flat, {"second_moment": flat.square()}, segments)
    values = chain.decode(chain.encode(input_, key).payload, segments, key).split(segments.lengths)
    return dict(zip(units, values, strict=True))


@each_codec
def test_a_unit_is_decoded_alike_whatever_stands_beside_it(chain: Codec) -> None:
    """Buckets differ between ways to run a training, which must not differ in what they draw."""
    unit, first, last = tensor("normal", 300), tensor("normal", 1000, 1), tensor("normal", 7, 2)
    alone = decoded_units(chain, {"w": unit})["w"]
    beside = decoded_units(chain, {"first": first, "w": unit, "last": last})["w"]
    assert torch.equal(alone, beside), (
        f"{chain} decodes a unit to other values when other units stand beside it in the buffer; if it draws random "
        "numbers, pass names and lengths on to uniform as given"
    )


@each_codec
def test_units_of_other_names_draw_other_numbers(chain: Codec) -> None:
    x = tensor("normal", 300)
    alone, later = decoded_units(chain, {"w": x})["w"], decoded_units(chain, {"w": x}, Key(3, 6, 1))["w"]
    if torch.equal(alone, later):
        return  # it draws nothing
    assert not torch.equal(alone, decoded_units(chain, {"v": x})["v"]), (
        f"{chain} draws the same numbers for units of other names; pass names on to uniform as given"
    )


@each_codec
def test_encoding_without_decoded_values_gives_the_same_message(chain: Codec) -> None:
    input_ = signal(table(*SIZES))
    decoded, only = chain.encode(input_, KEY), chain.encode(input_, KEY)
    assert decoded.sent.values.isfinite().all()  # read first
    assert torch.equal(only.payload.data, decoded.payload.data), f"{chain} wrote other bytes under the same key"
    assert only.memory.keys() == decoded.memory.keys()
    assert all(torch.equal(only.memory[name], decoded.memory[name]) for name in only.memory)


@each_stage
@settings(max_examples=8)
@given(draw=st.data(), input_=signals(), key=keys())
def test_messages_are_decoded_as_sent_in_the_bytes_promised(
    stage: str, draw: st.DataObject, input_: EncodeInput, key: Key
) -> None:
    chain = draw.draw(codecs(stage))
    check_message(chain, input_, key)


@each_codec
def test_the_mean_of_messages_is_their_sum_over_their_number(chain: Codec) -> None:
    input_ = [signal(table(*SIZES), kind) for kind in ("normal", "spike", "constant")]
    ranks = [KEY.of(rank) for rank in range(3)]
    payloads = [chain.encode(one, key).payload for one, key in zip(input_, ranks, strict=True)]
    total = chain.decoder.total(payloads, input_[0].segments, ranks)
    assert torch.equal(chain.decoder.mean(payloads, input_[0].segments, ranks), total / 3)


@each_stage
@settings(max_examples=6)
@given(draw=st.data(), input_=signals(), key=keys())
def test_encoding_leaves_the_inputs_and_the_global_random_state_alone(
    stage: str, draw: st.DataObject, input_: EncodeInput, key: Key
) -> None:
    chain = draw.draw(codecs(stage))
    before = [input_.grad.clone(), input_.target.clone(), {name: x.clone() for name, x in input_.memory.items()}]
    states = torch.get_rng_state(), random.getstate()
    encoded = chain.encode(input_, key)
    payload = encoded.payload.data.clone()
    chain.decode(encoded.payload, input_.segments, key)
    unchanged = torch.equal(input_.grad, before[0]) and torch.equal(input_.target, before[1])
    assert unchanged and same(input_.memory, before[2]), f"{chain} writes into what it was given"
    assert torch.equal(encoded.payload.data, payload), f"{chain} writes into the message that it decodes"
    drew = not torch.equal(torch.get_rng_state(), states[0]) or random.getstate() != states[1]
    assert not drew, f"{chain} draws from the global generator; draw from the key"


def same(memory: Memory, other: Memory) -> bool:
    return memory.keys() == other.keys() and all(torch.equal(memory[name], other[name]) for name in memory)


@each_stage
@settings(max_examples=4)
@given(draw=st.data(), input_=signals(), key=keys())
def test_a_message_shares_no_memory_with_what_it_was_made_of(
    stage: str, draw: st.DataObject, input_: EncodeInput, key: Key
) -> None:
    chain = draw.draw(codecs(stage))
    input_ = input_._replace(grad=input_.grad.clone(), target=input_.target.clone())
    encoded = chain.encode(input_, key)
    payload, values = encoded.payload.data.clone(), encoded.sent.values.clone()
    input_.grad.fill_(7.0)
    input_.target.fill_(7.0)
    kept = torch.equal(encoded.payload.data, payload) and torch.equal(encoded.sent.values, values)
    assert kept, f"the message of {chain} changes when its input is written over; return a copy"


@each_stage
@settings(max_examples=4)
@given(draw=st.data(), input_=signals(), key=keys())
def test_selected_positions_rise_within_the_budget(
    stage: str, draw: st.DataObject, input_: EncodeInput, key: Key
) -> None:
    chain = draw.draw(codecs(stage))
    indices = chain.encode(input_, key).sent.indices
    assert (indices is None) == (chain.selector is None or chain.transform is not None)
    if indices is not None and chain.selector is not None:
        assert (indices.diff() > 0).all()
        counts = torch.searchsorted(indices, input_.segments.offsets_on(indices.device)).diff().tolist()
        assert all(c <= chain.selector.capacity(n) for c, n in zip(counts, input_.segments.lengths, strict=True))


@each_stage
@settings(max_examples=4)
@given(draw=st.data(), input_=signals(), key=keys())
def test_layout_in_memory_does_not_show_in_the_bytes(
    stage: str, draw: st.DataObject, input_: EncodeInput, key: Key
) -> None:
    chain = draw.draw(codecs(stage))
    loose = input_._replace(grad=_strided(input_.grad), target=_strided(input_.target))
    there, here = chain.encode(loose, key).payload.data, chain.encode(input_, key).payload.data
    assert torch.equal(there, here), f"{chain} wrote other bytes of the same values, laid out with a stride"


def _strided(x: Tensor) -> Tensor:
    return torch.stack((x, torch.full_like(x, 9.0)), 1)[:, 0]


# -- traits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trait", ["linear", "unbiased", "contraction", "lossless", "fixed"])
def test_some_codec_makes_each_promise(trait: str) -> None:
    assert promising(trait)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", KINDS)
@each_promising("lossless")
def test_lossless_codecs_lose_nothing(chain: Codec, kind: str, n: int) -> None:
    input_ = signal(table(n), kind)
    encoded = chain.encode(input_, KEY)
    # The sign of a zero is in the bytes, but not in a sum that starts from zero.
    decoded = chain.decode(encoded.payload, input_.segments, KEY)
    assert torch.equal(decoded, input_.target), (
        f"{chain} promises lossless, but decodes other values ({kind}, {n} values)"
    )
    assert encoded.payload.nbytes == 4 * n, (
        f"{chain} promises lossless, but sends {n} floats in other than {4 * n} bytes"
    )
    assert torch.equal(encoded.payload.data.view(torch.float32).view(torch.int32), _bits(input_.target))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


@each_promising("linear")
def test_messages_of_linear_codecs_may_be_added(chain: Codec) -> None:
    segments = table(9, 1000, 64)
    input_ = [signal(segments, seed=seed) for seed in range(3)]
    ranks = [KEY.of(rank) for rank in range(3)]
    messages = [chain.encode(one, key).payload for one, key in zip(input_, ranks, strict=True)]
    added = torch.stack([as_addend(chain, message) for message in messages]).sum(0)
    apart = [chain.decode(message, segments, key) for message, key in zip(messages, ranks, strict=True)]
    together = chain.decoder.expand(added.float(), segments, ranks[0])
    close = 8 * torch.finfo(added.dtype).eps
    assert torch.allclose(together, torch.stack(apart).sum(0), rtol=close, atol=3 * close), (
        f"{chain} promises linear, but the sum of messages does not decode to the sum"
    )
    total = chain.decoder.total(messages, segments, ranks)
    assert torch.allclose(total, torch.stack(apart).sum(0), rtol=1e-5, atol=1e-5)


def trials(vectors: list[Tensor], times: int) -> EncodeInput:
    """Each vector in ``times`` segments of different names, which draw independent bits: one call, many trials."""
    shapes = [(x.numel(),) for x in vectors] * times
    names = tuple(f"trial{i}" for i in range(len(shapes)))
    flat = torch.cat(vectors).repeat(times)
    return EncodeInput(flat, flat, {"second_moment": torch.zeros_like(flat)}, Segments(names, tuple(shapes)))


@each_promising("unbiased")
def test_unbiased_codecs_are_right_on_average(chain: Codec) -> None:
    x = torch.cat((tensor("normal", 22).sign() + tensor("normal", 22), torch.tensor([4.0, 0.0])))
    input_ = trials([x.repeat(64)], 4)
    errors = torch.cat([loss(chain, input_, Key(17, step, 0)).view(-1, x.numel()) for step in range(4)])
    noise = errors.std(0) / len(errors) ** 0.5
    # 24 coordinates under some 25 codecs: one in 3000 such tests would see 5 standard errors.
    off = errors.mean(0).abs()
    worst = int((off - 5 * noise).argmax())
    assert (off <= 5 * noise + 1e-6).all(), (
        f"{chain} promises unbiased, but is off by {off[worst]:.3g} where {noise[worst]:.2g} is noise: "
        f"the mean of {len(errors)} trials of the value {x[worst]:.3g}"
    )


@pytest.mark.parametrize("chain", [*filter(stochastic, promising("contraction"))], ids=str)
def test_random_contractions_lose_less_than_the_signal_on_average(chain: Codec) -> None:
    # Natural compression promises nothing outside [2^-126, 2^127], so denormals are not tried.
    vectors = [tensor("normal", 1), tensor("normal", 9), tensor("huge", 24), tensor("spike", 9)]
    times = 32
    input_ = trials(vectors, times)
    errors = loss(chain, input_, KEY).view(times, -1).split([x.numel() for x in vectors], dim=1)
    for error, x in zip(errors, vectors, strict=True):
        lost, most = error.square().sum(1), x.double().square().sum()
        assert lost.mean() - 4 * lost.std() / times**0.5 <= most * (1 + 1e-6), (
            f"{chain} promises contraction, but loses {lost.mean():.4g} of {most:.4g} on average ({x.numel()} values)"
        )


@pytest.mark.parametrize("chain", [x for x in promising("contraction") if not stochastic(x)], ids=str)
def test_contractions_never_lose_more_than_the_signal(chain: Codec) -> None:
    for kind in KINDS:
        input_ = signal(table(*SIZES), kind)
        errors = loss(chain, input_, KEY).split(SIZES)
        for error, x in zip(errors, input_.target.double().split(SIZES), strict=True):
            lost, most = error.square().sum(), x.square().sum()
            broken = f"{chain} promises contraction, but loses {lost:.4g} of {most:.4g} ({kind}, {x.numel()} values)"
            # Rotations may round denormals up by a few quanta.
            assert lost <= most * (1 + 1e-6) + x.numel() * (32 * QUANTUM) ** 2, broken
            # Casts may lose denormals altogether, and fp16 of 1e30 is less than a float64 resolves.
            assert lost < most or most == 0 or kind in ("denormal", "huge"), broken


@each_promising("fixed")
def test_messages_of_fixed_codecs_have_one_length(chain: Codec) -> None:
    segments = table(1000, 300)
    for kind in ("normal", "zeros", "spike", "constant"):
        size, used = chain.size(segments), chain.encode(signal(segments, kind), KEY).payload.nbytes
        assert used == size, f"{chain} is fixed, but size() says {size} bytes, encode wrote {used} ({kind} values)"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@each_codec
def test_messages_are_the_same_on_a_gpu(chain: Codec) -> None:
    input_ = signal(table(9, 1000))
    there = EncodeInput(
        input_.grad.cuda(), input_.target.cuda(), {k: x.cuda() for k, x in input_.memory.items()}, input_[3]
    )
    decoded = chain.decode(chain.encode(there, KEY).payload, input_.segments, KEY)
    assert decoded.is_cuda
    assert torch.allclose(decoded.cpu(), chain.decode(chain.encode(input_, KEY).payload, input_.segments, KEY))
