# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""An inequality of one variable as the interval that it says: `1 < x ≤ 2` is (1, 2]."""

from __future__ import annotations

import re

_VARIABLE = re.compile(r"[A-Za-z](?:_(?:\{\w+\}|\w))?")
_INTERVAL = re.compile(r"(?:[A-Za-z]\s*(?:\\in(?![A-Za-z])|∈)\s*)?[(\[].*[)\]]", re.DOTALL)


def as_intervals(
    chains: list[tuple[list[str], list[str]]], texts: tuple[str, str]
) -> tuple[str, str] | None:
    """Both answers as intervals where one is an inequality and the other an interval, or None."""
    written = [_INTERVAL.fullmatch(text) is not None for text in texts]
    if written == [False, True]:
        found = _interval(*chains[0])
        return (found, texts[1]) if found else None
    if written == [True, False]:
        found = _interval(*chains[1])
        return (texts[0], found) if found else None
    return None


def _interval(parts: list[str], signs: list[str]) -> str | None:
    parts = [part.strip() for part in parts]
    if signs and all(sign in (">", "≥") for sign in signs):
        parts, signs = parts[::-1], [{">": "<", "≥": "≤"}[sign] for sign in reversed(signs)]
    if not signs or not all(sign in ("<", "≤") for sign in signs):
        return None
    opening, closing = ["(" if sign == "<" else "[" for sign in signs], {"<": ")", "≤": "]"}
    if len(parts) == 3 and _VARIABLE.fullmatch(parts[1]):
        return f"{opening[0]}{parts[0]},{parts[2]}{closing[signs[1]]}"
    if len(parts) == 2 and _VARIABLE.fullmatch(parts[0]) and not _VARIABLE.fullmatch(parts[1]):
        return f"(-\\infty,{parts[1]}{closing[signs[0]]}"
    if len(parts) == 2 and _VARIABLE.fullmatch(parts[1]) and not _VARIABLE.fullmatch(parts[0]):
        return f"{opening[0]}{parts[0]},\\infty)"
    return None
