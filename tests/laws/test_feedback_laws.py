"""Laws of every feedback: what is sent and what is kept as an error make the whole."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradwire.codecs.codec import Codec, codec
from gradwire.codecs.stage import Decoded, EncodeInput, Memory
from gradwire.core.keys import Key
from gradwire.core.spec import parse
from gradwire.feedback import EF21, Feedback, MomentumCorrection, NoFeedback, PreconditionedMomentum, Residual
from strategies import FEEDBACKS, KINDS, codecs, dense, keys, signal, table, tensor

SEGMENTS = table(9, 1, 300)
N = SEGMENTS.total
KEY = Key(seed=3, step=5, rank=1)


def memories(feedback: Feedback, kind: str = "normal") -> dict[str, Tensor]:
    """Memories as some earlier steps might have left them."""
    return {name: tensor(kind, N, seed=i + 9) for i, name in enumerate(feedback.memories)}


def send(target: Tensor, chain: Codec, key: Key) -> Decoded:
    memory = {"second_moment": torch.zeros_like(target)}
    return chain.encode(EncodeInput(target, target, memory, SEGMENTS), key).sent


def copies(memory: Memory) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in memory.items()}


def unchanged(memory: Memory, before: Memory) -> bool:
    return memory.keys() == before.keys() and all(torch.equal(memory[name], before[name]) for name in memory)


def near(a: Tensor, b: Tensor, scale: Tensor) -> bool:
    """Equal up to a few roundings of numbers as large as ``scale``."""
    return bool(((a.double() - b.double()).abs() <= 4e-7 * scale.double() + 1e-44).all())


@pytest.mark.parametrize("spec", FEEDBACKS)
@given(chain=codecs(), kind=st.sampled_from(KINDS), key=keys())
def test_sent_values_plus_the_error_are_the_compensated_gradient(spec: str, chain: Codec, kind: str, key: Key) -> None:
    feedback: Feedback = parse(spec)
    memory = memories(feedback, kind)
    target, memory = feedback.compensate(signal(SEGMENTS, kind).grad, memory)
    sent = send(target, chain, key)
    after = feedback.update_memory(target, sent, memory)
    debt = feedback.error(after)
    if debt is None:
        assert not any(name == "residual" for name in feedback.memories)  # none owes nothing, ef21 owes no sum
        return
    decoded = dense(sent, N)
    assert near(decoded + debt, target, decoded.abs() + target.abs())
    if sent.indices is not None:  # entries that were not chosen are kept to the last bit
        left = torch.ones(N, dtype=torch.bool).index_fill(0, sent.indices, False)
        assert torch.equal(debt[left], target[left])


@pytest.mark.parametrize("spec", FEEDBACKS)
@given(chain=codecs(), kind=st.sampled_from(KINDS), key=keys())
def test_inputs_are_unchanged_and_state_keeps_its_form(spec: str, chain: Codec, kind: str, key: Key) -> None:
    feedback: Feedback = parse(spec)
    grad, memory = signal(SEGMENTS, kind).grad, memories(feedback, kind)
    before = grad.clone(), copies(memory)
    target, middle = feedback.compensate(grad, memory)
    assert torch.equal(grad, before[0]) and unchanged(memory, before[1])
    sent = send(target, chain, key)
    kept = target.clone(), sent.values.clone(), copies(middle)
    late = feedback.update_memory(target, sent, middle)
    assert torch.equal(target, kept[0]) and torch.equal(sent.values, kept[1]) and unchanged(middle, kept[2])
    mean, held = tensor(kind, N, seed=7), copies(late)
    update, end = feedback.finalize(mean, late) if feedback.finalize else (mean, late)
    assert torch.equal(mean, tensor(kind, N, seed=7)) and unchanged(late, held)
    assert target.shape == update.shape == (N,) and update.dtype == torch.float32
    assert end.keys() == feedback.memories.keys()
    assert all(x.shape == (N,) and x.dtype == torch.float32 for x in end.values())


@pytest.mark.parametrize("spec", FEEDBACKS)
def test_feedback_has_one_spelling(spec: str) -> None:
    assert parse(str(parse(spec))) == parse(spec)
    assert set(parse(spec).memories.values()) <= {"mean", "same", "shard"}


@pytest.mark.parametrize("spec", FEEDBACKS)
def test_a_lossless_codec_leaves_no_error(spec: str) -> None:
    feedback: Feedback = parse(spec)
    target, memory = feedback.compensate(tensor("normal", N), memories(feedback))
    debt = feedback.error(feedback.update_memory(target, send(target, codec("fp32"), KEY), memory))
    assert debt is None or not debt.any()


def test_residual_adds_the_error_times_its_decay() -> None:
    grad, memory = tensor("normal", N), {"residual": tensor("normal", N, seed=1)}
    for decay in (1.0, 0.95):
        target, _ = Residual(decay).compensate(grad, memory)
        assert torch.equal(target, grad + decay * memory["residual"])


def test_no_feedback_passes_the_gradient_through() -> None:
    target, memory = NoFeedback().compensate(grad := tensor("normal", N), {})
    assert torch.equal(target, grad) and memory == {}


@given(chain=codecs(), key=keys())
def test_ef21_keeps_the_sum_of_all_it_has_sent(chain: Codec, key: Key) -> None:
    feedback = EF21()
    memory: Memory = {name: torch.zeros(N) for name in feedback.memories}
    total = torch.zeros(N, dtype=torch.float64)
    for step in range(3):
        target, memory = feedback.compensate(grad := tensor("normal", N, seed=step), memory)
        assert torch.equal(target, grad - memory["estimate"])
        sent = send(target, chain, key)
        memory = feedback.update_memory(target, sent, memory)
        total += dense(sent, N).double()
        update, memory = feedback.finalize(dense(sent, N), memory)
        assert torch.equal(update, memory["estimate_mean"])
        # A group of one: what it agrees on is its own estimate.
        assert torch.allclose(memory["estimate"].double(), total, atol=1e-5)
        assert torch.allclose(memory["estimate_mean"], memory["estimate"], atol=1e-5)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_is_masked_just_where_a_selector_chose(nesterov: bool) -> None:
    feedback = MomentumCorrection(0.9, nesterov=nesterov)
    memory = memories(feedback)
    target, memory = feedback.compensate(tensor("normal", N), memory)
    u = memory["momentum"]
    sparse = send(target, codec("topk(0.3)"), KEY)
    masked = feedback.update_memory(target, sparse, memory)["momentum"]
    assert not masked[sparse.indices].any()
    assert torch.equal(torch.where(masked == 0, u, masked), u)
    whole = feedback.update_memory(target, send(target, codec("sign"), KEY), memory)["momentum"]
    assert torch.equal(whole, u)
    unmasked = MomentumCorrection(0.9, nesterov=nesterov, masking=False)
    assert torch.equal(unmasked.update_memory(target, sparse, memory)["momentum"], u)


@given(norm=st.floats(1e-30, 1e30), limit=st.floats(1e-6, 1e6), world=st.integers(1, 64))
def test_clipping_bounds_the_norm_and_leaves_small_ones_alone(norm: float, limit: float, world: int) -> None:
    factor = MomentumCorrection(clip=limit).clip_factor(norm, world)
    assert norm * factor <= limit / world**0.5 * (1 + 1e-9)
    assert 0 < factor <= 1.0 and (factor == 1.0) == (norm <= limit / world**0.5)
    assert all(parse(spec).clip_factor(norm, world) == 1.0 for spec in FEEDBACKS)


@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.5])
def test_momentum_over_a_denominator_pays_out_all_that_was_put_in(ratio: float) -> None:
    """However few entries are sent: what was sent, what is owed, and what momentum still has to give."""
    feedback, chain = PreconditionedMomentum(beta=0.9), codec(f"topk({ratio}) | sign(per=16)")
    memory = {name: torch.zeros(N) for name in feedback.memories} | {"denominator": torch.full((N,), 0.5)}
    put_in, paid = torch.zeros(N), torch.zeros(N)
    for step in range(30):
        grad = tensor("normal", N, seed=step)
        target, memory = feedback.compensate(grad, memory)
        sent = send(target, chain, Key(seed=3, step=step, rank=0))
        memory = feedback.update_memory(target, sent, memory)
        put_in, paid = put_in + grad / 0.5, paid + dense(sent, N)
    rest = memory["residual"] + 0.9 / (1 - 0.9) * memory["momentum"]
    torch.testing.assert_close(paid + rest, put_in, rtol=1e-4, atol=1e-4)
