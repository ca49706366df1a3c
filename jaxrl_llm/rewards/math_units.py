# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Tells an answer from its unit: a percent sign, degrees, a currency, or a word after a number."""

from __future__ import annotations

import re

_PERCENT = re.compile(r"\s*(?:\\%|%|\\text\{\s*(?:\\?%|percent)\s*\}|\bpercent)$")
_DEGREES = re.compile(r"\^?\s*\{?\s*(?:\\circ|\\degree|°)\s*\}?")
_CURRENCY = re.compile(r"^(-?)\s*(?:\\\$|\$|€|£|\\pounds|\\text\{\\\$\})\s*")
_CURRENCY_WORDS = ("dollar", "dollars", "usd", "euro", "euros", "pounds")
_UNIT_WORD = r"[A-Za-z]+\.?(?:\^?\{?-?[0-9]\}?)?"
_UNIT = re.compile(rf"\s*{_UNIT_WORD}(?:\s*[\s/·*]\s*{_UNIT_WORD}){{0,3}}\s*")
_TEXT_AT_END = re.compile(
    r"\s*\\(?:text|mathrm|mbox|textrm|rm)\s*\{([^{}]*)\}\s*(\^\s*\{?-?[0-9]\}?)?$"
)
_WORDS_AT_END = re.compile(r"\s*(?<![A-Za-z\\])([A-Za-z][A-Za-z /·*.^0-9{}-]*)()$")
_A_NUMBER = re.compile(r"(?:[0-9.,\s{}/^+-]|\\(?:frac|sqrt|pi|times|cdot)(?![A-Za-z])|π)+")
_SHORT_UNITS = frozenset(
    re.findall(
        "[A-Za-z]+",
        "m cm mm km g kg mg s ms h hr L l mL ml in ft yd mi lb oz N J W V A Hz Pa K C F am pm",
    )
)
_NO_UNIT = frozenset(re.findall("[a-z]+", "or and not if maybe either possibly perhaps but is"))


def without_unit(text: str) -> tuple[str, str]:
    """An answer without its unit, and the unit; "" where there is none, or a currency.

    A unit is text in LaTeX after anything, or words of three letters, or well-known shorter ones,
    after a
    number: the x of `2 x` is none.
    """
    text = text.strip()
    if match := _PERCENT.search(text):
        return text[: match.start()], "%"
    if _DEGREES.search(text) and not re.search(r"\\(?:sin|cos|tan)", text):
        return _DEGREES.sub("", text), "degrees"
    if match := _CURRENCY.match(text):
        return without_unit(match[1] + text[match.end() :])
    match = _TEXT_AT_END.search(text)
    if match is None:
        match = _WORDS_AT_END.search(text)
        if match and not (_A_NUMBER.fullmatch(text[: match.start()]) and _is_unit(match[1])):
            match = None
    if match is None or not _UNIT.fullmatch(match[1]) or not text[: match.start()].strip():
        return text, ""
    words = " ".join(match[1].rstrip(". ").casefold().split())
    if _NO_UNIT & set(words.split()):
        return text, ""
    unit = words + re.sub(r"[\s{}]", "", match[2] or "")
    if unit in _CURRENCY_WORDS:
        unit = ""
    return text[: match.start()], "degrees" if unit == "degree" else unit


def _is_unit(text: str) -> bool:
    return all(len(word) > 2 or word in _SHORT_UNITS for word in re.findall(r"[A-Za-z]+", text))
