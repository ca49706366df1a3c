# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Command-line overrides of a config's fields; values are read by tyro, by their field's type."""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import difflib
import io
import math
import typing
from collections.abc import Iterator, Sequence
from typing import Any

import tyro

from jaxrl_llm.config.fields import Field, fields, is_node, nodes, optional_group
from jaxrl_llm.config.text import type_name
from jaxrl_llm.errors import ConfigError

Config = typing.TypeVar("Config")


def apply_overrides(config: Config, args: Sequence[str]) -> Config:
    """The config with fields replaced; values are read by tyro, by the type of their field.

    `--algo.kl_coef=0.01`, `--algo.kl_coef 0.01`, `--algo.kl-coef=0.01` and
    `--config.algo.kl_coef=0.01` mean the same; sequences are `198,2` or `198 2`, booleans `True` or
    `False`. The last of several wins. A field of a group that is None makes the group.
    Every dataclass that is touched is made anew, so that its `__post_init__` validates the result.

    Raises:
        ConfigError: an unknown field, a wrong value, or a combination that a dataclass refuses.
    """
    given = list(_split_args(args))
    config = _with_groups(config, [name for name, _ in given])
    known = {field.name: field for field in fields(config)}
    tree: dict[str, Any] = {}
    for name, values in given:
        if name not in known:
            raise _unknown_field(config, name, known)
        *path, leaf = name.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[leaf] = _parse(known[name], values)
    return _rebuild(config, tree)


def _rebuild(node: Any, changes: dict[str, Any]) -> Any:
    if not changes:
        return node
    values = {}
    for name, change in changes.items():
        value = getattr(node, name)
        values[name] = _rebuild(value, change) if is_node(value) else change
    return dataclasses.replace(node, **values)


def _with_groups(config: Config, names: Sequence[str]) -> Config:
    """Groups that are None and of which a field is set (`--lora.rank=16`), with their defaults.

    Nothing is validated yet: other overrides may be what makes the group fit.
    """
    for field in fields(config):
        group = optional_group(field)
        if group is not None and any(name.startswith(field.name + ".") for name in names):
            config = _put(config, field.name.split("."), group())
    return config


def _put(node: Any, path: Sequence[str], value: Any) -> Any:
    """A copy of a frozen dataclass with one field changed, which is not validated."""
    changed = copy.copy(node)
    if len(path) > 1:
        value = _put(getattr(node, path[0]), path[1:], value)
    object.__setattr__(changed, path[0], value)
    return changed


def _split_args(args: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Group a command line into (dotted name, its values)."""
    index = 0
    while index < len(args):
        flag, equals, value = args[index].partition("=")
        index += 1
        if not flag.startswith("--") or len(flag) == 2:
            raise ConfigError(
                "unexpected argument", got=f"'{flag}{equals}{value}'", expected="--field=value"
            )
        values = [value] if equals else []
        while not equals and index < len(args) and not args[index].startswith("--"):
            values.append(args[index])
            index += 1
        yield flag[2:].replace("-", "_").removeprefix("config."), values


def _unknown_field(config: Any, name: str, known: dict[str, Field]) -> ConfigError:
    sections = [section for section, _ in nodes(config) if section]
    if name in sections:
        inside = [field for field in known if field.startswith(name + ".")]
        return ConfigError(
            f"config field '{name}' is a group", expected="one of its fields: " + ", ".join(inside)
        )
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    if not close:  # the right field in the wrong group, or without its group
        close = [field for field in known if field.rsplit(".", 1)[-1] == name.rsplit(".", 1)[-1]][
            :1
        ]
    if not close:
        leaves = {field.rsplit(".", 1)[-1]: field for field in reversed(known)}
        near = difflib.get_close_matches(name.rsplit(".", 1)[-1], leaves, n=1, cutoff=0.7)
        close = [leaves[leaf] for leaf in near]
    what = f"unknown config field '{name}'"
    if close:
        return ConfigError(f"{what}. Did you mean {close[0]}?")
    return ConfigError(what, hint="--help lists every field")


def _parse(field: Field, values: list[str]) -> Any:
    """The value of a field from its words on the command line."""
    expected = type_name(field.hint)
    if not field.settable:
        raise ConfigError(
            f"config field '{field.name}' is chosen in the config file, not on the command line",
            got=" ".join(values),
            hint="copy the config file and change it there",
        )
    if not values:
        raise ConfigError(
            f"config field '{field.name}' has no value",
            expected=expected,
            hint=f"--{field.name}=VALUE",
        )
    parsed = _read_words(field.hint, _words(field.hint, values))
    if parsed is None or _has_nan(parsed[0]):
        raise ConfigError(
            f"config field '{field.name}' has the wrong type",
            got=f"'{' '.join(values)}'",
            expected=expected,
        )
    return parsed[0]


def _words(hint: Any, values: list[str]) -> list[str]:
    """The words that tyro reads: "198,2" and "(198, 2)" are two, "true" is "True"."""
    if len(values) != 1 or values[0] == "None":
        return values
    text = values[0]
    if _is_sequence(hint):
        inside = text.strip()
        if inside[:1] + inside[-1:] in ("()", "[]"):
            # As configs are printed: with quotes, nested, or bare words.
            with contextlib.suppress(ValueError, SyntaxError):
                return [str(item) for item in _flat(ast.literal_eval(inside))]
            text = inside[1:-1]
        # Blanks around numbers mean nothing; in a text they may be all of it, as in a newline.
        words = (text if _holds_text(hint) else text.replace(" ", "")).split(",")
        return words if any(words) else []
    if bool in (hint, *typing.get_args(hint)) and text.strip().lower() in ("true", "false"):
        return [text.strip().capitalize()]
    return values


def _flat(value: Any) -> list[Any]:
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in _flat(item)]
    return [value]


def _holds_text(hint: Any) -> bool:
    return hint is str or any(map(_holds_text, typing.get_args(hint)))


def _has_nan(value: Any) -> bool:
    """No setting is NaN, and every comparison in a validation lets it pass."""
    items = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(item, float) and math.isnan(item) for item in items)


def _is_sequence(hint: Any) -> bool:
    origins = {typing.get_origin(arg) or arg for arg in (hint, *typing.get_args(hint))}
    return bool(origins & {tuple, list})


def _read_words(hint: Any, words: list[str]) -> tuple[Any] | None:
    """tyro's reading of the words as a value of this type, in a tuple; None where it refuses."""
    box = dataclasses.make_dataclass("Box", [("value", hint)], frozen=True)
    # "=" lets a value begin with a dash.
    args = [f"--value={words[0]}"] if len(words) == 1 else ["--value", *words]
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        try:
            boxed = tyro.cli(
                box,
                args=args,
                console_outputs=False,
                add_help=False,
                config=(tyro.conf.FlagConversionOff,),
            )
        except SystemExit:
            return None
    return (boxed.value,)
