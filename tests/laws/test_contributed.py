"""What Contributing shows obeys the laws; a codec that draws numbers from elsewhere does not."""

import re
from pathlib import Path

import pytest
import torch

from gradwire.codecs.codec import codec
from gradwire.core import registry
from gradwire.core.keys import Key
from gradwire.core.plugins import load_file
from gradwire.core.registry import card
from gradwire.engine.method import method
from gradwire.extend import roundtrip
from gradwire_lab.cli.new import file_text
from laws import test_codec_laws as laws
from laws import test_exchange_laws as exchange_laws
from laws import test_feedback_laws as feedback_laws
from test_architecture import CARD

ROOT = Path(__file__).parent.parent.parent
EACH = [law for name, law in vars(laws).items() if name.startswith("test_") and "chain" in law.__code__.co_varnames[:1]]
PROMISED = ("lossless", "linear", "unbiased", "contraction", "fixed", "gpu")
# The stages of Contributing, and chains that use them.
STAGES = {
    "crowd": ("crowd", "topk(0.3) | crowd", "hadamard | crowd"),
    "dither": ("dither", "dither(per=16)", "topk(0.3) | dither(per=16)", "hadamard | dither"),
    "peaks": ("peaks(4)", "peaks(100) | sign", "hadamard | peaks(4)", "peaks(4) | fp16 | bitmap"),
    "shuffle": ("shuffle | fp32", "shuffle | sign(per=64)", "shuffle | topk(0.3)"),
}


def pasted(name: str = "crowd") -> str:
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL)
    return next(block for block in blocks if f'@register("{name}"' in block)


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Imports a text as a file; what it registers is forgotten afterwards."""
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))

    def write(text: str, name: str = "crowd") -> None:
        registry._ENTRIES.pop(name, None)  # which GRADWIRE_IMPORT may have imported from another file
        (tmp_path / f"{name}.py").write_text(text)
        load_file(tmp_path / f"{name}.py")

    return write


NEW = {"codec": "crowd", "selector": "peaks", "transform": "shuffle", "exchange": "median", "feedback": "fade"}


@pytest.mark.parametrize(("kind", "name"), NEW.items())
def test_new_writes_what_contributing_shows(kind: str, name: str) -> None:
    assert file_text(kind, name) == pasted(name)


@pytest.mark.parametrize("name", STAGES)
def test_the_stages_of_contributing_obey_the_laws(imported, name: str) -> None:
    imported(pasted(name), name)
    checked = [law for law in EACH if not any(word in law.__name__ for word in PROMISED)]
    assert len(checked) >= 5
    for chain in map(codec, STAGES[name]):
        for law in checked:
            law(chain)
        if chain.traits.contraction:
            laws.test_contractions_never_lose_more_than_the_signal(chain)
        if chain.traits.unbiased:
            laws.test_unbiased_codecs_are_right_on_average(chain)
        if chain.traits.fixed:
            laws.test_messages_of_fixed_codecs_have_one_length(chain)
    has_card(name)


def has_card(name: str) -> None:
    _, made = registry.lookup(name)
    assert not [label for label in CARD if f"\n{label}" not in card(made)]


def test_each_stage_of_contributing_does_what_its_card_says(imported) -> None:
    for name in STAGES:
        imported(pasted(name), name)
    x = torch.tensor([0.5, -3.0, 1.0, 0.0, 2.0, -0.1, 7.0])
    assert roundtrip("peaks(4)", x).decoded.tolist() == [0.0, -3.0, 0.0, 0.0, 0.0, 0.0, 7.0]
    assert torch.equal(roundtrip("shuffle | fp32", x).decoded, x)
    assert len({tuple(roundtrip("dither", x, Key(0, step, 0)).decoded.tolist()) for step in range(9)}) > 1
    long = torch.arange(4096.0)
    blocks = [roundtrip(f"{t}chunk_topk(1, chunk=64)", long).decoded.nonzero().flatten() for t in ("", "shuffle | ")]
    assert (blocks[0] % 64 == 63).all() and not (blocks[1] % 64 == 63).all()


@pytest.mark.parametrize("spec", ["fade", "fade(keep=0.5)"])
def test_the_feedback_of_contributing_obeys_the_laws(imported, spec: str) -> None:
    imported(pasted("fade"), "fade")
    feedback_laws.test_feedback_has_one_spelling(spec)
    feedback_laws.test_a_lossless_codec_leaves_no_error(spec)
    for law in (
        feedback_laws.test_sent_values_plus_the_error_are_the_compensated_gradient,
        feedback_laws.test_inputs_are_unchanged_and_state_keeps_its_form,
    ):
        law(spec)
    has_card("fade")


@pytest.mark.parametrize("world", [1, 3])
def test_the_exchange_of_contributing_obeys_the_laws(imported, world: int) -> None:
    imported(pasted("median"), "median")
    exchange_laws.test_exchanges_have_one_spelling("median")
    exchange_laws.test_traffic_is_as_predicted_plus_one_status("median", world)
    for feedback, spec in (("residual", "fp32"), ("residual", "sign"), ("ef21", "topk(0.3)")):
        whole = method(spec, feedback, "median")
        exchange_laws.test_the_same_run_gives_the_same_bits(whole)
        exchange_laws.test_a_bad_gradient_on_one_rank_changes_nothing_on_any(whole)
        exchange_laws.test_a_parameter_is_left_out_only_if_no_rank_has_a_gradient(whole)
    has_card("median")


@pytest.mark.parametrize(
    "drawn",
    [
        "torch.rand(scales.shape)",
        "torch.rand(scales.shape, generator=torch.Generator().manual_seed(0))",
        "torch.empty(scales.shape).bernoulli_()",
        "__import__('numpy').random.default_rng(0).random()",
        "__import__('random').Random(0).random()",
    ],
)
def test_numbers_that_the_key_does_not_decide_are_caught(imported, drawn: str) -> None:
    imported(
        pasted()
        .replace("        share =", f"        scales = scales + 0 * {drawn}\n        share =")
        .replace("crowd", "dice"),
        "dice",
    )
    with pytest.raises(AssertionError):
        laws.test_randomness_comes_from_the_key_alone(codec("dice"))


@pytest.mark.parametrize(
    ("given", "law"),
    [
        ('("w",), lengths.sum()[None]', laws.test_a_unit_is_decoded_alike_whatever_stands_beside_it),
        ('("w",) * len(names), lengths', laws.test_units_of_other_names_draw_other_numbers),
    ],
)
def test_numbers_that_ignore_the_names_of_units_are_caught(imported, given: str, law) -> None:
    imported(
        pasted("dither").replace("names, lengths)).floor()", f"{given})).floor()").replace("dither", "blind"), "blind"
    )
    with pytest.raises(AssertionError, match=r"blind .* pass names .*on to uniform as given"):
        law(codec("blind"))


def test_a_tensor_is_sent_and_comes_back(imported) -> None:
    imported(pasted())
    x = torch.randn(30, 20)
    decoded, payload, ratio = roundtrip("crowd", x)
    assert decoded.shape == x.shape and payload.nbytes == 4 + 300 and ratio == 4 * 600 / 304
    assert torch.equal(roundtrip("fp32", x).decoded, x)
    assert roundtrip("variance", x).decoded.shape == x.shape
