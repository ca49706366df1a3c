# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Tells an answer from its unit: a percent sign, degrees, a currency, or a word after a number."""

from __future__ import annotations

import decimal
import re

from jaxrl_llm.rewards.math_unit_words import canonical, changes_the_number, is_known

_PERCENT = re.compile(r"\s*(?:\\%|%|\\text\{\s*(?:\\?%|percent)\s*\}|\bpercent)$")
_DEGREES = re.compile(r"\^?\s*\{?\s*(?:\\circ|\\degree|°)\s*\}?")
_CURRENCY = re.compile(r"^(-?)\s*(?:\\\$|\$|€|£|\\pounds|\\text\{\\\$\})\s*")
_SIGNS = {"€": "€", "£": "£", "\\pounds": "£"}
_POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_MULTIPLIED = re.compile(
    r"((?:[+-]|\\?\$|€|£)*\s*)([0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,20}(?:\.[0-9]{1,20})?)\s*"
    rf"(\\text\s*\{{\s*)?({'|'.join(_POWERS)})(?![A-Za-z])(.*)",
    re.DOTALL,
)
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


def without_unit(text: str, of: str | None = None) -> tuple[str, str]:
    """An answer without its unit, and the unit; "" where there is none.

    A unit is text in LaTeX after anything, or words of three letters, or well-known shorter ones,
    after a number: the x of `2 x` is none. `5 million` is 5000000.

    Args:
        text: the answer.
        of: for a stated answer, the unit of the right one: other words than these must be a known
            unit or one plural noun, or they stay. Whose right answer it is means its words well.
    """
    text = _multiplied(text.strip())
    if match := _PERCENT.search(text):
        return text[: match.start()], "%"
    if _DEGREES.search(text) and not re.search(r"\\(?:sin|cos|tan)", text):
        return _DEGREES.sub("", text), "degree"
    if match := _CURRENCY.match(text):
        rest, unit = without_unit(match[1] + text[match.end() :], of)
        sign = text[match.start() : match.end()].lstrip("-").strip()
        return rest, unit or _SIGNS.get(sign, "$")
    match = _TEXT_AT_END.search(text)
    if match is None:
        match = _WORDS_AT_END.search(text)
        if match and not (_A_NUMBER.fullmatch(text[: match.start()]) and _is_unit(match[1])):
            match = None
    if match is None or not _UNIT.fullmatch(match[1]) or not text[: match.start()].strip():
        return text, ""
    words = match[1].strip().rstrip(". ")
    unit = canonical(words + re.sub(r"[\s{}]", "", match[2] or ""))
    if changes_the_number(words) or not (of is None or unit == of or is_known(words)):
        return text, ""
    return text[: match.start()], unit


def _multiplied(text: str) -> str:
    """`5 million` as 5000000, with whatever stands around it."""
    match = _MULTIPLIED.fullmatch(text)
    if match is None:
        return text
    before, number, opening, word, after = match.groups()
    value = decimal.Decimal(number.replace(",", "")).scaleb(_POWERS[word])
    if opening:
        inside, _, beyond = after.partition("}")
        after = (f"\\text{{{inside}}}" if inside.strip() else "") + beyond
    return _multiplied(f"{before}{value:f}{after}") if value else text


def _is_unit(text: str) -> bool:
    return all(len(word) > 2 or word in _SHORT_UNITS for word in re.findall(r"[A-Za-z]+", text))
