"""Every `gradwire` command that a page shows has a name, arguments and options that exist."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from gradwire.core.spec import parse
from gradwire_lab.cli.main import app
from gradwire_lab.train.compare import arms
from gradwire_lab.train.recipe_files import resolve

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
UsageError: type[Exception] = typer.BadParameter.__base__  # typer has it from click, or a copy of click
QUOTED = re.compile(r"`(gradwire [a-z][^`]*)`")


def in_blocks(page: Path) -> list[str]:
    return [line for block in BLOCK.findall(page.read_text()) for line in block.replace("\\\n", " ").splitlines()]


def in_sentences(page: Path) -> list[str]:
    text = BLOCK.sub("", page.read_text())
    return [quoted.replace("\n", " ").replace(r"\|", "|") for quoted in QUOTED.findall(text)]


def commands(lines: list[str]) -> list[list[str]]:
    """The words behind `gradwire`."""
    words = [shlex.split(line, comments=True) for line in lines]
    return [some[some.index("gradwire") + 1 :] for some in words if "gradwire" in some and "pip" not in some]


SHOWN = [(page.relative_to(ROOT), words) for page in PAGES for words in commands(in_blocks(page))]
NAMED = [(page.relative_to(ROOT), words) for page in PAGES for words in commands(in_sentences(page))]


def refusal(words: list[str]) -> str:
    """What the command line finds wrong with a command, without running it; empty if nothing."""
    group: Any = typer.main.get_command(app)
    try:
        context = group.make_context("gradwire", list(words))
        while hasattr(group, "resolve_command"):
            name, group, rest = group.resolve_command(context, [*context._protected_args, *context.args])
            context = group.make_context(name, rest, parent=context)
    except UsageError as wrong:
        return str(wrong)
    return ""


def unknown(words: list[str]) -> list[str]:
    """What no command is called, and no option of the command that is named."""
    command: Any = typer.main.get_command(app)
    words = words[: words.index("--")] if "--" in words else list(words)
    while hasattr(command, "get_command") and words:
        command = command.get_command(None, words.pop(0))
        if command is None:
            return words or ["a command"]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    return [word for word in words if word.startswith("-") and word.partition("=")[0] not in {*known, "-h", "--help"}]


@pytest.mark.parametrize(("page", "words"), SHOWN, ids=lambda value: str(value)[:60])
def test_what_a_block_shows_could_be_typed(page: Path, words: list[str]) -> None:
    assert not refusal(words)


@pytest.mark.parametrize(("page", "words"), NAMED, ids=lambda value: str(value)[:60])
def test_what_a_sentence_names_exists(page: Path, words: list[str]) -> None:
    assert not unknown(words)


def test_commands_are_found_and_mistakes_are_noticed() -> None:
    assert len(SHOWN) > 25 and len(NAMED) > 60
    assert "--sped" in refusal(["train", "--sped", "int8"]) and "trian" in refusal(["trian"])
    assert unknown(["train", "--sped", "int8"]) == ["--sped"] and unknown(["trian"]) and unknown(["bench", "setp"])


LISTS = [words[words.index("--specs") + 1] for _, words in SHOWN + NAMED if "compare" in words and "--specs" in words]


@pytest.mark.parametrize("specs", [text for text in LISTS if "..." not in text])
def test_lists_of_specs_are_lists_of_specs(specs: str) -> None:
    for arm in arms(specs):
        assert parse(arm.spec)
        resolve(["digits"], [f"sync.spec={arm.spec}", *(key for key in arm.overrides if "median" not in key)])
