"""The spec grammar: ``"topk(0.01) | sign"`` is ``TopK(0.01) | Sign()``, and back.

A spec is read as a Python expression but never evaluated: names come from the registry, arguments are literals or
further specs, so a spec cannot run code.
"""

import ast
import dataclasses
import inspect
from collections.abc import Callable
from functools import reduce
from typing import Any

from gradwire.core.registry import lookup


def parse(text: str) -> Any:
    """Read a spec.

    Raises:
        ValueError: The text is no spec; the sentence says where and what would be.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError(
            f"cannot read the spec {text!r}; write stages as name(arguments), joined by |, "
            "for example topk(0.01) | sign"
        ) from None
    value = _build(tree.body, text)
    if not _is_spec(tree.body):
        raise ValueError(f"the spec {text!r} names no stage; write for example topk(0.01) | sign")
    return value


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


def _build(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return reduce(lambda a, b: a | b, [_build(part, text) for part in _operands(node)])
    if isinstance(node, ast.Name):
        return _call(node.id, [], {})
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        named = {word.arg: _build(word.value, text) for word in node.keywords if word.arg}
        if len(named) == len(node.keywords):
            return _call(node.func.id, [_build(arg, text) for arg in node.args], named)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        piece = ast.get_source_segment(text.strip(), node)
        raise ValueError(f"cannot read {piece!r} in the spec {text!r}; arguments are literals") from None


def _operands(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*_operands(node.left), node.right]
    return [node]


def _call(name: str, args: list[Any], named: dict[str, Any]) -> Any:
    _, make = lookup(name)
    try:
        inspect.signature(make).bind(*args, **named)
    except TypeError as wrong:
        raise ValueError(f"{name}{_signature(make)} does not fit: {wrong}") from None
    return make(*args, **named)


def _signature(make: Callable[..., object]) -> str:
    return str(inspect.signature(make)).partition(" ->")[0]
