"""The tests, guarded: each can fail, and says what failed."""

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted(HERE.rglob("test_*.py"))
ASSERTING_CALLS = {"raises", "warns", "deprecated_call", "assert_close"}
COMPARING_CALLS = {"equal", "allclose", "assert_close", "same"}
BROAD = {"Exception", "BaseException"}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def called(node: ast.Call) -> str:
    return ast.unparse(node.func).rpartition(".")[2]


@cache
def functions(path: Path) -> dict[str, tuple[Path, ast.FunctionDef]]:
    """The functions that a file defines, or imports from other files of the tests, by the name they have there."""
    known = {node.name: (path, node) for node in tree(path).body if isinstance(node, ast.FunctionDef)}
    for node in tree(path).body:
        if isinstance(node, ast.ImportFrom):
            others = helpers(str(node.module).removeprefix("tests."))
            known |= {x.asname or x.name: others[x.name] for x in node.names if x.name in others}
        elif isinstance(node, ast.Import):
            for module in (alias.name for alias in node.names):
                known |= {f"{module}.{name}": one for name, one in helpers(module).items()}
    return known


def helpers(module: str) -> dict[str, tuple[Path, ast.FunctionDef]]:
    path = HERE / f"{module.replace('.', '/')}.py"
    return functions(path) if path.exists() else {}


def asserts(path: Path, function: ast.FunctionDef, above: tuple[str, ...] = ()) -> bool:
    """Whether a function, or one that it uses, has an assertion. Launchers only report those of what they run."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert) or (isinstance(node, ast.Call) and called(node) in ASSERTING_CALLS):
            return True
    names = {ast.unparse(node) for node in ast.walk(function) if isinstance(node, ast.Name | ast.Attribute)}
    used = [functions(path)[name] for name in names & functions(path).keys()]
    return any(
        asserts(where, one, (*above, one.name))
        for where, one in used
        if where.name != "spawn.py" and one.name not in above
    )


def silent(path: Path) -> Iterator[str]:
    """Tests that assert nothing."""
    for node in tree(path).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not asserts(path, node):
            yield f"{path.name}::{node.name}"


def tautologies(path: Path) -> Iterator[str]:
    """Comparisons of a thing with itself."""
    for node in ast.walk(tree(path)):
        sides: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and called(node) in COMPARING_CALLS:
            sides = node.args[:2]
        if len({ast.dump(side) for side in sides}) < len(sides):
            yield f"{path.name}:{node.lineno}: {ast.unparse(node)}"


def untyped(path: Path) -> Iterator[str]:
    """Expected errors of no particular type."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and called(node) == "raises" and ast.unparse(node.args[0]) in BROAD:
            yield f"{path.name}:{node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("fault", [silent, tautologies, untyped])
def test_every_test_can_fail(fault: Callable[[Path], Iterator[str]]) -> None:
    assert not [wrong for path in FILES for wrong in fault(path)]


def test_faults_are_found(tmp_path: Path) -> None:
    path = tmp_path / "test_x.py"
    path.write_text(
        "def f():\n    assert x\n"
        "def test_a():\n    f()\n"
        "def test_b():\n    torch.equal(x, x)\n"
        "def test_c():\n    pytest.raises(Exception)\n"
    )
    assert list(silent(path)) == ["test_x.py::test_b"]
    assert list(tautologies(path)) == ["test_x.py:6: torch.equal(x, x)"]
    assert list(untyped(path)) == ["test_x.py:8: pytest.raises(Exception)"]
