"""Hand-computed examples of each quantizer, and the promises that depend on random bits."""

import math

import pytest
import torch
from torch import Tensor

from gradwire.codecs.quantizers import (
    BF16,
    FP16,
    FP32,
    QSGD,
    Int2,
    Int4,
    Int8,
    Natural,
    OneBit,
    Sign,
    TernGrad,
    TwoBit,
)
from gradwire.codecs.stage import Quantizer
from gradwire.core.keys import Key
from gradwire.core.payload import as_bytes, from_bytes
from gradwire.core.registry import registered
from gradwire.core.spec import parse

KEY = Key(seed=1, step=2, rank=0)
QUANTIZERS = [parse(spec) for made in registered("quantizer").values() for spec in made.examples]
F16_MAX, BF16_MAX, F32_MAX = (torch.finfo(d).max for d in (torch.float16, torch.bfloat16, torch.float32))


def vector(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


def encode(quantizer: Quantizer, x: Tensor, *lengths: int, key: Key = KEY) -> Tensor:
    lengths = lengths or (x.numel(),)
    names = tuple(f"unit{i}" for i in range(len(lengths)))
    return quantizer.encode(x, torch.tensor(lengths), names, key)


def decoded(quantizer: Quantizer, x: Tensor, *lengths: int, key: Key = KEY) -> Tensor:
    lengths = lengths or (x.numel(),)
    names = tuple(f"unit{i}" for i in range(len(lengths)))
    data = encode(quantizer, x, *lengths, key=key)
    assert data.numel() == quantizer.size(lengths)
    return quantizer.decode(data, torch.tensor(lengths), names, key)


def replicas(quantizer: Quantizer, x: Tensor, count: int = 4000) -> Tensor:
    """Independent draws [count, m], for quantizers that treat copies in one segment alike."""
    return decoded(quantizer, x.repeat(count)).view(count, -1).double()


def assert_unbiased(quantizer: Quantizer, x: Tensor) -> None:
    drawn = replicas(quantizer, x)
    error = drawn.std(0) / math.sqrt(len(drawn))
    # Five standard errors; the slack covers values that are always decoded alike.
    assert bool(((drawn.mean(0) - x).abs() <= 5 * error + 1e-6 * x.abs().max()).all())


# Every quantizer.


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
@pytest.mark.parametrize("lengths", [(), (0,), (1,), (7, 0, 9), (4, 600)])
def test_sizes_are_exact_and_decoding_keeps_the_shape(quantizer: Quantizer, lengths: tuple[int, ...]) -> None:
    x = torch.linspace(-1, 1, sum(lengths))
    names = tuple(f"unit{i}" for i in range(len(lengths)))
    table = torch.tensor(lengths, dtype=torch.int64)
    data = quantizer.encode(x, table, names, KEY)
    y = quantizer.decode(data, table, names, KEY)
    assert data.dtype == torch.uint8 and data.shape == (quantizer.size(lengths),)
    assert y.dtype == torch.float32 and y.shape == x.shape


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
def test_zeros_are_decoded_as_zeros(quantizer: Quantizer) -> None:
    assert torch.equal(decoded(quantizer, torch.zeros(9), 0, 4, 5), torch.zeros(9))


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
@pytest.mark.parametrize("scale", [1e-45, 1e-40, 1e-30, 1e30, F32_MAX])
def test_finite_values_are_decoded_as_finite(quantizer: Quantizer, scale: float) -> None:
    x = torch.linspace(-1, 1, 600) * scale
    assert bool(decoded(quantizer, x, 600).isfinite().all())


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_decoded_as_such(quantizer: Quantizer, wrong: float) -> None:
    assert not decoded(quantizer, vector(1, wrong, -3, 0.5)).isfinite().all()


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
def test_segments_are_quantized_apart(quantizer: Quantizer) -> None:
    small, large = torch.linspace(-1, 1, 5), torch.linspace(-9, 9, 7)
    both = decoded(quantizer, torch.cat((small, large)), 5, 7)
    assert torch.equal(both[:5], decoded(quantizer, small))


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
def test_the_payload_shares_no_memory_with_the_input(quantizer: Quantizer) -> None:
    x = torch.linspace(-1, 1, 5)
    before = x.clone()
    encode(quantizer, x).zero_()
    assert torch.equal(x, before)


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
def test_linear_payloads_are_the_cast_values(quantizer: Quantizer) -> None:
    if quantizer.traits.linear:
        dtype = type(quantizer).dtype
        x = torch.linspace(-1, 1, 5)
        assert torch.equal(from_bytes(encode(quantizer, x), dtype), x.to(dtype))


# Casts.


def test_fp32_is_lossless() -> None:
    x = vector(1e-45, -math.pi, 0.0, F32_MAX)
    assert torch.equal(decoded(FP32(), x), x)


def test_fp16_rounds_and_saturates() -> None:
    x = vector(1 + 2**-12, 1e-9, 65519.0, -1e30)
    assert decoded(FP16(), x).tolist() == [1.0, 0.0, F16_MAX, -F16_MAX]


def test_bf16_rounds_and_saturates() -> None:
    x = vector(1 + 2**-9, -3.0, F32_MAX, -F32_MAX)
    assert decoded(BF16(), x).tolist() == [1.0, -3.0, BF16_MAX, -BF16_MAX]


# Sign and OneBit.


def test_sign_of_four_values() -> None:
    x = vector(1, -2, 0, 5)
    assert encode(Sign(), x).tolist() == [*as_bytes(vector(2)).tolist(), 0b1101]
    assert decoded(Sign(), x).tolist() == [2, -2, 2, 2]  # zero is sent as plus


def test_sign_may_keep_the_norm() -> None:
    x = vector(1, -1, 5, 3)  # |x|_2 = 6, sqrt(m) = 2
    assert decoded(Sign(scale="norm"), x).tolist() == [3, -3, 3, 3]


def test_sign_refuses_an_unknown_scale() -> None:
    with pytest.raises(ValueError, match=r"'max'.*'mean'"):
        Sign(scale="max")


def test_onebit_has_a_mean_for_each_side() -> None:
    x = vector(1, -2, 3, -6, -4)
    assert encode(OneBit(), x).tolist() == [*as_bytes(vector(2, -4)).tolist(), 0b00101]
    assert decoded(OneBit(), x).tolist() == [2, -4, 2, -4, -4]


def test_onebit_of_one_side_only() -> None:
    assert decoded(OneBit(), vector(-1, -3, 0, 0), 2, 2).tolist() == [-2, -2, 0, 0]


# TernGrad.


def test_terngrad_keeps_the_largest_and_packs_five_to_a_byte() -> None:
    x = vector(2, 0, -2, 2, 0)
    digits = 2 + 1 * 3 + 0 * 9 + 2 * 27 + 1 * 81
    assert encode(TernGrad(), x).tolist() == [*as_bytes(vector(2)).tolist(), digits]
    assert torch.equal(decoded(TernGrad(), x), x)


def test_terngrad_clamps_at_standard_deviations() -> None:
    x = vector(-3, 1, 1, 1)  # mean 0, sigma sqrt(3)
    drawn = decoded(TernGrad(clip=1), x)
    assert drawn[0].item() == pytest.approx(-math.sqrt(3))


def test_terngrad_does_not_clamp_a_constant_segment() -> None:
    assert decoded(TernGrad(), torch.full((3,), 0.1)).tolist() == pytest.approx([0.1] * 3)
    assert decoded(TernGrad(), vector(-7)).tolist() == [-7]


def test_terngrad_without_clip_is_unbiased() -> None:
    assert TernGrad(clip=0).traits.unbiased and not TernGrad().traits.unbiased
    assert_unbiased(TernGrad(clip=0), vector(1, -0.5, 0.25, 0))


@pytest.mark.parametrize("clip", [-1.0, math.nan, math.inf])
def test_terngrad_refuses_a_senseless_clip(clip: float) -> None:
    with pytest.raises(ValueError, match="terngrad"):
        TernGrad(clip=clip)


# QSGD.


def test_qsgd_of_values_on_levels() -> None:
    x = vector(3, -4, 0, 0)  # norm 5: codes 3 and -4 of 5 levels, plus 5, in 4 bits
    quantizer = QSGD(levels=5, bucket=None)
    wire = [*as_bytes(vector(5)).tolist(), 8 + 16 * 1, 5 + 16 * 5]
    assert encode(quantizer, x).tolist() == wire
    assert decoded(quantizer, x).tolist() == pytest.approx([3, -4, 0, 0])


def test_qsgd_gives_each_bucket_its_norm() -> None:
    x = vector(3, 4, 0.3, 0.4, -7)
    assert QSGD(levels=5, bucket=2).size((5,)) == 3 * 4 + 3
    assert decoded(QSGD(levels=5, bucket=2), x).tolist() == pytest.approx(x.tolist())


def test_biased_qsgd_shrinks_by_omega_of_the_bucket() -> None:
    x = vector(3, 4, -7)
    plain, shrunk = QSGD(5, 2), QSGD(5, 2, biased=True)
    omega = torch.tensor([2, 2, 1]) / 25
    assert torch.allclose(decoded(shrunk, x), decoded(plain, x) / (1 + omega))


def test_qsgd_never_exceeds_its_levels() -> None:
    x = torch.full((5000,), 1.0)
    assert decoded(QSGD(levels=7, bucket=1), x).tolist() == x.tolist()


def test_qsgd_is_unbiased_unless_asked() -> None:
    assert QSGD().traits.unbiased and not QSGD(biased=True).traits.unbiased
    for x in (vector(1, -0.5, 0.25, 0), vector(3e38, -3e38, 1e38, 1e37)):
        assert_unbiased(QSGD(levels=3, bucket=4), x)


def test_biased_qsgd_is_a_contraction() -> None:
    x = torch.linspace(-1, 1, 40)
    loss = (replicas(QSGD(1, 40, biased=True), x, 500) - x).square().sum(1).mean()
    omega = math.sqrt(40)
    assert loss <= omega / (1 + omega) * x.square().sum()


@pytest.mark.parametrize("spec", ["qsgd(levels=0)", "qsgd(levels=1.5)", "qsgd(bucket=0)"])
def test_qsgd_refuses_senseless_numbers(spec: str) -> None:
    with pytest.raises(ValueError, match="qsgd"):
        parse(spec)


# Natural compression.


def test_natural_keeps_powers_of_two() -> None:
    x = vector(1, -2, 0, 2.0**-126, 2.0**127)
    assert torch.equal(decoded(Natural(), x), x)
    assert Natural().size((5,)) == 6


def test_natural_codes_are_sign_and_exponent() -> None:
    assert encode(Natural(), vector(-1)).tolist() == [127, 1]


def test_natural_rounds_to_the_neighbors() -> None:
    drawn = replicas(Natural(), vector(3, -5), 200)
    assert set(drawn[:, 0].tolist()) == {2, 4} and set(drawn[:, 1].tolist()) == {-4, -8}


def test_natural_stops_at_the_largest_power() -> None:
    assert decoded(Natural(), vector(F32_MAX, -F32_MAX)).tolist() == [2.0**127, -(2.0**127)]


def test_natural_is_unbiased_and_loses_an_eighth_at_most() -> None:
    x = vector(1.5, -1.1, 0.7, 4)
    assert_unbiased(Natural(), x)
    loss = (replicas(Natural(), x) - x).square().mean(0)
    assert bool((loss <= x.square() / 8 * 1.1).all())


def test_natural_is_unbiased_for_subnormals() -> None:
    assert_unbiased(Natural(), vector(2.0**-127, -(2.0**-126) * 0.9, 2.0**-128))


# Integers.


def test_int8_of_four_values() -> None:
    x = vector(127, -1.4, 0.5, -127)  # one half rounds to even
    assert encode(Int8(), x).tolist() == [*as_bytes(vector(127)).tolist(), 254, 126, 127, 0]
    assert decoded(Int8(), x).tolist() == pytest.approx([127, -1, 0, -127])


def test_int4_packs_two_to_a_byte() -> None:
    x = vector(7, -7, 3.4, 0)
    wire = [*as_bytes(vector(7)).tolist(), 14 + 16 * 0, 10 + 16 * 7]
    assert encode(Int4(), x).tolist() == wire
    assert decoded(Int4(), x).tolist() == pytest.approx([7, -7, 3, 0])


def test_int2_has_three_values() -> None:
    x = vector(4, -3, 1, -1, 0)
    assert decoded(Int2(), x).tolist() == [4, -4, 0, 0, 0]
    assert Int2().size((5,)) == 4 + 2


def test_blocks_have_their_own_scales_and_end_with_the_segment() -> None:
    x = vector(7, 7, 0.7, 1, 1)
    assert Int4(block=2).size((3, 2)) == 3 * 4 + 3
    assert torch.equal(decoded(Int4(block=2), x, 3, 2), x)


@pytest.mark.parametrize("quantizer", [Int8(), Int4(), Int2()], ids=str)
def test_integers_never_lose_more_than_the_value(quantizer: Quantizer) -> None:
    x = torch.linspace(-1, 1, 1001) ** 3
    assert bool(((decoded(quantizer, x) - x).abs() <= x.abs()).all())


def test_integers_refuse_an_empty_block() -> None:
    with pytest.raises(ValueError, match=r"int4.*block=0"):
        Int4(block=0)


def test_two_bits_by_hand() -> None:
    x = vector(1.0, -1.0, 3.0, -0.5, 0.0)  # |x|^2 = 11.25, so the limit is 0.9816 * 1.5 = 1.4724
    scale = (0.4528 * 2.5 + 1.5104 * 3.0) / (4 * 0.4528**2 + 1.5104**2)
    torch.testing.assert_close(decoded(TwoBit(), x), vector(0.4528, -0.4528, 1.5104, -0.4528, 0.4528) * scale)
    assert encode(TwoBit(), x)[4:].tolist() == [0b00110001, 0b01]


def test_two_bits_of_normal_values_lose_as_much_as_in_the_paper() -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    assert float((x - decoded(TwoBit(), x)).square().mean()) == pytest.approx(0.1175, rel=0.05)
