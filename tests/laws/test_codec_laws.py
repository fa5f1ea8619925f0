"""Laws of every codec: what any chain of registered stages promises to whoever uses it."""

import random

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from gradwire.codecs.codec import Codec, codec
from gradwire.codecs.quantizers import QSGD, Natural
from gradwire.codecs.selectors import RandomK
from gradwire.codecs.stage import EncodeInput, Memory
from gradwire.core.keys import Key
from gradwire.core.segments import Segments
from gradwire.core.spec import parse
from strategies import CODECS, KINDS, SIZES, STAGES, codecs, dense, keys, signal, signals, table, tensor

KEY = Key(seed=3, step=5, rank=1)
QUANTUM = 2.0**-149  # the smallest float32: no arithmetic near it is finer


def stochastic(chain: Codec) -> bool:
    return isinstance(chain.quantizer, QSGD | Natural) or isinstance(chain.selector, RandomK)


def promising(trait: str) -> list[Codec]:
    return [chain for chain in CODECS.values() if getattr(chain.traits, trait)]


def loss(chain: Codec, said: EncodeInput, key: Key) -> Tensor:
    """x - C(x) of each value, in float64."""
    return said.target.double() - chain.decode(chain.encode(said, key).payload, said.segments, key).double()


def hold(chain: Codec, said: EncodeInput, key: Key) -> None:
    """The laws of one message."""
    n = said.segments.total
    encoded = chain.encode(said, key)
    heard = chain.decode(encoded.payload, said.segments, key)
    assert heard.shape == (n,) and heard.dtype == torch.float32 and heard.device == said.target.device, str(chain)
    assert heard.isfinite().all(), str(chain)
    assert torch.equal(heard, dense(encoded.sent, n)), f"{chain} believes to have said something else"
    size, used = chain.size(said.segments), encoded.payload.nbytes
    assert used == size if chain.traits.fixed else used <= size, f"{chain}: {used} of {size} bytes"


@pytest.mark.parametrize("kind", KINDS)
def test_every_codec_takes_every_kind_of_tensor(kind: str) -> None:
    for chain in CODECS.values():
        hold(chain, signal(table(*SIZES), kind), KEY)


@pytest.mark.parametrize("n", SIZES)
def test_every_codec_takes_a_lone_tensor_of_any_size(n: int) -> None:
    for chain in CODECS.values():
        hold(chain, signal(table(n)), KEY)


def test_the_same_key_gives_the_same_bytes() -> None:
    said = signal(table(*SIZES))
    for chain in CODECS.values():
        first, again, other = (chain.encode(said, key).payload.data for key in (KEY, KEY, Key(3, 6, 1)))
        assert torch.equal(first, again), str(chain)
        if stochastic(chain):
            assert not torch.equal(first, other), f"{chain} draws the same at every step"


def test_whoever_does_not_listen_says_the_same() -> None:
    said = signal(table(*SIZES))
    for chain in CODECS.values():
        encoded, (payload, memory) = chain.encode(said, KEY), chain.message(said, KEY)
        assert torch.equal(payload.data, encoded.payload.data), str(chain)
        assert memory.keys() == encoded.memory.keys()
        assert all(torch.equal(memory[name], encoded.memory[name]) for name in memory), str(chain)


@settings(max_examples=200)
@given(chain=codecs(), said=signals(), key=keys())
def test_messages_are_decoded_as_sent_in_the_bytes_promised(chain: Codec, said: EncodeInput, key: Key) -> None:
    hold(chain, said, key)


def test_the_mean_of_messages_is_their_sum_over_their_number() -> None:
    said = [signal(table(*SIZES), kind) for kind in ("normal", "spike", "constant")]
    ranks = [KEY.of(rank) for rank in range(3)]
    for chain in CODECS.values():
        payloads = [chain.encode(one, key).payload for one, key in zip(said, ranks, strict=True)]
        total = chain.total(payloads, said[0].segments, ranks)
        assert torch.equal(chain.mean(payloads, said[0].segments, ranks), total / 3), str(chain)


