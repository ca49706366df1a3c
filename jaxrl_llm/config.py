# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Find, load, override, validate and print a config; no trainer is known here.

A config file is Python: a docstring and `get_config()`, which returns nested frozen dataclasses.
Fields have dotted names (`algo.kl_coef`); whatever is wrong becomes one `ConfigError`, never a
traceback.
"""

from __future__ import annotations

import ast
import collections.abc
import contextlib
import dataclasses
import difflib
import enum
import functools
import importlib.util
import inspect
import io
import math
import pathlib
import re
import sys
import textwrap
import traceback
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import tyro

from jaxrl_llm.errors import ConfigError, UserError

Config = typing.TypeVar("Config")

_NO_MEANING = "(no description)"
_PLAIN = (bool, int, float, str, pathlib.PurePath, enum.Enum, type(None))


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


# --- finding ------------------------------------------------------------------------------------


def packaged_configs() -> pathlib.Path | None:
    """The folder of the configs that are shipped: inside a wheel, or beside a checkout."""
    package = pathlib.Path(__file__).resolve().parent
    if (package / "configs").is_dir():
        return package / "configs"
    if (package.parent / "pyproject.toml").is_file() and (package.parent / "configs").is_dir():
        return package.parent / "configs"
    return None


def find_config(name: str) -> pathlib.Path:
    """The file of a config: sought in the working directory, in `./configs`, in the package's.

    The ending ".py" may be left out.

    Raises:
        ConfigError: there is no such file; names the ones that exist.
    """
    folders = [pathlib.Path.cwd(), pathlib.Path.cwd() / "configs"]
    shipped = packaged_configs()
    if shipped is not None:
        folders.append(shipped)
    names = [name, f"{name}.py"] if name else []
    for folder in folders:
        for candidate in names:
            # "configs/grpo.py" also means the package's own, from whatever folder it is started.
            for part in (candidate, candidate.removeprefix("configs/")):
                if (folder / part).is_file():
                    return (folder / part).resolve()
    here = {path.name for folder in folders[1:] for path in folder.glob("*.py")}
    available = sorted(stem for stem in here if not stem.startswith("_"))
    near = difflib.get_close_matches(pathlib.PurePath(name).stem + ".py", available, n=1)
    raise ConfigError(
        f"no config file '{name}'" + (f". Did you mean {near[0]}?" if near else ""),
        expected="one of " + ", ".join(available)
        if available
        else "a Python file with get_config()",
        hint="--config=PATH of your own file, or one of the names above",
    )


# --- loading ------------------------------------------------------------------------------------


def load_config(path: str | pathlib.Path) -> tuple[str, Any]:
    """Execute a config file and call its `get_config()`.

    The file's folder is importable, so that it may import a reward that lies beside it.

    Returns:
        The file's docstring, and the config: nested frozen dataclasses.

    Raises:
        ConfigError: the file can't be read or run (tells file:line), or returns something else.
    """
    path = pathlib.Path(path).resolve()
    # Dataclasses look their module up by name; one name per file, outside every real package.
    name = f"_config_{re.sub(r'[^0-9A-Za-z_]', '_', path.stem)}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError("a config is a Python file", got=path, expected="an existing .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    with _one_line_errors(path):
        spec.loader.exec_module(module)
    get_config = getattr(module, "get_config", None)
    if not callable(get_config):
        raise ConfigError(
            f"{path.name} has no function get_config()", hint="def get_config(): return RLConfig(…)"
        )
    with _one_line_errors(path):
        config = get_config()
    _check_frozen(config, path.name)
    for field in fields(config):
        if not _matches(field.value, field.hint):
            raise ConfigError(
                f"{path.name}: config field '{field.name}' has the wrong type",
                got=_show(field.value),
                expected=type_name(field.hint),
            )
    return inspect.cleandoc(module.__doc__ or ""), config


@contextlib.contextmanager
def _one_line_errors(path: pathlib.Path) -> Iterator[None]:
    """Whatever the file raises becomes one ConfigError with file:line."""
    try:
        yield
    except UserError:
        raise
    except SyntaxError as error:
        where = pathlib.PurePath(error.filename or path).name
        raise ConfigError(f"{where}:{error.lineno}: SyntaxError: {error.msg}") from error
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if pathlib.Path(frame.filename) == path]
        where = f"{path.name}:{lines[-1]}" if lines else path.name
        raise ConfigError(f"{where}: {type(error).__name__}: {error}") from error


def _check_frozen(config: Any, where: str) -> None:
    if not _is_node(config):
        raise ConfigError(
            f"{where}: get_config() must return a dataclass",
            got=_show(config),
            expected="a frozen dataclass",
        )
    for name, node in _nodes(config):
        if not type(node).__dataclass_params__.frozen:
            raise ConfigError(
                f"{where}: {type(node).__name__}"
                + (f" (field '{name}')" if name else "")
                + " is not frozen",
                expected="@dataclasses.dataclass(frozen=True)",
            )


def _matches(value: Any, hint: Any) -> bool:
    """Whether a value fits its annotation; annotations we do not know let everything pass."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _matches(value, args[0])
    if origin in (typing.Union, types.UnionType):
        return any(_matches(value, arg) for arg in args)
    if origin is Literal:
        return any(value == arg and type(value) is type(arg) for arg in args)
    if origin is tuple and args:
        if not isinstance(value, tuple):
            return False
        if args[-1] is Ellipsis:
            return all(_matches(item, args[0]) for item in value)
        return len(value) == len(args) and all(map(_matches, value, args))
    if hint is None:
        return value is None
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is collections.abc.Callable or origin is collections.abc.Callable:
        return callable(value)
    kind = origin or hint
    if isinstance(kind, type) and (issubclass(kind, _PLAIN) or dataclasses.is_dataclass(kind)):
        return isinstance(value, kind)
    return True


