# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The fields of nested frozen dataclasses: dotted names, types, values, and what they are for."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import enum
import functools
import inspect
import pathlib
import re
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

PLAIN = (bool, int, float, str, pathlib.PurePath, enum.Enum, type(None))


@dataclasses.dataclass(frozen=True)
class Field:
    """One leaf of a config.

    Attributes:
        name: dotted name, as on the command line.
        hint: the resolved type annotation.
        value: what the config holds.
        meaning: what the field is for, or "" when its dataclass does not tell.
        settable: False for functions and objects, which only the config file can choose.
    """

    name: str
    hint: Any
    value: Any
    meaning: str
    settable: bool


def is_node(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def nodes(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dataclass in the config with its dotted name, the root ("") first."""
    yield prefix, config
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if is_node(value):
            yield from nodes(value, join(prefix, field.name))


def join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def fields(config: Any) -> list[Field]:
    """Every leaf of nested dataclasses: those of the root, then group by group."""
    found = []
    for prefix, node in nodes(config):
        hints, meanings = _hints(type(node)), _meanings(type(node))
        for field in dataclasses.fields(node):
            value, hint = getattr(node, field.name), hints[field.name]
            if not is_node(value):
                settable = field.init and _settable(hint)
                name = join(prefix, field.name)
                found.append(Field(name, hint, value, meanings.get(field.name, ""), settable))
    return found


def optional_group(field: Field) -> type | None:
    """The dataclass of a group that is None where it is off, such as `lora`."""
    if field.value is not None or typing.get_origin(field.hint) not in (
        typing.Union,
        types.UnionType,
    ):
        return None
    groups = [arg for arg in typing.get_args(field.hint) if dataclasses.is_dataclass(arg)]
    return groups[0] if groups else None


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls, include_extras=False)
    except NameError:  # an annotation that was imported for type checkers alone
        return {field.name: Any for field in dataclasses.fields(cls)}


def _settable(hint: Any) -> bool:
    """Whether every value of this type can be written on a command line."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return True
    if origin in (typing.Union, types.UnionType, tuple, list):
        return bool(args) and any(
            _settable(arg) for arg in args if arg not in (Ellipsis, type(None))
        )
    return isinstance(hint, type) and issubclass(hint, PLAIN)


@functools.cache
def _meanings(cls: type) -> dict[str, str]:
    """What each field is for: from "Attributes:", a string below the field, or a comment."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        with contextlib.suppress(OSError, TypeError, SyntaxError):
            found |= _source_meanings(textwrap.dedent(inspect.getsource(base)))
        section = re.split(r"^Attributes:[ \t]*$", inspect.cleandoc(base.__doc__ or ""), flags=re.M)
        if len(section) > 1:
            body = re.split(r"^\S", section[1], maxsplit=1, flags=re.M)[0]
            entries = re.findall(
                r"^    (\w+)(?: *\(.*?\))?:(.*(?:\n(?:     .*|[ \t]*$))*)", body, flags=re.M
            )
            found |= {name: " ".join(text.split()) for name, text in entries}
    return found


def _source_meanings(source: str) -> dict[str, str]:
    lines = source.splitlines()
    body = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)).body
    found = {}
    for statement, following in zip(body, [*body[1:], None], strict=True):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        # Columns are counted in bytes, as ast does.
        tail = lines[(statement.end_lineno or 1) - 1].encode()[statement.end_col_offset :].decode()
        if tail.lstrip().startswith("#"):
            found[statement.target.id] = tail.lstrip(" #").strip()
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            found[statement.target.id] = " ".join(str(following.value.value).split())
    return found
