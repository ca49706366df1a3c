# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Write the small supervised data under configs/data: conversations, preferences, judged replies,
and judged steps. All of it is made up here by rules, so that a run's success can be told.

    python scripts/make_supervised_data.py
"""

from __future__ import annotations

import json
import pathlib
import random

FOLDER = pathlib.Path(__file__).parents[1] / "configs" / "data"
# ruff: noqa: SIM905 - words as one reads them
ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
).split()
TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()
GOODS = "apples pears lemons plums books pencils cups plates coins stamps candles buttons".split()
NAMES = "Anna Ben Clara David Emma Felix Greta Hugo Ida Jonas Klara Leo".split()


def words(number: int) -> str:
    if number < 20:
        return ONES[number]
    if number < 100:
        return TENS[number // 10] + (f"-{ONES[number % 10]}" if number % 10 else "")
    rest = f" and {words(number % 100)}" if number % 100 else ""
    return f"{ONES[number // 100]} hundred{rest}"


def roman(number: int) -> str:
    marks = [(100, "C"), (90, "XC"), (50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"),
             (4, "IV"), (1, "I")]  # fmt: skip
    text = ""
    for value, mark in marks:
        while number >= value:
            text, number = text + mark, number - value
    return text


def conversation(draw: random.Random) -> list[dict[str, str]]:
    """One to three questions of one kind, with the answers that the rules give."""
    kind = draw.choice(["words", "roman", "order", "double"])
    messages = []
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        number = draw.randint(1, 299 if kind == "words" else 99)
        goods = draw.sample(GOODS, draw.randint(3, 6))
        question, answer = {
            "words": (f"Write {number} in words.", words(number)),
            "roman": (f"Write {number} in Roman numerals.", roman(number)),
            "order": (f"Sort: {', '.join(goods)}", ", ".join(sorted(goods))),
            "double": (f"Double {number}.", f"Twice {number} is {2 * number}."),
        }[kind]
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    return messages


def question(draw: random.Random) -> tuple[str, str, str]:
    """A question, a reply that answers it in one sentence, and one that rambles."""
    name, goods = draw.choice(NAMES), draw.choice(GOODS)
    first, more = draw.randint(2, 20), draw.randint(2, 20)
    asked = draw.choice([
        f"{name} has {first} {goods} and buys {more} more. How many {goods} are that?",
        f"{name} finds {more} {goods} beside {first} others. How many {goods} has {name} now?",
    ])  # fmt: skip
    good = draw.choice([
        f"{name} has {first + more} {goods}.",
        f"That makes {first + more} {goods}.",
        f"There are {first + more} {goods} now.",
    ])  # fmt: skip
    bad = draw.choice([
        f"Well, {name} seems to like {goods}, but it is hard to say how many.",
        f"I am not sure. It could be some {goods}, or maybe many.",
        f"Many people have {goods}. Some have more and some have fewer.",
        "It depends on how one counts, so I would rather not say.",
    ])  # fmt: skip
    return asked, good, bad


def steps(draw: random.Random) -> dict[str, object]:
    """A sum of one-digit numbers, added up step by step; one step in three is wrong."""
    numbers = [draw.randint(1, 9) for _ in range(draw.randint(3, 5))]
    total, lines, labels = numbers[0], [], []
    for number in numbers[1:]:
        right = draw.random() > 1 / 3
        said = total + number if right else total + number + draw.choice([10, 20, 30])
        lines.append(f"{total} + {number} = {said}")
        labels.append(right)
        total += number
    asked = " + ".join(map(str, numbers))
    return {"prompt": f"Add up {asked}.\n", "completions": lines, "labels": labels}


def write(name: str, rows: list[dict[str, object]]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (FOLDER / name).write_text(text, encoding="utf-8")
    print(name, len(rows), "rows", len(text), "bytes")


def main() -> None:
    draw = random.Random(17)
    write("conversations.jsonl", [{"messages": conversation(draw)} for _ in range(400)])
    asked = {q[0]: q for q in (question(draw) for _ in range(500))}
    rows = [{"prompt": [{"role": "user", "content": q}],
             "chosen": [{"role": "assistant", "content": good}],
             "rejected": [{"role": "assistant", "content": bad}]}
            for q, good, bad in asked.values()]  # fmt: skip
    write("preferences.jsonl", rows[:400])
    judged = [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in rows[:400]
        for side in [draw.choice(["chosen", "rejected"])]
    ]
    write("judged_replies.jsonl", judged)
    write("judged_steps.jsonl", [steps(draw) for _ in range(400)])


if __name__ == "__main__":
    main()
