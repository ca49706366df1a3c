# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Find, load, override, validate and print a config; no trainer is known here.

A config file is Python: a docstring and `get_config()`, which returns nested frozen dataclasses.
Fields have dotted names (`algo.kl_coef`); whatever is wrong becomes one `ConfigError`, never a
traceback.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import difflib
import importlib.util
import inspect
import pathlib
import re
import sys
import traceback
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from jaxrl_llm.config.fields import PLAIN, Field, fields, is_node, nodes
from jaxrl_llm.config.overrides import apply_overrides
from jaxrl_llm.config.text import diff, flatten, help_text, print_config, show, to_dict, type_name
from jaxrl_llm.errors import ConfigError, UserError

__all__ = [
    "Field", "apply_overrides", "diff", "fields", "find_config", "flatten", "help_text",
    "load_config", "packaged_configs", "print_config", "to_dict", "type_name",
]  # fmt: skip

# --- finding ------------------------------------------------------------------------------------


def packaged_configs() -> pathlib.Path | None:
    """The folder of the configs that are shipped: inside a wheel, or beside a checkout."""
    package = pathlib.Path(__file__).resolve().parents[1]
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
                got=show(field.value),
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
    if not is_node(config):
        raise ConfigError(
            f"{where}: get_config() must return a dataclass",
            got=show(config),
            expected="a frozen dataclass",
        )
    for name, node in nodes(config):
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
    if isinstance(kind, type) and (issubclass(kind, PLAIN) or dataclasses.is_dataclass(kind)):
        return isinstance(value, kind)
    return True
