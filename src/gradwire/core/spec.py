"""The spec grammar: ``"topk(0.01) | sign"`` is ``TopK(0.01) | Sign()``, and back.

A spec is read as a Python expression but never evaluated: names come from the registry, arguments are literals or
further specs, so a spec cannot run code. ``{0: topk(0.25), 500: topk(0.01)}`` is a table of specs by step.
"""

import ast
import dataclasses
import difflib
import inspect
import re
import threading
from abc import ABC
from functools import reduce
from typing import Any, ClassVar

from gradwire.core.registry import lookup

_LARGEST = 2**63
_PARSING = (
    threading.Lock()
)  # before 3.12, all threads of an interpreter count the depth of their syntax trees in one number


def parse(text: str) -> Any:
    """Read a spec.

    Raises:
        ValueError: The text is no spec; the message names the place and a text that would be one.
    """
    try:
        with _PARSING:
            tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError(
            f"cannot read the spec {text!r}{_hint(text)}; write stages as name(arguments), joined by |, "
            "for example topk(0.01) | sign"
        ) from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value >= _LARGEST:
            raise ValueError(f"{node.value} in the spec {text!r} is too large; whole numbers fit into 64 bits")
    value = _build(tree.body, text)
    if not (_is_spec(tree.body) or _is_table(tree.body)):
        raise ValueError(f"the spec {text!r} names no stage; write for example topk(0.01) | sign")
    return value


def _hint(text: str) -> str:
    """What is probably wrong with a text that is no spec."""
    if re.search(r"\d,0", text):
        return ": decimals have a point, not a comma"
    if "%" in text:
        return ": a share is a number, 0.01 for one percent"
    if option := re.search(r";\s*(\w+)\s*=", text):
        name = option[1]
        return f": {name} stands beside a spec, as the argument {name}= or as --set sync.{name}=VALUE"
    if text.count("(") != text.count(")"):
        return ": it opens and closes different numbers of parentheses"
    return ""


class Named(ABC):
    """A frozen value with a name in specs. ``name`` and ``kind`` are set by `register`."""

    name: ClassVar[str]
    kind: ClassVar[str]
    examples: ClassVar[tuple[str, ...]]  # specs that tests and docs feed on; never empty

    def __str__(self) -> str:
        return write(self)


def write(stage: Any) -> str:
    """A stage as text: required arguments by position, others by name, defaults left out."""
    arguments = []
    for field in dataclasses.fields(stage):
        value = getattr(stage, field.name)
        if field.default is dataclasses.MISSING:
            arguments.append(_literal(value))
        elif value != field.default:
            arguments.append(f"{field.name}={_literal(value)}")
    return f"{stage.name}({', '.join(arguments)})" if arguments else str(stage.name)


def _literal(value: object) -> str:
    return str(value) if hasattr(value, "kind") else repr(value)


def _is_spec(node: ast.expr) -> bool:
    return isinstance(node, ast.Name | ast.Call | ast.BinOp)


def _is_table(node: ast.expr) -> bool:
    return isinstance(node, ast.Dict) and bool(node.keys) and all(isinstance(key, ast.Constant) for key in node.keys)


def _build(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        for part in _operands(node):
            if not _is_spec(part):
                raise ValueError(f"{ast.unparse(part)} in the spec {text!r} is no stage; join stages by |")
        return reduce(_join, [_build(part, text) for part in _operands(node)])
    if isinstance(node, ast.Name):
        return _call(node.id, [], {})
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        named = {word.arg: _argument(word.arg, word.value, text) for word in node.keywords if word.arg}
        if len(named) == len(node.keywords):
            return _call(node.func.id, [_build(arg, text) for arg in node.args], named)
    if isinstance(node, ast.Dict) and _is_table(node):
        pairs = zip(node.keys, node.values, strict=True)
        return {key.value: _build(value, text) for key, value in pairs if isinstance(key, ast.Constant)}
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        piece = ast.get_source_segment(text.strip(), node)
        if piece and re.fullmatch(r"[A-Za-z][\w-]*", piece):
            lookup(piece)  # a name with hyphens: there is none, but perhaps one with underscores
        raise ValueError(
            f"cannot read {piece!r} in the spec {text!r}; stages are joined by |, specs of a list are separated by "
            "semicolons, and arguments are numbers, names or quoted text"
        ) from None


def _argument(name: str, node: ast.expr, text: str) -> Any:
    """The value of a keyword. Of a bare word that is no name, the sentence says whose value it was to be."""
    try:
        return _build(node, text)
    except ValueError as error:
        if not isinstance(node, ast.Name):
            raise
        raise ValueError(f"{name}={node.id} in the spec {text!r} does not fit: {error}") from None


def _operands(node: ast.expr) -> list[ast.expr]:
    parts: list[ast.expr] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):  # a loop, since chains may be long
        parts.append(node.right)
        node = node.left
    return [node, *reversed(parts)]


def _join(left: Any, right: Any) -> Any:
    for one in (left, right):
        if getattr(one, "kind", "") == "preset":
            raise ValueError(
                f"a preset, here {one}, has no place in a chain of codec stages; chain its codec with others, and pass "
                "its feedback as feedback=, or of dgc write dgc(0.001, values=sign)"
            )
    if not hasattr(left, "__or__"):
        raise ValueError(f"{left} is of kind {left.kind}, which has no place in a chain of codec stages")
    return left | right


def _call(name: str, args: list[Any], named: dict[str, Any]) -> Any:
    _, make = lookup(name)
    known = inspect.signature(make)
    try:
        given = known.bind_partial(*args, **named).arguments
        if missing := [word for word, one in known.parameters.items() if _required(one) and word not in given]:
            examples = getattr(make, "examples", ()) or (f"{name}({', '.join(known.parameters)})",)
            raise ValueError(f"{name} needs {' and '.join(missing)}, as in {examples[0]}")
        return make(*args, **named)
    except TypeError as error:  # too many arguments, an unknown one, a text where a number belongs, and the like
        written = [*map(_literal, args), *(f"{word}={_literal(value)}" for word, value in named.items())]
        signature = str(known).partition(" ->")[0]
        call = f"{name}({', '.join(written)})"
        raise ValueError(f"{call} does not fit {name}{signature}: {error}{_near(named, known)}") from None


def _near(named: dict[str, Any], known: inspect.Signature) -> str:
    """The argument that was probably meant by a name that is none."""
    lower = {word.lower(): word for word in known.parameters}
    unknown = [word.lower() for word in named if word not in known.parameters]
    found = difflib.get_close_matches(unknown[0], lower, n=1) if unknown else []
    return f"; did you mean {lower[found[0]]}?" if found else ""


def _required(parameter: inspect.Parameter) -> bool:
    many = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and not many
