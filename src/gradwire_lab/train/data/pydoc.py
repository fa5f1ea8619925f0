"""pydoc: the topics of the Python documentation that CPython carries inside, so that text needs no download.

About 370 thousand characters. They change a little from one Python to the next, so compare perplexities of one Python.
"""

from importlib import import_module

from gradwire_lab.train.data.text import TextTask, encode, thirds


def pydoc(level: str = "byte") -> TextTask:
    """Nine tenths to train on, a twentieth each to validate and to test; at level ``byte`` or ``word``."""
    return encode("pydoc", thirds(paragraphs()), level)


def paragraphs() -> list[str]:
    """Every paragraph once: topics contain one another, and a text must not be tested with what it was taught."""
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    pieces = (piece.strip("\n") for name in sorted(topics) for piece in topics[name].split("\n\n"))
    return [f"{piece}\n\n" for piece in dict.fromkeys(pieces) if piece]
