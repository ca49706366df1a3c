# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Which letter of a multiple choice an answer names: one letter, and no list of guesses."""

from __future__ import annotations

import re
import unicodedata

_LETTER = re.compile(
    r"(?:\\(?:text(?:bf|it|rm)?|mathrm|mathbf)\{)?\s*"
    r"(?:\((?P<bracketed>[A-Za-z])\)|(?P<bare>[A-Za-z])(?![A-Za-z]))"
    r"\s*\}?\s*(?P<mark>[.:)]?)\s*(?P<rest>.*)",
    re.DOTALL,
)
_IN_BRACKETS = re.compile(r"\([A-Za-z]\)|\[[A-Za-z]\]|\{[A-Za-z]\}")
_ALONE = re.compile(r"(?<![A-Za-z'’])[A-Ja-j](?![A-Za-z])")
_CAPITAL_SET_OFF = re.compile(r"(?<![A-Za-z])[A-Z](?![A-Za-z])(?=\s*(?:[.:)?!]|$|,|or\b|and\b))")
_LETTERS_RUN_TOGETHER = re.compile(r"[A-E]{2,5}[.?!]?")
# `a cat` and `I was` are words of a text; `a, c` and `a or c` are letters.
_JOINING = r"(?:or|and|but|maybe|perhaps|possibly|if|not|nor|also|plus|then|else|too)\b"
_ARTICLE = re.compile(rf"[Aa]\s+(?!{_JOINING})[A-Za-z]{{2,}}|I(?:\s+|['’])(?!{_JOINING})[a-z]+")
_WITH_UNIT = re.compile(r"[0-9]\s*(?:°\s*[CF]|[gh])\b")
_ANOTHER_GUESS = re.compile(
    r"[,;/?&|+-]|\\(?:text\s*\{\s*)?(?:or|and|vee|lor|land)\b|(?:\\text\s*\{\s*)?" + _JOINING,
    re.IGNORECASE,
)


def chosen_letter(text: str) -> str | None:
    """The one letter that a text chooses, as a capital; None where it chooses none or several.

    `B`, `(B)`, `B.` and `(B) its text` choose B. Its text may hold no further letter that could be
    a choice, and may not go on from the letter as a guess would: `(B) or 34`.
    """
    text = unicodedata.normalize("NFKC", text).strip()
    match = _LETTER.fullmatch(text)
    if match is None:
        return None
    rest = _WITH_UNIT.sub(" 0", match["rest"].strip())
    # A bare letter with text after it must be set off from it: `B: text`, not `A cat`.
    if rest and not match["bracketed"] and not match["mark"]:
        return None
    if _ANOTHER_GUESS.match(rest) and not re.match(r"-\s*[0-9.\\]", rest):
        return None
    if _IN_BRACKETS.search(rest) or _CAPITAL_SET_OFF.search(rest):
        return None
    if _LETTERS_RUN_TOGETHER.fullmatch(rest):
        return None
    words = _ARTICLE.sub(" ", rest)
    if _ALONE.search(words):
        return None
    return (match["bracketed"] or match["bare"]).upper()
