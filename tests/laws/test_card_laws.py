"""The card of a stage says what its traits promise, no more and no less."""

import re

import pytest

import gradwire
from gradwire.core.registry import card
from gradwire.core.spec import parse
from gradwire_lab.cli.docstring_cards import card_named

PROMISES = ("linear", "unbiased", "contraction", "lossless", "fixed")
STAGES = gradwire.registered("selector", "quantizer")


def held_by(name: str) -> set[str]:
    """The promises that an example keeps, of this stage or of another one that shares its card."""
    sharing = [made for made in STAGES.values() if card(made) == card(STAGES[name])]
    held = [parse(spec).traits for made in sharing for spec in made.examples]
    return {promise for promise in PROMISES if any(getattr(traits, promise) for traits in held)}


def said_on(line: str) -> tuple[set[str], set[str]]:
    """The promises that a card's line makes, and those that it says are not made."""
    denied = {promise for promise in PROMISES if re.search(rf"\bnot {promise}\b", line)}
    return {promise for promise in PROMISES if re.search(rf"(?<!\bnot )\b{promise}\b", line)}, denied


@pytest.mark.parametrize("name", STAGES)
def test_the_traits_on_a_card_are_those_of_the_stage(name: str) -> None:
    line = card_named(name).line("Traits")
    if not line:
        pytest.skip(f"{name} has no card with a line `Traits:`")
    (said, denied), held = said_on(line), held_by(name)
    assert said <= held, f"the card of {name} says {', '.join(said - held)}, but its traits do not"
    assert not held & denied - said, f"the card of {name} denies {', '.join(held & denied)}, but its traits say so"
    unsaid = held - said - {"fixed"}  # which nearly all are
    assert not unsaid, f"the traits of {name} promise {', '.join(unsaid)}, but its card does not say so"


def test_a_line_is_read_as_it_is_meant() -> None:
    assert said_on("contraction; not fixed") == ({"contraction"}, {"fixed"})
    assert said_on("biased; not linear; unbiasedness is kept") == (set(), {"linear"})
    assert said_on("none") == (set(), set())
