"""Pages: documentation that is written by the registry."""

from collections.abc import Iterable, Iterator
from importlib import resources
from itertools import groupby

from gradwire.engine.method import method
from gradwire_lab.cli.docstring_cards import HEADINGS, Card, alone, cards, size_of, traits_of

_CARD_PARTS = ("Formula", "Wire", "Traits", "Differs")


def codecs_page() -> str:
    """The whole of docs/codecs.md."""
    sections = [(resources.files("gradwire_lab.cli") / "codecs_page.txt").read_text(encoding="utf-8")]
    for kind, heading in HEADINGS.items():
        body = _presets() if kind == "preset" else _section(cards(kind))
        sections.append(f"## {heading}\n\n" + "\n".join(body))
    return "\n".join(sections)


def _section(found: list[Card]) -> Iterator[str]:
    codec_like = any(size_of(card) for card in found)
    head = ("name", "what it does", "specs", *(("bits", "promises") if codec_like else ()))
    rows = []
    for card in found:
        specs = ", ".join(f"`{spec}`" for spec in card.examples)
        numbers = (size_of(card).replace("<= ", "<=\u00a0"), traits_of(card)) if codec_like else ()  # on one line
        rows.append((f"`{card.name}`", card.title, specs, *numbers))
    yield from _table(head, rows)
    yield ""
    for module, group in groupby(sorted(found, key=lambda card: card.module), key=lambda card: card.module):
        yield from _full(module, list(group))


def _full(module: str, group: list[Card]) -> Iterator[str]:
    card = group[0]
    path = "/".join(module.split("."))
    yield f"### {', '.join(one.name for one in group)}"
    yield ""
    if card.parts:
        yield f"{card.line('Paper')}"
        yield ""
        yield "```text"
        for label in _CARD_PARTS:
            first, *rest = card.parts.get(label, [""])
            yield f"{label + ':':<10}{first}".rstrip()
            yield from (f"{'':10}{line}".rstrip() for line in rest)
        yield "```"
        yield ""
    yield f"Source: [{path}.py](../src/{path}.py)"
    yield ""


def _presets() -> Iterator[str]:
    rows = alone()
    for card in cards("preset"):
        rows += [(spec, card.title) for spec in card.examples]
    shown = [(f"`{spec}`", title, f"`{method(spec)}`") for spec, title in rows]
    yield from _table(("spec", "what it is", "stands for"), shown)
    yield ""


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    titles = list(head)
    yield _row(titles)
    yield _row(["---"] * len(titles))
    for row in rows:
        yield _row(row)


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|").replace("``", "`") for cell in cells) + " |"
