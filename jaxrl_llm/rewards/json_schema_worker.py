# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Judges JSON by a schema, in a worker process: imports little, for it starts often."""

from __future__ import annotations

import functools
import json
import math
from typing import Any


def judge(request: bytes) -> bytes:
    """Whether the text allows the schema of `[schema, text]`: b"true" or b"false".

    Raises:
        ValueError: the schema refers to something outside itself.
    """
    from referencing.exceptions import Unresolvable

    schema, text = json.loads(request)
    try:
        value = json.loads(
            text, object_pairs_hook=_object, parse_constant=_refuse, parse_float=_finite
        )
        return b"true" if validator(json.dumps(schema)).is_valid(value) else b"false"
    except Unresolvable as error:
        raise ValueError(f"Unresolvable: {error}") from None
    except Exception:  # numbers too large for a float, nested too deep, …: all of the text's making
        return b"false"


@functools.lru_cache(maxsize=256)
def validator(schema: str) -> Any:
    """A validator for a schema, given as JSON.

    Raises:
        ValueError: it is no schema.
    """
    import jsonschema
    import referencing

    value = json.loads(schema)
    kind = jsonschema.validators.validator_for(value, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(value)
    except jsonschema.SchemaError as error:
        raise ValueError(f"not a JSON schema: {error.message}") from None
    kind = jsonschema.validators.extend(kind, {"uniqueItems": _unique_items})
    return kind(value, registry=referencing.Registry())  # an empty one: nothing is fetched


def _unique_items(validator: Any, unique: Any, items: Any, schema: Any) -> Any:
    """`uniqueItems` in linear time; jsonschema's own compares every two objects."""
    import jsonschema

    if unique and isinstance(items, list) and len(set(map(_hashable, items))) != len(items):
        yield jsonschema.ValidationError("an item occurs twice")


def _hashable(value: Any) -> Any:
    """Equal for equal JSON: 1 is 1.0 and is not true; the keys of an object have no order."""
    if isinstance(value, list):
        return ("array", *map(_hashable, value))
    if isinstance(value, dict):
        return "object", frozenset((key, _hashable(item)) for key, item in value.items())
    return type(value) is bool, value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a key occurs twice")
    return dict(pairs)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number beyond all floats")
    return number
