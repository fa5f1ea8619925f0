"""Text: Penn Treebank, WikiText, what CPython carries inside, and any other file, as numbers.

The first two come cut into words already, one sentence or paragraph a line; a line ends with the word <eos>. Other text
is cut into words and signs, or taken byte by byte.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from gradwire_lab.train.data.folder import find

END, UNKNOWN = "<eos>", "<unk>"
WORD = re.compile(r"<\w+>|\w+|[^\w\s]")
SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class TextTask:
    """Three texts as token numbers, int64 [n], and what the numbers mean; bytes mean themselves."""

    name: str
    train: Tensor
    valid: Tensor
    test: Tensor
    vocab: tuple[str, ...]

    def to(self, device: torch.device | str) -> "TextTask":
        return replace(self, train=self.train.to(device), valid=self.valid.to(device), test=self.test.to(device))

    @property
    def facts(self) -> Mapping[str, object]:
        """What a maker of models may want to know."""
        return {"vocab": len(self.vocab)}


def ptb(root: Path | None, strict: bool = True) -> TextTask:
    """Penn Treebank as Mikolov prepared it: 10,000 words. ``strict`` demands the official counts."""
    folder = find(root, "Penn Treebank", ("ptb", "simple-examples/data"), "simple-examples.tgz (Mikolov's RNNLM)")
    files = [folder / f"ptb.{split}.txt" for split in SPLITS]
    return _official("ptb", files, (929_589, 73_760, 82_430), 10_000, strict)


def wikitext2(root: Path | None, strict: bool = True) -> TextTask:
    """WikiText-2 at word level: 33,278 words. ``strict`` demands the official counts."""
    folder = find(root, "WikiText-2", ("wikitext-2",), "wikitext-2-v1.zip")
    files = [folder / f"wiki.{split}.tokens" for split in SPLITS]
    return _official("wikitext-2", files, (2_088_628, 217_646, 245_569), 33_278, strict)


def text(root: Path | None, file: str, level: str = "word") -> TextTask:
    """Any text: a file, of which the last tenth is used to validate and to test, or a folder of three files.

    The folder holds train.txt, valid.txt and test.txt. ``level`` is ``word`` or ``byte``.
    """
    path = Path(file) if root is None else root / file
    if path.is_dir():
        parts = [_read(path / f"{split}.txt") for split in SPLITS]
    else:
        parts = thirds(_read(path).splitlines(keepends=True))
    task = encode(path.stem, parts, level)
    if not len(task.train):
        raise ValueError(f"{path} holds nothing to train on; name another text with --set data.options.file=FILE")
    return task


def pydoc(level: str = "byte") -> TextTask:
    """The topics of the Python documentation that CPython carries inside, so that text needs no download.

    About 370 thousand characters: nine tenths to train on, a twentieth each to validate and to test; at level ``byte``
    or ``word``. They change a little from one Python to the next, so compare perplexities of one Python.
    """
    return encode("pydoc", thirds(paragraphs()), level)


def paragraphs() -> list[str]:
    """Every paragraph once: topics contain one another, and a text must not be tested with what it was taught."""
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    pieces = (piece.strip("\n") for name in sorted(topics) for piece in topics[name].split("\n\n"))
    return [f"{piece}\n\n" for piece in dict.fromkeys(pieces) if piece]


def encode(name: str, parts: list[str], level: str) -> TextTask:
    """Three raw texts as a task. A word seen once in training counts as unknown, so that <unk> is learned too."""
    if level == "byte":
        train, valid, test = (torch.tensor(list(part.encode()), dtype=torch.int64) for part in parts)
        return TextTask(name, train, valid, test, tuple(map(repr, range(256))))
    if level != "word":
        raise ValueError(f"text has no level called {level!r}; choose 'word' or 'byte'")
    words = [list(chain.from_iterable([*WORD.findall(line), END] for line in part.splitlines())) for part in parts]
    return _numbered(name, words, least=2)


def thirds(pieces: list[str]) -> list[str]:
    """Pieces of a text, as one text of nine tenths and two of a twentieth."""
    ends = [len("".join(pieces)) * share // 100 for share in (90, 95)]
    parts: tuple[list[str], ...] = ([], [], [])
    seen = 0
    for piece in pieces:
        parts[sum(seen >= end for end in ends)].append(piece)
        seen += len(piece)
    return ["".join(part) for part in parts]


def _official(name: str, files: list[Path], tokens: tuple[int, int, int], vocab: int, strict: bool) -> TextTask:
    """A text, which if ``strict`` must have the official numbers of tokens and words."""
    # Not splitlines: WikiText has other line breaks inside its lines.
    texts = [_read(file).rstrip("\n").split("\n") for file in files]
    words = [list(chain.from_iterable([*line.split(), END] for line in lines)) for lines in texts]
    task = _numbered(name, words, least=1)
    counts = len(task.train), len(task.valid), len(task.test)
    if strict and (counts, len(task.vocab)) != (tokens, vocab):
        raise ValueError(
            f"{files[0].parent} is not the official text: it has {counts} tokens and {len(task.vocab)} words, not "
            f"{tokens} and {vocab}. Download it again, or read what is there with "
            "--set data.options.strict=false"
        )
    return task


def _numbered(name: str, words: list[list[str]], least: int) -> TextTask:
    """Words get their numbers in the order in which they first appear in training."""
    seen = Counter(words[0])  # keeps that order
    vocab = [word for word, count in seen.items() if count >= least]
    known = set(vocab)
    if UNKNOWN not in known and any(word not in known for part in words for word in part):
        vocab.append(UNKNOWN)
    number = {word: i for i, word in enumerate(vocab)}
    unknown = number.get(UNKNOWN, 0)
    train, valid, test = (torch.tensor([number.get(word, unknown) for word in part]).long() for part in words)
    return TextTask(name, train, valid, test, tuple(vocab))


def _read(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"there is no text {path}; put it there, or name another folder with --data DIR")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}; convert it first") from None
