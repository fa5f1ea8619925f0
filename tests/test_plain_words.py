"""What a person reads has no words that the style rules out: help, errors, captions and pages."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
WORDS = re.compile(
    r"\b(anew|parted|whoever|cannot be|goes on|going on|(?:asks|tells|hears|speaks) (?:for|of|to|you|us)|for ever)\b",
    re.I,
)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def messages(path: Path) -> list[str]:
    """Texts of several words, docstrings left out."""
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docstrings]
    return [node.value for node in texts if isinstance(node.value, str) and " " in node.value]


def test_messages_are_plain() -> None:
    found = {
        (path.name, text) for path in (ROOT / "src").rglob("*.py") for text in messages(path) if WORDS.search(text)
    }
    assert not found


def test_pages_are_plain() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))]
    lines = {(page.name, line) for page in pages for line in FENCED.sub("", page.read_text()).splitlines()}
    assert not {(page, line) for page, line in lines if WORDS.search(line)}


def test_a_word_would_be_found() -> None:
    assert WORDS.search("the file cannot be read") and not WORDS.search("the file is damaged")