# --- walking ------------------------------------------------------------------------------------


def _is_node(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _nodes(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dataclass in the config with its dotted name, the root ("") first."""
    yield prefix, config
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if _is_node(value):
            yield from _nodes(value, _join(prefix, field.name))


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def fields(config: Any) -> list[Field]:
    """Every leaf of nested dataclasses: those of the root, then group by group."""
    found = []
    for prefix, node in _nodes(config):
        hints, meanings = _hints(type(node)), _meanings(type(node))
        for field in dataclasses.fields(node):
            value, hint = getattr(node, field.name), hints[field.name]
            if not _is_node(value):
                settable = field.init and _settable(hint)
                name = _join(prefix, field.name)
                found.append(Field(name, hint, value, meanings.get(field.name, ""), settable))
    return found


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
    return isinstance(hint, type) and issubclass(hint, _PLAIN)


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


# --- overriding ---------------------------------------------------------------------------------


def apply_overrides(config: Config, args: Sequence[str]) -> Config:
    """The config with fields replaced; values are read by tyro, by the type of their field.

    `--algo.kl_coef=0.01`, `--algo.kl_coef 0.01`, `--algo.kl-coef=0.01` and
    `--config.algo.kl_coef=0.01` mean the same; sequences are `198,2` or `198 2`, booleans `True` or
    `False`. The last of several wins. Every dataclass that is touched is made anew, so that its
    `__post_init__` validates the result.

    Raises:
        ConfigError: an unknown field, a wrong value, or a combination that a dataclass refuses.
    """
    known = {field.name: field for field in fields(config)}
    tree: dict[str, Any] = {}
    for name, values in _split_args(args):
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
        values[name] = _rebuild(value, change) if _is_node(value) else change
    return dataclasses.replace(node, **values)


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
    sections = [section for section, _ in _nodes(config) if section]
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


# --- printing -----------------------------------------------------------------------------------


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
    if _is_node(config):
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
        name = _join(prefix, key)
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
        lines.append(f"{mark} {name:<{width}}  {_show(value)}".rstrip())
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
        lines.append(f"  --{field.name} = {_show(to_dict(field.value))}   ({kind})")
        lines += textwrap.wrap(
            field.meaning or _NO_MEANING, 96, initial_indent=" " * 8, subsequent_indent=" " * 8
        )
    return "\n".join(lines)


def _show(value: Any) -> str:
    """A value on one line, with control characters escaped."""
    if isinstance(value, str):
        return repr(value)
    if isinstance(value, list):
        return "[" + ", ".join(map(_show, value)) + "]"
    return " ".join(str(value).split())
