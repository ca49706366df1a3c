# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Paths as users write them, and files as strangers wrote them."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from jaxrl_llm.errors import ModelError


def user_path(name: str | pathlib.Path) -> pathlib.Path | None:
    """The path, its `~` resolved; None for what can't be one on this machine.

    Too long a name, a user that doesn't exist, a null character or a closed folder can't.
    """
    try:
        path = pathlib.Path(name).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (OSError, ValueError, RuntimeError):
        return None
    return path


def settled_path(name: str) -> str:
    """The absolute path of a file or folder on this machine; any other name as it is."""
    path = user_path(name) if name else None
    return str(path.absolute()) if path is not None and path.exists() else name


def read_text(path: pathlib.Path) -> str:
    """The text of a file in UTF-8.

    Raises:
        ModelError: it can't be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(
            f"{path} is not a text in UTF-8", got=f"{error.reason} at byte {error.start}"
        ) from error
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror or error}") from error


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file; empty when there is no such file.

    Raises:
        ModelError: the file is not JSON, or not an object.
    """
    if not path.is_file():
        return {}
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object", got=type(value).__name__)
    return value
