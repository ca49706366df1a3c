# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Takes assert statements apart: what a program is to call, and what must come of it.

The program's process gets the calls and, of the setup, what the arguments of these calls need. What
the conditions need stays away from it: a reference solution in the setup would be read there.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from jaxrl_llm.rewards.code_harness import encode

_BUILTINS = frozenset(dir(builtins))
_VALUE_METHODS = frozenset(dir(str) + dir(bytes) + dir(float) + dir(tuple) + dir(frozenset))
_PLAIN_KINDS = {"int", "float", "bytes", "tuple", "set", "frozenset", "dict"}


@dataclasses.dataclass(frozen=True)
class SplitAssert:
    """`condition` over `_value_0`, …, the values of `calls`; or `expected`, encoded, of one
    call.
    """

    calls: tuple[str, ...]
    condition: str
    expected: Any = None
    is_literal: bool = False


def split_asserts(
    asserts: Sequence[str] | str, setup: str, entry: str
) -> tuple[list[SplitAssert], str]:
    """Splits a list of assert statements, a module of them, or the `def check(candidate)` of one.

    Args:
        setup: the text that defines what the asserts use beside the program.
        entry: the name that `candidate` stands for; may be empty if there is no such function.

    Returns:
        The asserts, and the part of the setup that their calls need.

    Raises:
        ValueError: a statement is no assert, or can't be judged apart from the program: calls and
            conditions that need the same definition would show the program what is expected.
    """
    parts = _Setup(setup, entry)
    split = [_split(text, parts.defined) for text in _assert_texts(asserts, entry)]
    return split, parts.for_calls(
        _names(text for each in split for text in each.calls),
        _names(each.condition for each in split),
    )


def equal_forms(value: Any) -> Any:
    """An encoded value in the one form of all that `==` takes for the same: 1, 1.0 and True."""
    if isinstance(value, list):
        return [equal_forms(item) for item in value]
    if isinstance(value, dict):
        return {
            "set" if kind == "frozenset" else kind: equal_forms(content)
            for kind, content in value.items()
        }
    if isinstance(value, bool):
        return int(value)
    return encode(int(value)) if isinstance(value, float) and value.is_integer() else value


def is_plain(value: Any) -> bool:
    """Whether `equal_forms` knows all that an encoded value is made of (a Decimal, say, it does
    not).
    """
    if isinstance(value, list):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(kind in _PLAIN_KINDS and is_plain(item) for kind, item in value.items())
    return True


# ----------------------------------------------------------------------------
# Asserts
# ----------------------------------------------------------------------------


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

    def __init__(self, known: frozenset[str]):
        self.known, self.calls = known, []

    def visit_Call(self, node):
        root = node.func
        while isinstance(root, ast.Attribute | ast.Call):
            root = root.value if isinstance(root, ast.Attribute) else root.func
        if not isinstance(root, ast.Name) or root.id in self.known or _is_of_a_value(node.func):
            return self.generic_visit(node)
        self.calls.append(node)
        return ast.copy_location(ast.Name(f"_value_{len(self.calls) - 1}", ast.Load()), node)


def _is_of_a_value(function: ast.expr) -> bool:
    """Whether this is `f(3).startswith` and the like, of a value that must not answer for itself.

    `Stack().count` is not: a method of the program's class, which has a capital letter.
    """
    if not (isinstance(function, ast.Attribute) and isinstance(function.value, ast.Call)):
        return False
    maker = function.value.func
    is_class = isinstance(maker, ast.Name) and maker.id[:1].isupper()
    return function.attr in _VALUE_METHODS and not is_class


def _split(text: str, known: frozenset[str]) -> SplitAssert:
    """Takes an assert apart into the calls of the program and what they are compared with."""
    take = _TakeCalls(known)
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
        literal = encode(ast.literal_eval(sides[names.index(False)]))
    except (ValueError, TypeError):
        return None, False  # an expression: worked out in the second sandbox
    return (equal_forms(literal), True) if is_plain(literal) else (None, False)


# ----------------------------------------------------------------------------
# The setup
# ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Statement:
    """A statement of the setup: names that it binds or may change, and names that it uses."""

    text: str
    binds: frozenset[str]
    uses: frozenset[str]
    is_import: bool


class _Setup:
    """The statements of a setup, and which of them a set of names needs."""

    def __init__(self, setup: str, entry: str):
        self._statements: list[_Statement] = []
        self._entry = {entry}
        bound: set[str] = set()
        imported: set[str] = set()
        for node in ast.parse(setup).body:
            self._statements.append(statement := _statement(node, bound, imported))
            bound |= statement.binds
            imported |= statement.binds if statement.is_import else set()
        # The entry is the program's, even where the setup has one of that name.
        self.defined = frozenset((_BUILTINS | bound) - self._entry)

    def for_calls(self, called: set[str], judged: set[str]) -> str:
        """The text that calls need; ValueError where it has what conditions need."""
        for_calls = sorted(self._needed(called - self._entry, self._entry))
        for_judge = self._needed(judged, set())
        for i in for_calls:
            each = self._statements[i]
            if each.binds & self._entry or (i in for_judge and not each.is_import):
                raise ValueError(
                    "the calls and the expected values of asserts need the same part of the setup, "
                    f"which the program would see: {each.text[:100]!r}"
                )
        return "\n".join(self._statements[i].text for i in for_calls)

    def _needed(self, names: set[str], without: set[str]) -> set[int]:
        """The statements that names need, directly or through others."""
        names, chosen = set(names), set()
        while True:
            more = {
                i
                for i, each in enumerate(self._statements)
                if i not in chosen and (each.binds & names or "*" in each.binds)
            }
            if not more:
                return chosen
            chosen |= more
            for i in more:
                names |= self._statements[i].uses - without


def _statement(node: ast.stmt, bound: set[str], imported: set[str]) -> _Statement:
    text = ast.unparse(node)
    uses = frozenset(_names([text]))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return _Statement(text, frozenset({node.name}), uses, False)
    binds: set[str] = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            binds.add(inner.name)
        elif isinstance(inner, ast.Import | ast.ImportFrom):
            binds.update((alias.asname or alias.name).partition(".")[0] for alias in inner.names)
        elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            binds.add(inner.id)
    # Such as `table.append(…)` or `table[…] = …`: who needs the table needs this too.
    if isinstance(node, ast.Expr):
        binds |= uses & bound
    elif not (isinstance(node, ast.Assign) and all(isinstance(t, ast.Name) for t in node.targets)):
        binds |= (uses & bound) - imported
    is_import = isinstance(node, ast.Import | ast.ImportFrom)
    return _Statement(text, frozenset(binds), uses, is_import)


def _names(texts: Iterable[str]) -> set[str]:
    """All variable names in texts, whatever they stand for there."""
    return {
        node.id
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Name)
    }
