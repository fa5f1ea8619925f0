"""``--own``: the laws of what imported files register, and no others. ``-k tern`` would run those of terngrad, too."""

import re
import sys
from pathlib import Path

import pytest

import gradwire
from gradwire.core.plugins import VARIABLE, files


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--own", action="store_true", help=f"run the laws of the files that {VARIABLE} names, no others")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--own", default=False):  # unknown where pytest was not given this folder
        return
    names = own_names([path.resolve() for path in files()])
    if not names:
        raise pytest.UsageError(f"--own finds nothing that a file registers; write {VARIABLE}=FILE.py pytest ... --own")
    chosen = [is_about(item.name, names) and item.path.stem != "test_contributed" for item in items]
    config.hook.pytest_deselected(items=[item for item, own in zip(items, chosen, strict=True) if not own])
    items[:] = [item for item, own in zip(items, chosen, strict=True) if own]


def own_names(paths: list[Path]) -> set[str]:
    """The names that these files register."""
    origins = {
        name: getattr(sys.modules[made.__module__], "__file__", "") for name, made in gradwire.registered().items()
    }
    return {name for name, origin in origins.items() if origin and Path(origin).resolve() in paths}


def is_about(test: str, names: set[str]) -> bool:
    """Whether one of these names stands in the spec of a test, ``test_law[topk(0.3) | crowd]``."""
    _, _, spec = test.partition("[")
    return not names.isdisjoint(re.findall(r"\w+", spec))
