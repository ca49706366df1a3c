# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Writes configs/data/word_problems.jsonl: small word problems in the columns of GSM8K.

    python scripts/make_word_problems.py configs/data/word_problems.jsonl

Made from our own templates, for trying `grpo_gsm8k.py` without a download.
"""

from __future__ import annotations

import json
import pathlib
import random
import sys

NAMES = ("Ana", "Ben", "Chen", "Dora", "Emil", "Fatou", "Goran", "Hana", "Ines", "Jun")
THINGS = ("apples", "books", "coins", "pencils", "stickers", "marbles", "cards", "shells")
TEMPLATES = (
    (
        "{who} has {a} {what} and finds {b} more. Then {who} gives {c} of them to a friend. "
        "How many {what} does {who} have now?",
        "{a} + {b} = {x}, and {x} - {c} = {y}.",
        lambda a, b, c: (a + b, a + b - c),
    ),
    (
        "A box holds {b} {what}. {who} buys {a} boxes and loses {c} {what}. "
        "How many {what} are left?",
        "{a} * {b} = {x}, and {x} - {c} = {y}.",
        lambda a, b, c: (a * b, a * b - c),
    ),
    (
        "{who} reads {b} pages a day for {a} days, and {c} pages on the next day. "
        "How many pages is that?",
        "{a} * {b} = {x}, and {x} + {c} = {y}.",
        lambda a, b, c: (a * b, a * b + c),
    ),
    (
        "{who} earns {b} dollars an hour and works {a} hours. Lunch costs {c} dollars. "
        "How many dollars are left?",
        "{a} * {b} = {x}, and {x} - {c} = {y}.",
        lambda a, b, c: (a * b, a * b - c),
    ),
)


def problems(count: int) -> list[dict]:
    """Different problems, in a fixed order."""
    draw = random.Random(0)
    rows: dict[str, dict] = {}
    while len(rows) < count:
        text, working, solve = draw.choice(TEMPLATES)
        a, b, c = draw.randint(2, 12), draw.randint(2, 12), draw.randint(1, 4)
        x, y = solve(a, b, c)
        if y < 0:
            continue
        words = {"who": draw.choice(NAMES), "what": draw.choice(THINGS)}
        question = text.format(a=a, b=b, c=c, **words)
        answer = f"{working.format(a=a, b=b, c=c, x=x, y=y)}\n#### {y}"
        rows[question] = {"question": question, "answer": answer}
    return list(rows.values())


if __name__ == "__main__":
    lines = [json.dumps(row) for row in problems(400)]
    pathlib.Path(sys.argv[1]).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} problems")