@settings(max_examples=150)
@given(chain=codecs(), said=signals(), key=keys())
def test_encoding_leaves_the_inputs_and_the_global_random_state_alone(
    chain: Codec, said: EncodeInput, key: Key
) -> None:
    before = [said.grad.clone(), said.target.clone(), {name: x.clone() for name, x in said.memory.items()}]
    states = torch.get_rng_state(), random.getstate()
    encoded = chain.encode(said, key)
    payload = encoded.payload.data.clone()
    chain.decode(encoded.payload, said.segments, key)
    assert torch.equal(said.grad, before[0]) and torch.equal(said.target, before[1])
    assert same(said.memory, before[2])
    assert torch.equal(encoded.payload.data, payload)
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]


def same(memory: Memory, other: Memory) -> bool:
    return memory.keys() == other.keys() and all(torch.equal(memory[name], other[name]) for name in memory)


@settings(max_examples=100)
@given(chain=codecs(), said=signals(), key=keys())
def test_a_message_shares_no_memory_with_what_it_was_made_of(chain: Codec, said: EncodeInput, key: Key) -> None:
    said = said._replace(grad=said.grad.clone(), target=said.target.clone())
    encoded = chain.encode(said, key)
    payload, values = encoded.payload.data.clone(), encoded.sent.values.clone()
    said.grad.fill_(7.0)
    said.target.fill_(7.0)
    assert torch.equal(encoded.payload.data, payload) and torch.equal(encoded.sent.values, values)


@settings(max_examples=100)
@given(chain=codecs(), said=signals(), key=keys())
def test_selected_positions_rise_within_the_budget(chain: Codec, said: EncodeInput, key: Key) -> None:
    indices = chain.encode(said, key).sent.indices
    assert (indices is None) == (chain.selector is None or chain.transform is not None)
    if indices is not None and chain.selector is not None:
        assert (indices.diff() > 0).all()
        counts = torch.searchsorted(indices, said.segments.offsets_on(indices.device)).diff().tolist()
        assert all(c <= chain.selector.capacity(n) for c, n in zip(counts, said.segments.lengths, strict=True))


@settings(max_examples=100)
@given(chain=codecs(), said=signals(), key=keys())
def test_layout_in_memory_does_not_show_in_the_bytes(chain: Codec, said: EncodeInput, key: Key) -> None:
    loose = said._replace(grad=_strided(said.grad), target=_strided(said.target))
    assert torch.equal(chain.encode(loose, key).payload.data, chain.encode(said, key).payload.data)


def _strided(x: Tensor) -> Tensor:
    return torch.stack((x, torch.full_like(x, 9.0)), 1)[:, 0]


def test_specs_are_read_as_they_are_written() -> None:
    assert all(parse(str(parse(spec))) == parse(spec) for spec in STAGES)
    assert all(codec(spec) == chain and str(codec(spec)) == spec for spec, chain in CODECS.items())


# -- traits ------------------------------------------------------------------------------------------------------------


def test_some_codec_makes_each_promise() -> None:
    assert all(promising(trait) for trait in ("linear", "unbiased", "contraction", "lossless", "fixed"))


@pytest.mark.parametrize("kind", KINDS)
def test_lossless_codecs_lose_nothing(kind: str) -> None:
    for chain in promising("lossless"):
        for n in SIZES:
            said = signal(table(n), kind)
            encoded = chain.encode(said, KEY)
            # The sign of a zero is in the bytes, but not in a sum that starts from zero.
            assert torch.equal(chain.decode(encoded.payload, said.segments, KEY), said.target)
            assert torch.equal(encoded.payload.data.view(torch.float32).view(torch.int32), _bits(said.target))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def test_messages_of_linear_codecs_may_be_added() -> None:
    segments = table(9, 1000, 64)
    for chain in promising("linear"):
        said = [signal(segments, seed=seed) for seed in range(3)]
        ranks = [KEY.of(rank) for rank in range(3)]
        messages = [chain.encode(one, key).payload for one, key in zip(said, ranks, strict=True)]
        added = torch.stack([chain.summand(message) for message in messages]).sum(0)
        apart = [chain.decode(message, segments, key) for message, key in zip(messages, ranks, strict=True)]
        together = chain.expand(added.float(), segments, ranks[0])
        close = 8 * torch.finfo(added.dtype).eps
        assert torch.allclose(together, torch.stack(apart).sum(0), rtol=close, atol=3 * close), str(chain)
        total = chain.total(messages, segments, ranks)
        assert torch.allclose(total, torch.stack(apart).sum(0), rtol=1e-5, atol=1e-5), str(chain)


