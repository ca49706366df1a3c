# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Writes configs/data/code_tasks.jsonl: one-line Python functions with public and hidden tests.

    python scripts/make_code_tasks.py configs/data/code_tasks.jsonl

Every task's tests are made by running its reference solution, which is not written to the file.
"""

from __future__ import annotations

import json
import pathlib
import random
import sys

NUMBERS = (2, 3, 4, 5, 6, 7, 8, 9)
INPUTS = {
    "x": [0, 1, 2, 3, 5, 7, 8, 10, 12, 25, 31, 64, 99, 100, -1, -4, -17, -30],
    "xs": [[1], [3, 1], [2, 2, 5], [9, 8, 7, 1], [0, -4, 6], [-1, -2, -3], [10, 20, 30, 40, 5]],
    "s": ["a", "Tree", "two words", "UPPER", "x y z", "level", "Hello there"],
}
KINDS = [
    ("x", "x plus {n}", "x + {n}"),
    ("x", "x minus {n}", "x - {n}"),
    ("x", "x times {n}", "x * {n}"),
    ("x", "{n} minus x", "{n} - x"),
    ("x", "x divided by {n}, rounded down", "x // {n}"),
    ("x", "the remainder of x divided by {n}", "x % {n}"),
    ("x", "x to the power of {n}", "x ** {n}"),
    ("x", "the larger of x and {n}", "max(x, {n})"),
    ("x", "the smaller of x and {n}", "min(x, {n})"),
    ("x", "the distance of x from {n}", "abs(x - {n})"),
    ("x", "whether x is greater than {n}", "x > {n}"),
    ("x", "whether x is less than {n}", "x < {n}"),
    ("x", "whether x is divisible by {n}", "x % {n} == 0"),
    ("x", "twice x plus {n}", "2 * x + {n}"),
    ("x", "{n} times x plus 1", "{n} * x + 1"),
    ("x", "the square of x, minus {n}", "x * x - {n}"),
    ("xs", "the sum of xs plus {n}", "sum(xs) + {n}"),
    ("xs", "the length of xs times {n}", "len(xs) * {n}"),
    ("xs", "the largest of xs minus {n}", "max(xs) - {n}"),
    ("xs", "the first of xs times {n}", "xs[0] * {n}"),
    ("xs", "the last of xs plus {n}", "xs[-1] + {n}"),
    ("xs", "the first {n} of xs", "xs[:{n}]"),
    ("xs", "xs repeated {n} times", "xs * {n}"),
    ("xs", "whether {n} is in xs", "{n} in xs"),
    ("s", "s repeated {n} times", "s * {n}"),
    ("s", "the first {n} letters of s", "s[:{n}]"),
    ("s", "the last {n} letters of s", "s[-{n}:]"),
    ("s", "the length of s plus {n}", "len(s) + {n}"),
]


def tasks() -> list[dict]:
    """All tasks, in an order that mixes the kinds."""
    rows = []
    for argument, text, solution in KINDS:
        for number in NUMBERS:
            rows.append(task(argument, text.format(n=number), solution.format(n=number)))
    random.Random(0).shuffle(rows)
    return rows


def task(argument: str, text: str, solution: str) -> dict:
    """One task: two public and up to six hidden tests, made by the reference solution."""
    solve = eval(f"lambda {argument}: {solution}")
    inputs = list(INPUTS[argument])
    random.Random(text).shuffle(inputs)
    cases = [{"args": [value], "expected": solve(value)} for value in inputs[:8]]
    prefix = f"def solve({argument}):\n    # {text}\n    return"
    sets = {
        name: {"kind": "calls", "entry": "solve", "cases": part}
        for name, part in (("public_tests", cases[:2]), ("hidden_tests", cases[2:]))
    }
    return {"id": text, "prompt": prefix, "code_prefix": prefix, **sets}


if __name__ == "__main__":
    lines = [json.dumps(row) for row in tasks()]
    pathlib.Path(sys.argv[1]).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} tasks")
