# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Answer verifiers: only what a completion states as its answer counts.

Two anchors state an answer: a line `Answer: …` and a box `\\boxed{…}`. The last one decides.
Numbers loose in prose earn nothing, and neither does a list of guesses or a chain of equations: the
whole stated text is compared. Completions of a bare `12+7=` have an anchor of their own, their
beginning.
"""

from __future__ import annotations

import decimal
import re
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.types import Rollout

_ANSWER_LINE = re.compile(
    r"^[ \t>#*_`-]*(?:final[ \t]+)?answer[ \t*_`]*[:：](?P<stated>[^\r\n]*)",
    re.IGNORECASE | re.MULTILINE,
)
_BOX = re.compile(r"\\boxed[ \t]*\{")
_BOX_OPENS_LINE = re.compile(r"[ \t*_`$]*(?:\\[(\[])?[ \t]*\\boxed[ \t]*\{")
_BOX_ENDS_LINE = re.compile(r"(?:\\[)\]])?[ \t*_`$.]*$", re.MULTILINE)
_NUMBER = re.compile(r"[+-]?(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:\.[0-9]+)?")
_LEADING = re.compile(r"\A\s*(?P<number>-?[0-9]+)(?!\d)(?![.,]\d)")
_BARE = re.compile(r"\s*-?[0-9]+\s*")


# ----------------------------------------------------------------------------
# A stated answer
# ----------------------------------------------------------------------------


def stated_answer(text: str) -> str | None:
    """What a completion states as its answer, or None.

    The last anchor decides: the last `Answer:` line, as a whole, if no box comes after that line,
    and otherwise the last box. A line that is nothing but one box states what is in the box. A last
    box that is never closed, an empty box and an empty line state nothing, whatever was stated
    before.
    """
    lines = list(_ANSWER_LINE.finditer(text))
    boxes = list(_BOX.finditer(text))
    if lines and (not boxes or boxes[-1].start() < lines[-1].end()):
        stated = _strip_markup(lines[-1]["stated"])
        box = _BOX_OPENS_LINE.match(text, lines[-1].start("stated"))
        inside = _braced(text, box.end()) if box else None
        if inside is not None and _BOX_ENDS_LINE.match(text, box.end() + len(inside) + 1):
            stated = inside
    elif boxes:
        stated = _braced(text, boxes[-1].end())
    else:
        return None
    return stated.strip() or None if stated is not None else None


def _braced(text: str, start: int) -> str | None:
    """The text from `start` to the brace that closes it; None if none does."""
    depth, i = 1, start
    while i < len(text):
        if text[i] == "\\":
            i += 1
        elif text[i] == "{":
            depth += 1
        elif text[i] == "}":
            depth -= 1
            if depth == 0:
                return text[start:i]
        i += 1
    return None


def _strip_markup(text: str) -> str:
    """Without the emphasis, dollar signs and full stop around an answer."""
    text = text.strip().strip("*_`").strip().removesuffix(".").strip("*_`").strip()
    for left, right in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if len(text) > len(left + right) and text.startswith(left) and text.endswith(right):
            return text[len(left) : -len(right)].strip().removesuffix(".")
    return text


def same_answer(stated: str, answer: Any) -> bool:
    """Whether two plain answers are the same: as numbers if both are, otherwise as text.

    Numbers are decimal, with optional sign, thousands separators and decimals, compared exactly:
    34, 34.0, 034 and +34 are one number, 33.999 another. Text is compared without case and with
    runs of white space as one space.
    """
    left, right = _strip_markup(stated), _strip_markup(answer_text(answer))
    if _NUMBER.fullmatch(left) and _NUMBER.fullmatch(right):
        return decimal.Decimal(left.replace(",", "")) == decimal.Decimal(right.replace(",", ""))
    return " ".join(left.split()).casefold() == " ".join(right.split()).casefold()


def answer_text(answer: Any) -> str:
    """A right answer of a data source as text; ValueError unless it is text or a number."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"the answer {answer!r} is neither text nor a number")
    if isinstance(answer, int):
        return str(decimal.Decimal(answer))  # str(int) refuses more than 4300 digits
    return f"{decimal.Decimal(repr(answer)):f}" if isinstance(answer, float) else answer


def anchored_answer(rollouts: Sequence[Rollout]) -> list[float]:
    """1 where the stated answer is `prompt.answer` (see `stated_answer`, `same_answer`), otherwise
    0.
    """
    rewards = []
    for rollout in rollouts:
        stated = stated_answer(rollout.completion)
        rewards.append(float(stated is not None and same_answer(stated, rollout.prompt.answer)))
    return rewards


def states_answer(rollouts: Sequence[Rollout]) -> list[float]:
    """1 where the completion states any answer in the form that `anchored_answer` reads, otherwise
    0.
    """
    return [float(stated_answer(rollout.completion) is not None) for rollout in rollouts]


# ----------------------------------------------------------------------------
# A leading number
# ----------------------------------------------------------------------------


def leading_number(rollouts: Sequence[Rollout]) -> list[float]:
    """1 where the completion begins with the whole number `prompt.answer`, otherwise 0.

    White space may come before it and anything but more digits, or a decimal or thousands part,
    after it: for 79, "79\\n21" is right and "790", "79.5", "79,000" and "is 79" are wrong. Digits
    are 0-9 only; leading zeros do not change a number (079 is 79); a minus sign belongs to it, a
    plus sign does not.
    """
    return [
        float(_leading(rollout.completion) == _canonical(_whole(rollout.prompt.answer)))
        for rollout in rollouts
    ]


def well_formed(rollouts: Sequence[Rollout]) -> list[float]:
    """1 where the completion is one whole number and nothing else, and ended by itself; otherwise
    0.
    """
    return [
        float(r.finish_reason == "stop" and _BARE.fullmatch(r.completion) is not None)
        for r in rollouts
    ]


def _leading(text: str) -> str | None:
    match = _LEADING.match(text)
    return _canonical(match["number"]) if match else None


def _whole(answer: Any) -> str:
    text = answer_text(answer).strip()
    if not re.fullmatch(r"-?[0-9]+", text):
        raise ValueError(f"the answer {answer!r} is not a whole number")
    return text


def _canonical(digits: str) -> str:
    """Compared as text, for a model may write more digits than int() reads."""
    negative, magnitude = digits.startswith("-"), digits.lstrip("-").lstrip("0")
    return ("-" if negative and magnitude else "") + (magnitude or "0")
