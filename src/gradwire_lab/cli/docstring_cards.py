"""Cards: what the modules say about themselves, read for tables and pages.

Every stage, feedback and exchange lives in a module that opens with a card: a title, then labeled paragraphs (`Paper`,
`Formula`, `Wire`, `Traits`, `Differs`, `Spec`). A preset is a function, and its docstring is all it has to say.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gradwire.codecs.codec import Codec, codec
from gradwire.codecs.stage import IndexCoder, Stage
from gradwire.core.registry import card as card_of
from gradwire.core.registry import lookup, registered
from gradwire.core.segments import Segments
from gradwire.core.spec import parse

HEADINGS = {  # the kinds that make up a method, in the order in which one learns them
    "selector": "Selectors",
    "quantizer": "Quantizers",
    "indices": "Index coders",
    "transform": "Transforms",
    "feedback": "Feedback",
    "exchange": "Exchanges",
    "preset": "Presets",
    "local": "Local steps",
}

MILLION = 1_000_000
SOME = round(0.01 * MILLION)  # positions that an index coder is measured on
_LABEL = re.compile(r"^([A-Z][a-z]+):\s+", re.MULTILINE)
_PRESETS = {"dgc": ("dgc", "dgc(0.01, clip=1.0, ramp=400)"), "ramp": ("ramp(topk(0.001), steps=400)",)}
_PRESETS |= {
    "local_sgd": ("local_sgd(H=8)",),
    "post_local_sgd": ("post_local_sgd(H=8, start=1000)",),
    "diloco": ("diloco(H=30)", "diloco(H=30, start=256)"),
    "sparseloco": ("sparseloco(H=5)", "sparseloco(H=5, k=64, chunk=4096, start=256)"),
    "local_schedule": ("local_schedule({0: sparseloco(H=1, keep=1.0), 1000: sparseloco(H=5, rate=0.7)})",),
}
# Well-known methods that are one stage or one exchange, and need no other name.
ALONE = ("terngrad", "qsgd", "powersgd(2)")
_AUTHOR = re.compile(r"\b([A-Z][a-z]+)(?:,| et al\.| and )")
_YEAR = re.compile(r"\b(?:19|20)\d\d\b")
_REFERENCE = re.compile(r" \([A-Z]\w+(?: et al\.)?,? [^)]*\d{4}\)")


@dataclass(frozen=True)
class Card:
    """One registered name.

    Attributes:
        name: As in specs.
        kind: Which slot of a spec it fills.
        title: What it does, in a line.
        examples: Specs.
        parts: The labeled paragraphs of the module's card, as lists of lines; empty for presets.
        module: Where it lives.
        about: The rest of a preset's docstring.
        arguments: Of a whole method, with their defaults.
    """

    name: str
    kind: str
    title: str
    examples: tuple[str, ...]
    module: str
    parts: dict[str, list[str]] = field(default_factory=dict)
    about: str = ""
    arguments: str = ""

    def line(self, label: str) -> str:
        """A paragraph on one line; empty where the card lacks it."""
        return " ".join(line.strip() for line in self.parts.get(label, []))

    @property
    def source(self) -> str:
        """First author and year of its paper; empty where there is none."""
        papers = self.line("Paper") or self.title
        own = re.split(rf"\b{self.name}: ", papers)[-1]  # some modules hold two names
        author = _AUTHOR.search(own)
        year = author and _YEAR.search(own, author.end())
        return f"{author[1]} {year[0]}" if author and year else ""

    def brief(self, room: int) -> str:
        """The first sentence of the title, without its reference, as far as whole clauses fit into so many columns."""
        sentence = _REFERENCE.sub("", self.title).replace("``", "").partition(". ")[0].rstrip(".")
        if len(sentence) > room:
            sentence = sentence.partition(";")[0]
        while len(sentence) > room and (end := max(sentence.rfind(mark) for mark in ",:")) > 0:
            sentence = sentence[:end]
        return sentence


def cards(kind: str) -> list[Card]:
    """The cards of one kind, by name."""
    return [_card(name, kind, make) for name, make in sorted(registered(kind).items())]


def card_named(name: str) -> Card:
    """The card of one name.

    Raises:
        ValueError: There is no such name; the message has the nearest ones.
    """
    kind, make = lookup(name)
    return _card(name, kind, make)


def alone() -> list[tuple[str, str]]:
    """The specs of `ALONE`, each with what it is."""
    found = {card.name: card.title for kind in ("quantizer", "exchange") for card in cards(kind)}
    return [(spec, found[spec.partition("(")[0]]) for spec in ALONE]


def _card(name: str, kind: str, make: Callable[..., object]) -> Card:
    examples = getattr(make, "examples", ()) or _PRESETS.get(name, ()) or _bare(name, make)
    title, _, rest = (inspect.getdoc(make) or "").partition("\n\n")
    title, is_preset = title.replace("\n", " "), kind == "preset"
    parts, about = ({}, rest.partition("Args:")[0]) if is_preset else (_parts(card_of(make)), "")
    arguments = _arguments(make) if kind in ("preset", "local") else ""
    return Card(name, kind, title, tuple(examples), make.__module__, parts, " ".join(about.split()), arguments)


def _arguments(make: Callable[..., object]) -> str:
    """Names and defaults, as a spec has them."""
    given = inspect.signature(make).parameters.values()
    return ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default}" for p in given)


def _bare(name: str, make: Callable[..., object]) -> tuple[str, ...]:
    """The name alone, if that is a spec."""
    needed = [p for p in inspect.signature(make).parameters.values() if p.default is p.empty]
    return () if needed else (name,)


def _parts(document: str) -> dict[str, list[str]]:
    """The paragraphs by label, without the indentation that aligns them with their first lines."""
    _, *pieces = _LABEL.split(document.partition("\n")[2])
    return {label: inspect.cleandoc(text).splitlines() for label, text in zip(pieces[::2], pieces[1::2], strict=True)}


def size_of(card: Card) -> str:
    """Bits for each of a million parameters, as the first example sends them; ``<=`` where the data may take less."""
    made: Any = parse(card.examples[0])
    if isinstance(made, IndexCoder):
        bits = 8 * made.size(SOME, MILLION) / SOME
        return f"{_bound(made.fixed)}{bits:.3g} a position"
    if isinstance(made, Stage | Codec):
        chain = codec(made)
        return f"{_bound(chain.traits.fixed)}{8 * chain.size(Segments.single(MILLION)) / MILLION:.3g}"
    return ""


def traits_of(card: Card) -> str:
    """What the first example promises as a whole codec; of what is no codec, the card's own words."""
    made: Any = parse(card.examples[0])
    if isinstance(made, Stage | Codec) and not isinstance(made, IndexCoder):
        return str(codec(made).traits)
    return card.line("Traits").rstrip(".")


def _bound(fixed: bool) -> str:
    return "" if fixed else "<= "
