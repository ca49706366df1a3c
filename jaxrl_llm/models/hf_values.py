# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Numbers, flags and objects out of a model's files, each of the right kind and size or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.errors import ModelError

MOST_LAYERS = 4096
_LARGEST, _SMALLEST = 3e38, 1e-37  # what float32 can hold


def whole(value: Any, name: str, source: object, *, least: int = 1, most: int = 2**31 - 1) -> int:
    """An integer from `least` to `most`.

    Raises:
        ModelError: it is none; `name` of `source` is named.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise unusable(value, name, source, f"a whole number from {least} to {most}")
    return value


def real(value: Any, name: str, source: object, *, above: float = 0.0) -> float:
    """A finite number larger than `above`, in the range of float32.

    Raises:
        ModelError: it is none; `name` of `source` is named.
    """
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not max(above, _SMALLEST) < value < _LARGEST:
        raise unusable(value, name, source, f"a number above {above:g}")
    return float(value)


def flag(value: Any, name: str, source: object) -> bool:
    """True or False.

    Raises:
        ModelError: it is neither; `name` of `source` is named.
    """
    if not isinstance(value, bool):
        raise unusable(value, name, source, "true or false")
    return value


def object_or_empty(value: Any, name: str, source: object) -> Mapping[str, Any]:
    """A JSON object; an empty one for null.

    Raises:
        ModelError: it is something else; `name` of `source` is named.
    """
    if value is not None and not isinstance(value, Mapping):
        raise unusable(value, name, source, "an object")
    return value or {}


def unusable(value: Any, name: str, source: object, expected: object = None) -> ModelError:
    """The error for a value that can't be used, which is shown in part if it is long."""
    return ModelError(
        f"{source} has an unusable value of {name}", got=f"{value!r:.100}", expected=expected
    )
