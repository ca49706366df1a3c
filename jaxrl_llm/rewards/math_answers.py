# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Compares two mathematical answers as a strict teacher would: form first, then value.

Documented choices, where teachers differ:
- A fraction need not be reduced: 2/4 is 1/2. Decimals are exact: 0.33 is not 1/3.
- Where the right answer is a rational number, a sum, product or function of numbers is an
unfinished
  answer: 17·2 is not 34. One power or root is finished: 2^{10} is 1024; so is 3·10^8.
- 50% is 0.5. It is also 50, as many data sets drop the sign, unless the right answer is 1 or below.
- A unit, degree or currency sign may be left out or added; two different units are two answers.
- Text is compared without case, punctuation at its end and fonts.
- Answers without brackets, separated by commas, "and" or "or", are a set; so is ±a.
"""

from __future__ import annotations

import json
import math
import re

from jaxrl_llm.rewards.math_choices import chosen_letter
from jaxrl_llm.rewards.math_equality import equal, proportional
from jaxrl_llm.rewards.math_intervals import as_intervals
from jaxrl_llm.rewards.math_parser import NotMathematics, parse
from jaxrl_llm.rewards.math_spelling import one_spelling
from jaxrl_llm.rewards.math_units import without_unit

_MOST_CHARACTERS = 2000
_MOST_PARTS = 64
_MOST_DEPTH = 20
_TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|normal|sf|tt)?|mbox|mathrm|mathbf|mathit|boldsymbol)\s*\{([^{}]*)\}"
)
_CHOICE = re.compile(r"\(?([A-J])\)?[.:)]?")
_VARIABLE = re.compile(r"\\?[A-Za-z]+(?:_(?:\{\w+\}|\w))?(?:\s*\(\s*[A-Za-z]\s*\))?")
_MATRIX = re.compile(r"\\begin\{([pbv]?matrix)\}(.*?)\\end\{\1\}", re.DOTALL)
_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_CLOCK = re.compile(r"([0-9]{1,2}):([0-5][0-9])")
_CLOCK_OR_RATIO = re.compile(r"[0-9]+\s*:\s*[0-9]+")
_RELATION = re.compile(r"\\(?:leq?|geq?|neq?|lt|gt)(?![A-Za-z])|[<>≤≥≠]=?")
_RELATIONS = {"\\leq": "≤", "\\le": "≤", "<=": "≤", "\\geq": "≥", "\\ge": "≥", ">=": "≥"}
_RELATIONS |= {"\\neq": "≠", "\\ne": "≠", "\\lt": "<", "\\gt": ">"}
# What a number is said to be: `m + n`, an angle; not `x + x`, which is an equation to be solved.
_SUM_OF_LETTERS = re.compile(r"[a-z](?:\s*\+\s*[a-z])+")
_ANGLE = re.compile(r"\\angle\s*[A-Z]{1,3}")
_MIRRORED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤", "≠": "≠"}
_SEPARATING_WORDS = re.compile(
    r"\s*(?:,\s*)?\b(?:or|and)\b\s*|\\(?:lor|vee|land|wedge|quad\s*\\?text)\b"
)
_ATOMIC = re.compile(
    r"""[+-]?\s*(?:
      [0-9]*\.?[0-9]+ | [0-9]+\.[0-9]*\\overline\{[0-9]+\}
    | [0-9]+\s*\\frac\s*(?:\{[0-9]+\}\s*\{[0-9]+\}|[0-9]\s*[0-9]) | [0-9]+\s+[0-9]+\s*/\s*[0-9]+
    | \\frac\s*(?:\{\s*[+-]?[0-9.]+\s*\}|[0-9])\s*(?:\{\s*[+-]?[0-9.]+\s*\}|[0-9])
    | [0-9.]+\s*[/:]\s*-?[0-9.]+
    | \(?[+-]?[0-9.]+\)?\s*\^\s*(?:\{\s*[+-]?[0-9]+\s*\}|[0-9])
    | \\sqrt\s*(?:\[[0-9]+\])?\s*(?:\{\s*-?[0-9.]+\s*\}|[0-9]) | sqrt\(\s*[0-9.]+\s*\)
    | [0-9.]+\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{\s*[+-]?[0-9]+\s*\}|[0-9])
    )\s*""",
    re.VERBOSE,
)


def same_mathematics(stated: str, right: str) -> bool:
    """Whether a stated answer is the right one; see the module for what counts as the same.

    Answers of more than 2,000 characters are compared as text.
    """
    if max(len(stated), len(right)) > _MOST_CHARACTERS:
        return _plain(stated) == _plain(right)
    try:
        return _same(_clean(stated), _clean(right), 0)
    except (NotMathematics, RecursionError):
        return False


def compare(request: bytes) -> bytes:
    """What a worker is asked: `[stated, right]` as JSON → `true` or `false`."""
    return json.dumps(same_mathematics(*json.loads(request))).encode()


# ----------------------------------------------------------------------------
# Form
# ----------------------------------------------------------------------------


def _clean(text: str) -> str:
    text = text.strip()
    for command in ("\\left", "\\right", "\\displaystyle", "\\limits"):
        text = re.sub(re.escape(command) + r"(?![A-Za-z])", "", text)
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("−", "-")
    text = re.sub(r"(?<!\\)\\[!,;:> ]|~|\\q?quad(?![A-Za-z])", " ", text)
    text = one_spelling(text)
    text = text.replace("{,}", ",") if re.search(r"[0-9]\{,\}[0-9]{3}", text) else text
    if re.fullmatch(r"[+-]?[0-9]{1,3}(?: [0-9]{3})+", text.strip()):
        text = text.replace(" ", "")
    if text.startswith("$") and text.endswith("$") and len(text) > 2:
        text = text.strip("$")
    text = text.strip()
    while text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    return text.strip()


def _same(stated: str, right: str, depth: int) -> bool:
    if depth > _MOST_DEPTH:
        raise NotMathematics("too deep")
    if not stated or not right:
        return False
    if _plain(stated) == _plain(right):
        return True
    for rule in (_choices, _texts, _matrices, _sets_of_answers, _unions, _bracketed, _relations):
        verdict = rule(stated, right, depth)
        if verdict is not None:
            return verdict
    return _values(stated, right)


def _plain(text: str) -> str:
    return re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", _TEXT.sub(r"\1", text))


def _choices(stated: str, right: str, depth: int) -> bool | None:
    """The right answer is one of A to J: that letter alone, or set off from its text."""
    wanted = _CHOICE.fullmatch(_TEXT.sub(r"\1", right).strip())
    if wanted is None:
        return None
    return chosen_letter(_TEXT.sub(r"\1", stated)) == wanted[1]


def _texts(stated: str, right: str, depth: int) -> bool | None:
    """Words: letters and spaces, written as text or three letters and longer."""
    words = [_words(text) for text in (stated, right)]
    if all(re.fullmatch("[A-Z]{2}", _plain(text)) for text in (stated, right)):
        return False  # a name, as of a line: AB is not BA
    if words[1] is None:
        return None
    return words[0] == words[1]


def _words(text: str) -> str | None:
    plain = _TEXT.sub(r" \1 ", text).strip().rstrip(".!")
    is_words = re.fullmatch(r"[A-Za-z][A-Za-z' -]*", plain) is not None
    long = re.search(r"[A-Za-z]{3}", plain) is not None or "\\text" in text
    return " ".join(plain.split()).casefold() if is_words and long else None


def _matrices(stated: str, right: str, depth: int) -> bool | None:
    matrices = [_MATRIX.fullmatch(text) for text in (stated, right)]
    if matrices == [None, None]:
        return None
    if None in matrices or (matrices[0][1] == "vmatrix") != (matrices[1][1] == "vmatrix"):
        return False
    rows = [
        [
            row.split("&")
            for row in re.split(r"\\\\(?:\[[^\]]*\])?", match[2].strip().removesuffix("\\\\"))
        ]
        for match in matrices
    ]
    if [len(row) for row in rows[0]] != [len(row) for row in rows[1]]:
        return False
    if sum(len(row) for row in rows[1]) > _MOST_PARTS:
        return False
    return all(
        _same(_clean(a), _clean(b), depth + 1)
        for left, other in zip(*rows, strict=True)
        for a, b in zip(left, other, strict=True)
    )


def _sets_of_answers(stated: str, right: str, depth: int) -> bool | None:
    """Several answers side by side, or in the braces of a set: as many, in any order."""
    sets = [_answers(text) for text in (stated, right)]
    if all(len(answers) == 1 and not braced for answers, braced in sets):
        return None
    (left, left_braced), (other, other_braced) = sets
    if left_braced and other_braced:  # a set holds nothing twice
        left, other = (list({_plain(one): one for one in part}.values()) for part in (left, other))
    if len(left) != len(other) or len(other) > _MOST_PARTS:
        return False
    if left_braced != other_braced and len(other) == 1:
        return False  # {3} is not 3
    remaining = list(other)
    for answer in left:
        match = next((one for one in remaining if _same(answer, one, depth + 1)), None)
        if match is None:
            return False
        remaining.remove(match)
    return True


def _answers(text: str) -> tuple[list[str], bool]:
    """The answers that a text gives, and whether they stand in the braces of a set."""
    if _THOUSANDS.fullmatch(without_unit(text)[0].replace("{,}", ",")):
        return [text], False
    braced = text.startswith("\\{") and text.endswith("\\}") and _closes(text, 0) == len(text) - 2
    inside = text[2:-2] if braced else text
    answers = [
        _clean(part)
        for piece in _split(_SEPARATING_WORDS.sub(", ", _unwrapped_separators(inside)), ",")
        for part in _plus_or_minus(piece)
    ]
    answers = [answer for answer in answers if answer] if braced else answers
    return answers, braced


def _unwrapped_separators(text: str) -> str:
    """`\\text{ or }` as a word; other text stays what it is."""
    return re.sub(r"\\(?:text|mbox|mathrm)\s*\{\s*(or|and)\s*\}", r" \1 ", text)


def _plus_or_minus(text: str) -> list[str]:
    marks = re.findall(r"\\pm(?![A-Za-z])|±", text)
    if len(marks) != 1:
        return [text]
    if whole := re.fullmatch(r"\s*(-?[0-9]{1,9})\s*(?:\\pm|±)\s*([0-9]{1,9})\s*", text):
        return [str(int(whole[1]) + sign * int(whole[2])) for sign in (1, -1)]
    return [re.sub(r"\\pm(?![A-Za-z])|±", sign, text) for sign in ("+", "-")]


def _split(text: str, separator: str) -> list[str]:
    """Splits outside of all brackets. Half-open intervals make any bracket close any other."""
    parts, depth, start, i = [], 0, 0, 0
    while i < len(text):
        step = 2 if text[i] == "\\" else 1
        token = text[i : i + step]
        if depth == 0 and text.startswith(separator, i):
            parts.append(text[start:i])
            i = start = i + len(separator)
            continue
        depth += (token in ("(", "[", "{", "\\{")) - (token in (")", "]", "}", "\\}"))
        i += step
    return [*parts, text[start:]]


def _closes(text: str, start: int) -> int:
    """Where the bracket that opens at `start` closes; -1 if it does not."""
    depth, i = 0, start
    while i < len(text):
        step = 2 if text[i] == "\\" else 1
        token = text[i : i + step]
        depth += (token in ("(", "[", "{", "\\{")) - (token in (")", "]", "}", "\\}"))
        if depth == 0:
            return i
        i += step
    return -1


def _unions(stated: str, right: str, depth: int) -> bool | None:
    parts = [_split(text.replace("∪", "\\cup"), "\\cup") for text in (stated, right)]
    if [len(part) for part in parts] == [1, 1]:
        return None
    if len(parts[0]) != len(parts[1]) or len(parts[1]) > _MOST_PARTS:
        return False
    remaining = [_clean(part) for part in parts[1]]
    for part in map(_clean, parts[0]):
        match = next((one for one in remaining if _same(part, one, depth + 1)), None)
        if match is None:
            return False
        remaining.remove(match)
    return True


def _bracketed(stated: str, right: str, depth: int) -> bool | None:
    """Tuples and intervals: the same brackets around the same parts in the same order."""
    if intervals := as_intervals([_chain(text) for text in (stated, right)], (stated, right)):
        stated, right = intervals
    parts = [_parts_in_brackets(text) for text in (stated, right)]
    if parts == [None, None]:
        return None
    if parts[0] is None or parts[1] is None or len(parts[0]) != len(parts[1]):
        return False
    (first, *left, last), (other_first, *other, other_last) = parts
    if (first, last) != (other_first, other_last) or len(other) > _MOST_PARTS:
        return False
    return all(_same(a, b, depth + 1) for a, b in zip(left, other, strict=True))


def _parts_in_brackets(text: str) -> list[str] | None:
    text = re.sub(r"^[A-Za-z]\s*(?:\\in(?![A-Za-z])|=|∈)\s*(?=[(\[])", "", text)
    text = text.replace("\\lbrack", "[").replace("\\rbrack", "]").replace("\\langle", "(")
    text = text.replace("\\rangle", ")")
    if not text or text[0] not in "([" or text[-1] not in ")]" or _closes(text, 0) != len(text) - 1:
        return None
    parts = [_clean(part) for part in _split(text[1:-1], ",")]
    return [text[0], *parts, text[-1]] if len(parts) > 1 else None


def _relations(stated: str, right: str, depth: int) -> bool | None:
    """Inequalities and equations. `x = 34` states 34; a chain of equations states nothing."""
    chains = [_chain(text) for text in (stated, right)]
    if chains[0][1] or chains[1][1]:
        (left, signs), (other, other_signs) = chains
        mirrored = [_MIRRORED[sign] for sign in reversed(signs)]
        for parts, found in ((left, signs), (left[::-1], mirrored)):
            if found == other_signs and len(parts) == len(other):
                pairs = zip(parts, other, strict=True)
                if all(_same(_clean(a), _clean(b), depth + 1) for a, b in pairs):
                    return True
        return False
    sides = [_split(text.replace("\\equiv", "="), "=") for text in (stated, right)]
    if [len(side) for side in sides] == [1, 1]:
        return None
    if max(len(side) for side in sides) > 2:
        return False
    sides = [[_clean(part) for part in side] for side in sides]
    if len(sides[0]) == len(sides[1]) == 2:
        if _plain(sides[0][0]) == _plain(sides[1][0]):
            return _same(sides[0][1], sides[1][1], depth + 1)
        if solved := _solved(sides[1]):
            found = _solved(sides[0])
            same_variable = found is not None and _plain(found[0]) == _plain(solved[0])
            return same_variable and _same(found[1], solved[1], depth + 1)
        left, other = (parse(side[0]) - parse(side[1]) for side in sides)
        return proportional(left, other)
    for side in sides:
        if len(side) == 2 and not _names_a_value(side[0]):
            return False
    return _same(sides[0][-1], sides[1][-1], depth + 1)


def _names_a_value(text: str) -> bool:
    if _VARIABLE.fullmatch(text) or _ANGLE.fullmatch(text):
        return True
    letters = re.findall("[a-z]", text)
    return _SUM_OF_LETTERS.fullmatch(text) is not None and len(set(letters)) == len(letters)


def _solved(sides: list[str]) -> tuple[str, str] | None:
    """The variable and its value if an equation is solved: `x = 2`, not `y = 2x + 1`.

    Every equation with the root 2 is proportional to `x = 2`, also the one that was to be solved.
    """
    for variable, value in (sides, sides[::-1]):
        if not _VARIABLE.fullmatch(variable):
            continue
        try:
            if not parse(without_unit(value)[0]).free_symbols:
                return variable, value
        except NotMathematics:
            return variable, value  # a set, a pair or words
    return None


def _chain(text: str) -> tuple[list[str], list[str]]:
    signs = [match[0].strip() for match in _RELATION.finditer(text)]
    return _RELATION.split(text), [_RELATIONS.get(sign, sign) for sign in signs]


# ----------------------------------------------------------------------------
# Value
# ----------------------------------------------------------------------------


def _values(stated: str, right: str) -> bool:
    if (clock := _CLOCK.fullmatch(right)) and (
        _CLOCK_OR_RATIO.fullmatch(stated) or math.gcd(int(clock[1]), int(clock[2])) > 1
    ):
        return False  # a time of day is written one way; 2:5 is a ratio
    wanted, wanted_unit = without_unit(right)
    said, said_unit = without_unit(stated, wanted_unit)
    percent = said_unit == "%", wanted_unit == "%"
    units = {said_unit, wanted_unit} - {"", "%"}
    if len(units) > 1 and units != {"lb", "£"}:  # pounds
        return False
    said, wanted = _without_commas(said), _without_commas(wanted)
    value = parse(wanted)
    if value.is_Rational and _ATOMIC.fullmatch(wanted) and not _ATOMIC.fullmatch(_bare(said)):
        return False
    other = parse(said)
    if percent == (True, False):
        return equal(other / 100, value) or (equal(other, value) and bool(abs(value) > 1))
    if percent == (False, True):
        return equal(other, value / 100) or (equal(other, value) and bool(abs(value) > 1))
    return equal(other, value)


def _bare(text: str) -> str:
    """Without brackets around the whole."""
    text = text.strip()
    while text[:1] in ("(", "{") and _closes(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def _without_commas(text: str) -> str:
    text = text.replace("{,}", ",")
    return text.replace(",", "") if _THOUSANDS.fullmatch(text.strip()) else text
