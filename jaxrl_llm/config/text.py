# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""A config as text: JSON values, differences, a table, and the help of a command line."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import math
import pathlib
import textwrap
import types
import typing
from typing import Any, Literal

from jaxrl_llm.config.fields import fields, is_node, join

_NO_MEANING = "(no description)"


def type_name(hint: Any) -> str:
    """A type as a person reads it: `float | None`, `one of 'clip', 'cispo'`, `int, int, …`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, args))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(type_name(arg) for arg in args)
    if origin in (tuple, list) and args:
        if origin is list or args[-1] is Ellipsis:
            return f"{type_name(args[0])}, …"
        return "(" + ", ".join(type_name(arg) for arg in args) + ")"
    if hint is type(None) or hint is None:
        return "None"
    if origin is collections.abc.Callable or hint is collections.abc.Callable:
        return "function"
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return "one of " + ", ".join(member.name for member in hint)
    return getattr(hint, "__name__", None) or str(hint).replace("typing.", "")


def to_dict(config: Any) -> Any:
    """The config as JSON values; functions as "module:qualname", infinities and NaN as strings."""
    if is_node(config):
        return {
            field.name: to_dict(getattr(config, field.name)) for field in dataclasses.fields(config)
        }
    if isinstance(config, collections.abc.Mapping):
        return {str(key): to_dict(value) for key, value in config.items()}
    if isinstance(config, tuple | list):
        return [to_dict(item) for item in config]
    if isinstance(config, set | frozenset):
        return sorted(map(to_dict, config), key=str)
    if isinstance(config, enum.Enum):
        return config.name
    if isinstance(config, float) and not math.isfinite(config):
        return str(config)
    if config is None or isinstance(config, bool | int | float | str):
        return config
    if isinstance(config, functools.partial):
        given = [str(to_dict(arg)) for arg in config.args]
        given += [f"{key}={to_dict(value)}" for key, value in config.keywords.items()]
        return f"{to_dict(config.func)}({', '.join(given)})"
    if isinstance(config, pathlib.PurePath):
        return str(config)
    if callable(config) and hasattr(config, "__qualname__"):
        return f"{config.__module__}:{config.__qualname__}"
    # The address in a default repr differs from run to run; a stored config must not.
    text = repr(config)
    return f"{type(config).__module__}:{type(config).__qualname__}" if " at 0x" in text else text


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, with dotted keys; an empty dict stays a value."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = join(prefix, key)
        flat |= flatten(value, name) if isinstance(value, dict) and value else {name: value}
    return flat


def diff(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What changed between two stored configs, one line a field: `algo.kl_coef: 0.0 → 0.01`."""
    before, after, absent = flatten(old), flatten(new), "(absent)"
    names = [*before, *(name for name in after if name not in before)]
    return [
        f"{name}: {before.get(name, absent)} → {after.get(name, absent)}"
        for name in names
        if before.get(name, absent) != after.get(name, absent)
    ]


def print_config(config: Any, base: Any = None) -> str:
    """The config as a table, a group at a time; with `base`, a "*" marks what differs from it."""
    rows = flatten(to_dict(config))
    usual = rows if base is None else flatten(to_dict(base))
    width = max(map(len, rows), default=0)
    lines, group = [], None
    groups = ["", *(name.rpartition(".")[0] for name in rows)]
    for name, value in sorted(
        rows.items(), key=lambda row: groups.index(row[0].rpartition(".")[0])
    ):
        if group is not None and name.rpartition(".")[0] != group:
            lines.append("")
        group = name.rpartition(".")[0]
        mark = "*" if name not in usual or usual[name] != value else " "
        lines.append(f"{mark} {name:<{width}}  {show(value)}".rstrip())
    return "\n".join(lines)


def help_text(config: Any, doc: str) -> str:
    """The text of `--config=… --help`: the docstring, then every field: value, type, meaning."""
    lines = [doc, "", "Fields (set with --name=value; the value shown is this config's):"]
    group = None
    for field in fields(config):
        if field.name.rpartition(".")[0] != group:
            group = field.name.rpartition(".")[0]
            lines.append("")
        kind = type_name(field.hint) if field.settable else "set in the config file"
        lines.append(f"  --{field.name} = {show(to_dict(field.value))}   ({kind})")
        lines += textwrap.wrap(
            field.meaning or _NO_MEANING, 96, initial_indent=" " * 8, subsequent_indent=" " * 8
        )
    return "\n".join(lines)


def show(value: Any) -> str:
    """A value on one line, with control characters escaped."""
    if isinstance(value, str):
        return repr(value)
    if isinstance(value, list):
        return "[" + ", ".join(map(show, value)) + "]"
    return " ".join(str(value).split())
