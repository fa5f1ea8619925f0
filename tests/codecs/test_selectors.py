"""Selectors: hand-computed choices, budgets, fairness and refusals."""

import math

import pytest
import torch
from torch import Tensor

from gradwire.codecs.selectors import (
    AdaComp,
    AdaptiveThreshold,
    ChunkTopK,
    RandomK,
    SampledTopK,
    Threshold,
    TopK,
    Variance,
)
from gradwire.codecs.stage import EncodeInput, Selector
from gradwire.core.keys import Key
from gradwire.core.segments import Segments
from gradwire.core.spec import parse
from gradwire.kernels import philox, select
from gradwire.kernels.dispatch import reference_only

KEY = Key(seed=1, step=0, rank=0)
CPU = torch.device("cpu")
ALL = [
    AdaComp,
    AdaptiveThreshold,
    ChunkTopK,
    RandomK,
    SampledTopK,
    Threshold,
    TopK,
    Variance,
]


def table(*lengths: int) -> Segments:
    names = tuple(f"w{i}" for i in range(len(lengths)))
    return Segments(names, tuple((n,) for n in lengths))


def signal(target: Tensor, *lengths: int, grad: Tensor | None = None) -> EncodeInput:
    segments = table(*(lengths or (target.numel(),)))
    memory = {"second_moment": torch.zeros_like(target)}
    return EncodeInput(target if grad is None else grad, target, memory, segments)


def picks(selector: Selector, x: list[float], *lengths: int, key: Key = KEY) -> list[int]:
    return selector.select(signal(torch.tensor(x), *lengths), key).tolist()


def normal(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


EXAMPLES = [spec for cls in ALL for spec in cls.examples]


# -- laws of every selector ----------------------------------------------------------------------


@pytest.mark.parametrize("spec", EXAMPLES)
@pytest.mark.parametrize("lengths", [(), (0,), (1,), (7, 0, 9), (1000, 3, 64)])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 1e30])
def test_choices_rise_and_stay_inside_the_budget(spec: str, lengths: tuple[int, ...], scale: float) -> None:
    selector = parse(spec)
    segments = table(*lengths)
    x = normal(segments.total) * scale
    before, state = x.clone(), torch.random.get_rng_state()
    input_ = EncodeInput(x, x, {"second_moment": torch.zeros_like(x)}, segments)
    chosen = selector.select(input_, KEY)
    assert chosen.dtype == torch.int64
    assert bool((chosen.diff() > 0).all())
    counts = torch.bincount(
        torch.searchsorted(segments.offsets_on(CPU)[1:], chosen, right=True), minlength=len(lengths)
    ).tolist()
    most = [selector.capacity(n) for n in lengths]
    assert counts == most if selector.traits.fixed else all(c <= m for c, m in zip(counts, most, strict=True))
    assert torch.equal(x, before) and torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(chosen, selector.select(input_, KEY))


@pytest.mark.parametrize("spec", EXAMPLES)
def test_specs_survive_a_round_trip(spec: str) -> None:
    assert parse(str(parse(spec))) == parse(spec)


@pytest.mark.parametrize("cls", ALL)
def test_every_module_opens_with_a_card(cls: type) -> None:
    card = __import__(cls.__module__, fromlist=["x"]).__doc__
    for label in ("Paper:", "Formula:", "Wire:", "Traits:", "Differs:", "Spec:"):
        assert card.count(f"\n{label} ") == 1


@pytest.mark.parametrize("spec", [s for s in EXAMPLES if parse(s).traits.contraction])
def test_contractions_always_send_something_of_a_spike(spec: str) -> None:
    selector, x = parse(spec), torch.zeros(50)
    x[17] = -3.0
    if not selector.receivers_redraw:
        assert 17 in selector.select(signal(x), KEY).tolist()


# -- top-k ---------------------------------------------------------------------------------------


def test_topk_by_hand() -> None:
    assert picks(TopK(0.5), [0.1, -4.0, 3.0, -0.2]) == [1, 2]
    assert picks(TopK(0.01), [0.1, -4.0, 3.0, -0.2]) == [1]
    assert picks(TopK(1), [0.0, 1.0]) == [0, 1]


def test_topk_ties_go_to_the_first() -> None:
    assert picks(TopK(0.5), [1.0, -1.0, 2.0, 1.0, 1.0, -1.0]) == [0, 1, 2]
    assert picks(TopK(0.5), [0.0] * 4) == [0, 1]


