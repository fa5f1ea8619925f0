"""The codec of Contributing obeys the laws; one that draws numbers from elsewhere does not."""

import re
from pathlib import Path

import pytest
import torch

from gradwire.codecs.codec import codec
from gradwire.core import registry
from gradwire.core.plugins import load_file
from gradwire.core.registry import card
from gradwire.extend import roundtrip
from gradwire_lab.cli.new import codec_text
from laws import test_codec_laws as laws
from test_architecture import CARD

ROOT = Path(__file__).parent.parent.parent
EACH = [law for name, law in vars(laws).items() if name.startswith("test_") and "chain" in law.__code__.co_varnames[:1]]
PROMISED = ("lossless", "linear", "unbiased", "contraction", "fixed", "gpu")


def pasted() -> str:
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL)
    return next(block for block in blocks if '"crowd"' in block)


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Imports a text as a file; what it registers is forgotten afterwards."""
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))

    def write(text: str, name: str = "crowd") -> None:
        (tmp_path / f"{name}.py").write_text(text)
        load_file(tmp_path / f"{name}.py")

    return write


def test_new_codec_writes_what_contributing_shows() -> None:
    assert codec_text("crowd") == pasted()


def test_the_codec_of_contributing_obeys_the_laws(imported) -> None:
    imported(pasted())
    checked = [law for law in EACH if not any(word in law.__name__ for word in PROMISED)]
    assert len(checked) >= 5
    for spec in ("crowd", "topk(0.3) | crowd", "hadamard | crowd"):
        for law in checked:
            law(codec(spec))
    laws.test_deterministic_contractions_never_lose_more_than_the_signal(codec("crowd"))
    laws.test_messages_of_fixed_codecs_have_one_length(codec("crowd"))
    _, made = registry.lookup("crowd")
    assert not [label for label in CARD if f"\n{label}" not in card(made)]


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


def test_a_tensor_is_sent_and_comes_back(imported) -> None:
    imported(pasted())
    x = torch.randn(30, 20)
    decoded, payload, ratio = roundtrip("crowd", x)
    assert decoded.shape == x.shape and payload.nbytes == 4 + 300 and ratio == 4 * 600 / 304
    assert torch.equal(roundtrip("fp32", x).decoded, x)
    assert roundtrip("variance", x).decoded.shape == x.shape
