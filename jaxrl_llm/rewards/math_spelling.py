# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""One spelling for signs that LaTeX and people write in several ways."""

from __future__ import annotations

import re

_SPELLINGS = [
    (re.compile(pattern), spelling)
    for pattern, spelling in (
        (r"\\(le|ge)qslant(?![A-Za-z])", r"\\\1q"),
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (r"\\varnothing(?![A-Za-z])|∅", r"\\emptyset"),
        (r"^\s*\\\{\s*\\\}\s*$", r"\\emptyset"),
        (r"(?<=[0-9])_\{([0-9])\}", r"_\1"),
        ("½", r"\\frac12"),
        (r"(?<=\.)([0-9]*)\\dot\{([0-9])\}$", r"\1\\overline{\2}"),
        (r"^\s*-\s*\(\s*-\s*([0-9]+(?:\.[0-9]+)?)\s*\)\s*$", r"\1"),
        # 34th, with its ending raised
        (r"(?<=[0-9])\s*\^\s*\{\s*\\(?:text|mathrm)\{\s*(?:st|nd|rd|th)\s*\}\s*\}$", ""),
    )
]


def one_spelling(text: str) -> str:
    """The text with each of these signs in one spelling; a lone -(-34) as 34."""
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    return text