def test_each_segment_has_its_own_budget() -> None:
    x = [9.0, 8.0, 7.0, 6.0, 0.1, 0.2, 0.3, 0.4, -0.5]
    assert picks(TopK(0.5), x, 4, 0, 4, 1) == [0, 1, 6, 7, 8]


def test_topk_agrees_with_sorting() -> None:
    x = normal(5000)
    expected = x.abs().argsort(descending=True)[:50].sort().values
    assert torch.equal(TopK(0.01).select(signal(x), KEY), expected)


def test_chunk_topk_by_hand() -> None:
    x = [1.0, -5.0, 2.0, 0.5, 0.1, 7.0, 3.0, -4.0]
    assert picks(ChunkTopK(1, chunk=3), x) == [1, 5, 7]
    assert picks(ChunkTopK(2, chunk=3), x, 4, 4) == [1, 2, 3, 5, 6, 7]
    assert ChunkTopK(2, chunk=3).capacity(4) == 3
    last = (
        torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32).item()
    )  # no bits are more, and it is no number
    with reference_only():
        assert picks(ChunkTopK(1, chunk=3), [last, 1.0, 2.0, float("inf")]) == [0, 3]


# -- sampled top-k -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("ratio", [0.001, 0.01])
def test_sampled_topk_sends_nearly_k_of_the_largest(seed: int, ratio: float) -> None:
    selector, x = SampledTopK(ratio), normal(40_000, seed)
    chosen = selector.select(signal(x), Key(seed, 3, 0))
    k = selector.capacity(x.numel())
    assert 0.8 * k <= chosen.numel() <= k
    smallest = x[chosen].abs().min()
    assert int((x.abs() > smallest).sum()) == chosen.numel() - 1  # no larger one was left behind


def test_sampled_topk_reads_small_segments_whole() -> None:
    x = normal(200)
    assert torch.equal(SampledTopK(0.01).select(signal(x), KEY), TopK(0.01).select(signal(x), KEY))


def test_sampled_topk_finds_needles_that_its_sample_missed() -> None:
    x = torch.full((30_000,), 1e-3)
    x[[5, 10_000, 29_999]] = torch.tensor([50.0, -60.0, 70.0])
    chosen = SampledTopK(0.001).select(signal(x), KEY)
    assert chosen.numel() == 30 and {5, 10_000, 29_999} <= set(chosen.tolist())


@pytest.mark.parametrize("selector", [SampledTopK(0.01), Threshold(0.5, most=0.01)])
def test_equal_candidates_are_cut_without_regard_to_position(selector: Selector) -> None:
    n, keys = 10_000, 20
    x = torch.ones(n)
    drawn = [selector.select(signal(x), Key(0, step, 0)) for step in range(keys)]
    assert all(chosen.numel() == 100 for chosen in drawn)
    mean = float(torch.cat(drawn).float().mean()) / n
    assert abs(mean - 0.5) < 5 * math.sqrt(1 / 12 / (100 * keys))


def test_nearly_equal_candidates_are_cut_without_regard_to_position() -> None:
    n, selector = 20_000, SampledTopK(0.01)
    drawn = [selector.select(signal(1.0 + 0.1 * normal(n, s).abs()), Key(0, s, 0)) for s in range(20)]
    assert all(160 <= chosen.numel() <= 200 for chosen in drawn)
    mean = float(torch.cat(drawn).float().mean()) / n
    assert abs(mean - 0.5) < 5 * math.sqrt(1 / 12 / sum(chosen.numel() for chosen in drawn))


# -- random-k ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 16, 17, 100])
def test_a_whole_draw_is_a_permutation(n: int) -> None:
    for step in range(5):
        drawn = select.draw(Key(0, step, 0), ("w",), (n,), (n,), CPU)
        assert sorted(drawn.tolist()) == list(range(n))


@pytest.mark.parametrize(("n", "k"), [(2, 1), (3, 2), (5, 1), (5, 2), (7, 3), (11, 1), (30, 4)])
def test_every_position_is_drawn_equally_often(n: int, k: int) -> None:
    trials = 4000
    names = tuple(map(str, range(trials)))  # as many units as trials: all in one call
    drawn = select.draw(KEY, names, (n,) * trials, (k,) * trials, CPU)
    expected = trials * k / n
    seen = torch.bincount(drawn, minlength=n)
    chi = float(((seen - expected) ** 2 / expected).sum()) / (1 - (k - 1) / max(n - 1, 1))
    assert chi < n - 1 + 5 * math.sqrt(2 * (n - 1)) + 10


