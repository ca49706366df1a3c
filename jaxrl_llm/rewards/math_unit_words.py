# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Which words after a number are its unit, and which of them are the same unit."""

from __future__ import annotations

import re

# The first of a line is what the others are the same as. Short ones are told apart by case.
_NAMES = """
m meter metre; cm centimeter centimetre; mm millimeter millimetre; km kilometer kilometre
g gram; kg kilogram; mg milligram; s sec second; ms millisecond; min minute; h hr hour; day
L l liter litre; mL ml milliliter millilitre; in inch inches; ft foot feet; yd yard; mi mile
lb lbs pound; oz ounce; N newton; J joule; W watt; V volt; A ampere amp; Hz hertz; Pa pascal
K kelvin; C celsius; F fahrenheit; am; pm; week; month months; year yr; century centuries; decade
gallon gal; quart; pint; cup; ton tonne; acre; hectare; rad radian; degree; unit; mol mole; cent
$ dollar usd; € euro eur; £ gbp; people; person; men; women; children; mice; sheep; fish; deer
th; st; nd; rd; time; way; apple; student; year-old
"""
_CANONICAL = {
    name: group.split()[0] for group in re.split(r"[;\n]", _NAMES) for name in group.split()
}
_NUMBERS = tuple(
    re.findall(
        "[a-z]+",
        "eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty thirty"
        " forty fifty sixty seventy eighty ninety hundred thousand million billion trillion dozen",
    )
)
_CHANGES_THE_NUMBER = frozenset(
    re.findall(
        "[a-z]+",
        "zero one two three four five six seven eight nine ten half third quarter fourth fifth"
        " sixth seventh eighth ninth tenth halves pair couple score gross squared cubed factorial"
        " minus plus negative positive over divided by of less more point root sqrt power"
        " double triple twice inverse reciprocal percent or and not if maybe either possibly"
        " perhaps but is wrong except without e x i",
    )
)
_NOT_THINGS = frozenset(
    re.findall(
        "[a-z]+",
        "guess guesses does this thus always sometimes others unless answers was has yes logs"
        " powers inverses multiples factors",
    )
)


def changes_the_number(words: str) -> bool:
    """Whether any word is a number, an operator or a doubt: 34 dozen, 34 squared, 34 maybe."""
    found = re.findall(r"[a-z]+", words.casefold())
    return "times" in found[:-1] or any(
        {word, word.removesuffix("s")} & _CHANGES_THE_NUMBER or word.startswith(_NUMBERS)
        for word in found
    )


def canonical(words: str) -> str:
    """A unit as it is compared: `square meters` and `m^2` are one."""
    words = re.sub(r"\s*[/]\s*", " per ", words.strip())
    words = re.sub(r"\bmph\b", "mi per h", words)
    words = re.sub(r"\b(?:square|sq)\.?\s+([A-Za-z]+)", r"\1^2", words)
    words = re.sub(r"\b(?:cubic|cu)\.?\s+([A-Za-z]+)", r"\1^3", words)
    return " ".join(_one(word) for word in re.sub(r"[{}.]", "", words).split())


def _one(word: str) -> str:
    name, mark, exponent = word.partition("^")
    return _name(name) + mark + exponent


def _name(name: str) -> str:
    small = name.casefold()
    for form in (name, small, small.removesuffix("s")):
        if form in _CANONICAL and (form == name or len(small) > 2):
            return _CANONICAL[form]
    return small.removesuffix("s")


def is_known(words: str) -> bool:
    """Whether words can only be a unit: of a table, or one plain noun of many things.

    Anything else may say that the number is another: `34 squared`, `35 wrong`.
    """
    if changes_the_number(words) or words.strip() == "K":  # kelvin, or thousands?
        return False
    known = set(_CANONICAL.values()) | {"per"}
    parts = [re.sub(r"\^.*", "", part) for part in canonical(words).split()]
    if parts and parts[0] != "per" and parts[-1] != "per" and all(part in known for part in parts):
        return True
    plural = re.fullmatch(r"[a-z]{3,}(?<![su])s", words.strip()) is not None
    return plural and words.strip() not in _NOT_THINGS and not words.strip().endswith("ths")
