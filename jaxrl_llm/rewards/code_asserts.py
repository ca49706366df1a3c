# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Takes assert statements apart: what a program is to call, and what must come of it."""

from __future__ import annotations

import ast
import builtins
import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.rewards.code_harness import encode


@dataclasses.dataclass(frozen=True)
class SplitAssert:
    """`condition` over `_value_0`, …, the values of `calls`; or `expected`, encoded, of one
    call.
    """

    calls: tuple[str, ...]
    condition: str
    expected: Any = None
    is_literal: bool = False


def split_asserts(asserts: Sequence[str] | str, setup: str, entry: str) -> list[SplitAssert]:
    """Splits a list of assert statements, a module of them, or the `def check(candidate)` of one.

    Args:
        setup: the text that defines what the asserts use beside the program.
        entry: the name that `candidate` stands for; may be empty if there is no such function.

    Raises:
        ValueError: a statement is no assert, or can't be judged apart from the program.
    """
    return [_split(text, setup, entry) for text in _assert_texts(asserts, entry)]


def whole_floats(value: Any) -> Any:
    """An encoded value with whole floats as integers: `==` takes 1 and 1.0 for the same."""
    if isinstance(value, list):
        return [whole_floats(item) for item in value]
    if isinstance(value, dict):
        return {kind: whole_floats(content) for kind, content in value.items()}
    return encode(int(value)) if isinstance(value, float) and value.is_integer() else value


def _assert_texts(asserts: Sequence[str] | str, entry: str) -> list[str]:
    """The asserts of a list, or of a module's text, or of `def check(candidate)` within one."""
    found = []
    for text in [asserts] if isinstance(asserts, str) else asserts:
        body = ast.parse(text).body
        if len(body) == 1 and isinstance(body[0], ast.FunctionDef):
            names = [argument.arg for argument in body[0].args.args]
            body = body[0].body
            for node in (node for statement in body for node in ast.walk(statement)):
                if isinstance(node, ast.Name) and node.id in names and entry:
                    node.id = entry
        for statement in body:
            if not isinstance(statement, ast.Assert):
                raise ValueError(f"only assert statements can be judged; got {text[:100]!r}")
            found.append(ast.unparse(statement))
    return found


class _TakeCalls(ast.NodeTransformer):
    """Puts `_value_0`, … in the place of the outermost calls of the program's functions."""

    def __init__(self, known: set[str]):
        self.known, self.calls = known, []

    def visit_Call(self, node):
        root = node.func
        while isinstance(root, ast.Attribute | ast.Call):
            root = root.value if isinstance(root, ast.Attribute) else root.func
        if not isinstance(root, ast.Name) or root.id in self.known:
            return self.generic_visit(node)
        self.calls.append(node)
        return ast.copy_location(ast.Name(f"_value_{len(self.calls) - 1}", ast.Load()), node)


def _split(text: str, setup: str, entry: str) -> SplitAssert:
    """Takes an assert apart into the calls of the program and what they are compared with."""
    take = _TakeCalls((set(dir(builtins)) | _names_defined(setup)) - {entry})
    replaced = ast.fix_missing_locations(take.visit(ast.parse(text).body[0].test))
    calls = take.calls
    if not calls:
        raise ValueError(f"an assert that calls nothing of the program: {text[:100]!r}")
    for call in calls:
        inside = list(ast.walk(call))
        bound = {n.id for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        called = {id(n.func) for n in inside if isinstance(n, ast.Call)}
        for n in inside:
            if isinstance(n, ast.Name) and id(n) not in called and n.id not in take.known | bound:
                raise ValueError(f"{n.id} of an assert is not defined in its setup: {text[:100]!r}")
    texts = tuple(map(ast.unparse, calls))
    return SplitAssert(texts, ast.unparse(replaced), *_literal(replaced))


def _literal(condition: ast.expr) -> tuple[Any, bool]:
    """Of `_value_0 == literal`, or the reverse: (the literal, True); otherwise (None, False)."""
    if not (isinstance(condition, ast.Compare) and len(condition.ops) == 1):
        return None, False
    sides = [condition.left, condition.comparators[0]]
    names = [isinstance(side, ast.Name) and side.id == "_value_0" for side in sides]
    if not isinstance(condition.ops[0], ast.Eq) or sum(names) != 1:
        return None, False
    try:
        return whole_floats(encode(ast.literal_eval(sides[names.index(False)]))), True
    except (ValueError, TypeError):
        return None, False  # an expression: worked out in the second sandbox


def _names_defined(setup: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(setup)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names