def test_every_pair_is_drawn_equally_often() -> None:
    trials, n = 20_000, 6
    names = tuple(map(str, range(trials)))
    pairs = select.draw(KEY, names, (n,) * trials, (2,) * trials, CPU).view(trials, 2)
    seen = torch.bincount(pairs[:, 0] * n + pairs[:, 1], minlength=n * n).view(n, n)
    assert int(seen.diagonal().sum()) == 0
    expected = trials / (n * (n - 1))
    chi = ((seen - expected) ** 2 / expected).fill_diagonal_(0).sum()
    assert float(chi) < 29 + 5 * math.sqrt(58) + 10


def test_positions_change_with_the_step() -> None:
    n, steps = 10, 600
    seen = torch.zeros(n)
    for step in range(steps):
        seen[RandomK(0.2).select(signal(torch.zeros(n)), Key(5, step, 0))] += 1
    assert float(((seen - 120) ** 2 / 120).sum()) < 9 + 5 * math.sqrt(18)


def test_drawing_more_only_appends() -> None:
    few, many = (select.draw(KEY, ("w",), (1000,), (k,), CPU) for k in (10, 500))
    assert torch.equal(few, many[:10])


def test_units_draw_from_their_own_philox_streams() -> None:
    words, starts = philox.words_of_all(KEY, ("a", "b"), torch.tensor([5, 6]))
    for name, start, m in zip("ab", starts.tolist(), (5, 6), strict=True):
        assert torch.equal(words[start : start + m], philox.words(KEY, name, m, CPU))
    together = select.draw(KEY, ("a", "b"), (50, 90), (5, 9), CPU)
    apart = [select.draw(KEY, (u,), (n,), (n // 10,), CPU) for u, n in (("a", 50), ("b", 90))]
    assert torch.equal(together, torch.cat(apart))


def test_draws_from_huge_sets_hold_no_table_of_them() -> None:
    drawn = select.draw(KEY, ("w",), (3_000_000_000,), (1000,), CPU)
    assert drawn.unique().numel() == 1000
    assert int(drawn.min()) >= 0 and int(drawn.max()) < 3_000_000_000
    assert abs(float(drawn.double().mean()) / 3e9 - 0.5) < 5 * math.sqrt(1 / 12 / 1000)


def test_shared_draws_agree_and_private_ones_do_not() -> None:
    x = signal(torch.zeros(1000))
    mine, yours = Key(1, 2, 0), Key(1, 2, 1)
    shared, private = RandomK(0.1), RandomK(0.1, shared=False)
    assert torch.equal(shared.select(x, mine), shared.select(x, yours))
    assert not torch.equal(private.select(x, mine), private.select(x, yours))
    assert torch.equal(private.select(x, mine), private.select(x, yours.of(0)))
    assert shared.traits.linear and not private.traits.linear
    assert shared.receivers_redraw and private.receivers_redraw and not TopK(0.1).receivers_redraw


def test_receivers_redraw_without_the_values() -> None:
    x = signal(normal(60), 10, 50)
    blind = EncodeInput(torch.zeros(0), torch.zeros(0), {}, x.segments)
    chosen = RandomK(0.1, shared=False).select(x, KEY)
    assert torch.equal(chosen, RandomK(0.1, shared=False).select(blind, KEY))
    assert [int((chosen < 10).sum()), int((chosen >= 10).sum())] == [1, 5]


def test_unbiased_randomk_undoes_its_own_loss() -> None:
    assert RandomK(0.3, unbiased=True).gain(10) == pytest.approx(10 / 3)
    assert RandomK(0.01, unbiased=True).gain(10) == 10.0
    assert RandomK(0.3, unbiased=True).gain(0) == 1.0
    assert RandomK(0.3).gain(10) == 1.0
    assert RandomK(0.3, unbiased=True).traits.unbiased


# -- thresholds ----------------------------------------------------------------------------------


def test_threshold_by_hand() -> None:
    x = [0.5, -0.4, 2.0, -3.0, 0.0, 0.6]
    assert picks(Threshold(0.5), x) == [0, 2, 3, 5]
    assert picks(Threshold(0.5, most=0.5), x) == [2, 3, 5]
    assert picks(Threshold(0.5, most=0.5), x, 2, 4) == [0, 2, 3]
    assert picks(Threshold(0.5), [0.0, 0.0]) == []


def test_adaptive_threshold_by_hand() -> None:
    x = [1.0, -2.0, 0.9, 0.1, 0.0, 0.05, 0.0, 0.0]
    assert picks(AdaptiveThreshold(), x) == [0, 1]
    assert picks(AdaptiveThreshold(), x, 3, 3, 2) == [0, 1, 3, 5]
    assert picks(AdaptiveThreshold(most=0.1), x, 3, 3, 2) == [1, 3]


# -- AdaComp -------------------------------------------------------------------------------------


def test_adacomp_by_hand() -> None:
    # Bins {0, 1, 2} and {3, 4}; the maxima of |G| are 4 and 1.
    target = torch.tensor([4.0, 3.0, -1.0, 1.0, 0.2])
    grad = torch.tensor([-1.0, 1.0, -0.5, 0.0, 0.9])
    # H = G + grad = [3, 4, -1.5 | 1, 1.1]: the largest G of bin one is shrinking, and waits.
    input_ = signal(target, grad=grad)
    assert AdaComp(bin=3).select(input_, KEY).tolist() == [1, 3, 4]
    # scale 1: H = G, the maximum of each bin.
    assert AdaComp(bin=3, scale=1).select(input_, KEY).tolist() == [0, 3]
    # scale 4: H = G + 3 grad = [1, 6, -2.5 | 1, 2.9].
    assert AdaComp(bin=3, scale=4.0).select(input_, KEY).tolist() == [1, 3, 4]
    assert AdaComp(bin=3, most=0.2).select(input_, KEY).tolist() == [1]


def test_adacomp_bins_end_with_their_segment() -> None:
    x = torch.tensor([1.0, 9.0, 0.0, 0.0, 2.0])
    # Segments of 1, 3 and 1: bins {0}, {1, 2}, {3}, {4}; bin {3} is all zero and sends nothing.
    assert AdaComp(bin=2).select(signal(x, 1, 3, 1), KEY).tolist() == [0, 1, 4]


# -- variance ------------------------------------------------------------------------------------


def test_variance_by_hand_over_steps() -> None:
    selector = Variance(alpha=1.0, decay=0.5)
    memory = {"second_moment": torch.zeros(2), "other": torch.ones(2)}
    residual = torch.zeros(2)
    # Coordinate 0 always moves by 1, coordinate 1 by 1, -1, 1.
    grads = [torch.tensor([1.0, 1.0]), torch.tensor([1.0, -1.0]), torch.tensor([1.0, 1.0])]
    sent, moments = [], []
    for grad in grads:
        memory = dict(selector.memory_with_gradient(grad, memory))
        input_ = EncodeInput(grad, residual + grad, memory, table(2))
        chosen = selector.select(input_, KEY)
        memory = dict(selector.memory_after_sending(input_, chosen))
        residual = input_.target.index_fill(0, chosen, 0.0)
        sent.append(chosen.tolist())
        moments.append(memory["second_moment"].tolist())
    # Step 1: r^2 = v = 1, nothing. Step 2: r = (2, 0), v = 1.5: 4 > 1.5. Step 3: r = (1, 1),
    # v = (1, 1.75): nothing.
    assert sent == [[], [0], []]
    assert moments == [[0.5, 0.5], [0.0, 0.75], [0.5, 0.875]]
    assert torch.equal(memory["other"], torch.ones(2))


def test_variance_leaves_its_memory_alone_and_finite() -> None:
    input_ = signal(torch.tensor([1e30, 1.0]))
    memory = Variance().memory_with_gradient(input_.grad, input_.memory)
    assert torch.equal(input_.memory["second_moment"], torch.zeros(2))
    assert bool(memory["second_moment"].isfinite().all())


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        "topk(2)",
        "topk(0)",
        "topk(-0.1)",
        "topk(True)",
        "topk('all')",
        "topk(None)",
        "sampled_topk(0.1, sample=0)",
        "sampled_topk(0.1, lower=1.1)",
        "sampled_topk(0.1, upper=0.9)",
        "sampled_topk(0.1, iterations=2.5)",
        "sampled_topk(0.1, iterations=False)",
        "randomk(1.5)",
        "randomk(0.1, shared=1)",
        "threshold(-1)",
        "threshold(1, most=0)",
        "adaptive_threshold(most=2)",
        "adacomp(bin=0)",
        "adacomp(bin=2.5)",
        "adacomp(scale=0.5)",
        "adacomp(most=0)",
        "variance(alpha=0)",
        "variance(decay=1.5)",
        "variance(most=-1)",
        "chunk_topk(0)",
        "chunk_topk(9, chunk=8)",
        "chunk_topk(0.5)",
        "threshold(1e999)",
    ],
)
def test_a_wrong_argument_is_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=spec.partition("(")[0]):
        parse(spec)


@pytest.mark.parametrize("cls", [TopK, SampledTopK, RandomK, Threshold])
def test_nan_is_refused(cls: type) -> None:
    with pytest.raises(ValueError, match="nan"):
        cls(math.nan)