def trials(vectors: list[Tensor], times: int) -> EncodeInput:
    """Each vector in ``times`` segments of different names, which draw independent bits: one call, many trials."""
    shapes = [(x.numel(),) for x in vectors] * times
    names = tuple(f"trial{i}" for i in range(len(shapes)))
    flat = torch.cat(vectors).repeat(times)
    return EncodeInput(flat, flat, {"second_moment": torch.zeros_like(flat)}, Segments(names, tuple(shapes)))


def test_unbiased_codecs_are_right_on_average() -> None:
    x = torch.cat((tensor("normal", 22).sign() + tensor("normal", 22), torch.tensor([4.0, 0.0])))
    said = trials([x.repeat(64)], 4)
    for chain in promising("unbiased"):
        errors = torch.cat([loss(chain, said, Key(17, step, 0)).view(-1, x.numel()) for step in range(4)])
        noise = errors.std(0) / len(errors) ** 0.5
        # 24 coordinates under some 25 codecs: one in 3000 such tests would see 5 standard errors.
        assert (errors.mean(0).abs() <= 5 * noise + 1e-6).all(), str(chain)


def test_random_contractions_lose_less_than_was_said_on_average() -> None:
    # Natural compression promises nothing outside [2^-126, 2^127], so denormals are not tried.
    vectors = [tensor("normal", 1), tensor("normal", 9), tensor("huge", 24), tensor("spike", 9)]
    times = 32
    said = trials(vectors, times)
    for chain in filter(stochastic, promising("contraction")):
        errors = loss(chain, said, KEY).view(times, -1).split([x.numel() for x in vectors], dim=1)
        for error, x in zip(errors, vectors, strict=True):
            lost, most = error.square().sum(1), x.double().square().sum()
            assert lost.mean() - 4 * lost.std() / times**0.5 <= most * (1 + 1e-6), f"{chain}, {x.numel()} values"


@pytest.mark.parametrize("kind", KINDS)
def test_certain_contractions_never_lose_more_than_was_said(kind: str) -> None:
    said = signal(table(*SIZES), kind)
    for chain in promising("contraction"):
        if stochastic(chain):
            continue
        errors = loss(chain, said, KEY).split(SIZES)
        for error, x in zip(errors, said.target.double().split(SIZES), strict=True):
            lost, most = error.square().sum(), x.square().sum()
            # Rotations may round denormals up by a few quanta.
            assert lost <= most * (1 + 1e-6) + x.numel() * (32 * QUANTUM) ** 2, f"{chain}, {x.numel()} values"
            # Casts may lose denormals altogether, and what fp16 hears of 1e30 is less than a float64 resolves.
            assert lost < most or most == 0 or kind in ("denormal", "huge"), f"{chain}, {x.numel()} values"


def test_fixed_codecs_and_only_they_have_one_length() -> None:
    segments = table(1000, 300)
    kinds = ("normal", "zeros", "spike", "constant")
    for chain in CODECS.values():
        lengths = {chain.encode(signal(segments, kind), KEY).payload.nbytes for kind in kinds}
        if chain.traits.fixed:
            assert lengths == {chain.size(segments)}, str(chain)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_messages_are_the_same_on_a_gpu() -> None:
    for chain in CODECS.values():
        said = signal(table(9, 1000))
        there = EncodeInput(
            said.grad.cuda(), said.target.cuda(), {k: x.cuda() for k, x in said.memory.items()}, said[3]
        )
        heard = chain.decode(chain.encode(there, KEY).payload, said.segments, KEY)
        assert heard.is_cuda
        assert torch.allclose(heard.cpu(), chain.decode(chain.encode(said, KEY).payload, said.segments, KEY))
