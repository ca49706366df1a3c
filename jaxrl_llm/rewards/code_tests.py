# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Tests for model-written programs, of three kinds, judged outside the program's process.

    {"kind": "calls", "entry": "add", "cases": [{"args": [1, 2], "expected": 3}, …]}
    {"kind": "stdio", "cases": [{"stdin": "1 2\\n", "stdout": "3\\n"}, …]}
    {"kind": "asserts", "setup": "import math", "asserts": ["assert add(1, 2) == 3", …]}

The sandbox is given arguments and input only. Of an assert it is given the calls to be made, and of
the setup what their arguments need; what they are compared with stays here, or is worked out in a
second sandbox that never held the program. Asserts whose calls and expected values need the same
definition of the setup can't be judged so, and are refused.

Calls compare types too, as JSON has them. An assert means what Python means: 1 == 1.0 == True,
and `list(f(3))` takes a generator.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.rewards import code_harness
from jaxrl_llm.rewards.code_asserts import equal_forms, is_plain, split_asserts
from jaxrl_llm.rewards.code_harness import encode
from jaxrl_llm.rewards.sandbox import Job, Limits, Outcome, Runner

_PATIENCE = 2
_HARNESS = pathlib.Path(code_harness.__file__).read_text(encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class Language:
    """How to run a program that reads standard input and writes standard output.

    Attributes:
        file: the name that the program's text is stored under.
        build: commands that must succeed first, such as `("gcc", "-O1", "main.c", "-o", "main")`.
        run: the command of the program; empty for Python.
    """

    file: str
    build: tuple[tuple[str, ...], ...] = ()
    run: tuple[str, ...] = ()


PYTHON = Language("candidate.py")
LANGUAGES = {
    "python": PYTHON,
    "c": Language("main.c", (("gcc", "-O1", "main.c", "-o", "main", "-lm"),), ("./main",)),
    "c++": Language("main.cpp", (("g++", "-O1", "main.cpp", "-o", "main"),), ("./main",)),
    "shell": Language("main.sh", (("sh", "-n", "main.sh"),), ("sh", "main.sh")),
}


@dataclasses.dataclass(frozen=True)
class CodeReport:
    """What came of a set of tests.

    Attributes:
        compiled: whether the program is valid; None if that is not known.
        passed: for each test, whether it passed. A test without a result has failed.
        available: False if the sandbox failed, so that nothing is known.
        notes: why tests failed, for people.
    """

    compiled: bool | None
    passed: tuple[bool, ...]
    available: bool = True
    notes: tuple[str, ...] = ()


def run_tests(
    program: str,
    tests: Mapping[str, Any],
    runner: Runner,
    *,
    limits: Limits | None = None,
    language: Language = PYTHON,
) -> CodeReport:
    """Runs a set of tests against a program.

    Calls and asserts share one sandbox, in order, and its limits; every input of a stdio test gets
    a sandbox of its own, and after two that ran out of time the others count as failed.

    Raises:
        ValueError: the tests themselves are not of one of the three kinds.
    """
    limits = limits or Limits()
    kind = tests.get("kind") if isinstance(tests, Mapping) else None
    if kind not in TEST_KINDS:
        raise ValueError(f"tests need a kind, one of {', '.join(TEST_KINDS)}; got {kind!r}")
    if kind != "stdio" and language != PYTHON:
        raise ValueError(f"tests of the kind {kind!r} are for Python programs")
    return TEST_KINDS[kind](program, tests, runner, limits, language)


def _field(row: Any, name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
    value = row.get(name, default) if isinstance(row, Mapping) else ...
    if value is ... or (not isinstance(value, kind) and value is not default):
        raise ValueError(f"a test needs {name!r} of type {kind}; got {str(row)[:100]}")
    return value


# ----------------------------------------------------------------------------
# Calls
# ----------------------------------------------------------------------------


def _run_calls(program, tests, runner, limits, language) -> CodeReport:
    entry = _field(tests, "entry", str)
    cases = _field(tests, "cases", list)
    expected = [_jsonable(encode(_field(case, "expected", object))) for case in cases]
    rows = [
        {
            "call": entry,
            "args": encode(_field(case, "args", list)),
            "kwargs": encode(_field(case, "kwargs", dict, {})),
        }
        for case in cases
    ]
    report, values, notes = _in_sandbox(program, {"cases": rows}, runner, limits)
    tolerance = _field(tests, "tolerance", (int, float), 0.0)
    passed = [
        i in values and _guarded(lambda i=i: same(_jsonable(values[i]), expected[i], tolerance))
        for i in range(len(cases))
    ]
    return dataclasses.replace(report, passed=tuple(passed), notes=notes)


def _in_sandbox(program: str | None, job: dict, runner: Runner, limits: Limits):
    """Runs cases beside a program (or, without one, conditions); (report, value by case, notes)."""
    mode = "judge" if program is None else "calls"
    files = {"harness.py": _HARNESS, "cases.json": json.dumps(job)}
    if program is not None:
        files["candidate.py"] = program
    command = ("python3", "harness.py", mode, "{results}")
    outcome = runner.run(Job(command, files, limits=limits))
    compiled, values, errors = _results(outcome)
    if outcome.status == "overflow":
        values = {}
    if outcome.status == "unavailable":
        return CodeReport(None, (), available=False), {}, (outcome.reason,)
    return CodeReport(compiled, ()), values, tuple(errors) or _ending(outcome)


def _results(outcome: Outcome) -> tuple[bool, dict[int, Any], list[str]]:
    """What was reported: whether it compiled, the value of each case, and errors.

    A case reported twice has no value: the harness does not do that.
    """
    lines = outcome.results.split("\n")
    values: dict[int, Any] = {}
    seen: set[int] = set()
    errors = []
    for line in lines[1:]:
        row = _parse(line)
        if not (isinstance(row, list) and len(row) == 3 and type(row[1]) is int):
            continue
        kind, index, value = row
        values.pop(index, None)
        if index not in seen and kind == "value":
            values[index] = value
        elif kind == "error":
            errors.append(f"test {index}: {str(value)[:200]}")
        seen.add(index)
    return lines[0] == '["compiled"]', values, errors[:5]


def _parse(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _ending(outcome: Outcome) -> tuple[str, ...]:
    if outcome.status == "exited" and outcome.exit_code == 0:
        return ()
    last = outcome.stderr.strip().rpartition("\n")[2][:200]
    return (outcome.reason or f"exit code {outcome.exit_code} {last}".strip(),)


# ----------------------------------------------------------------------------
# Comparing
# ----------------------------------------------------------------------------


def same(left: Any, right: Any, tolerance: float = 0.0) -> bool:
    """Whether two encoded values are equal, types included.

    Two floats are equal if |left - right| ≤ tolerance · max(1, |right|). Nothing is hashed and no
    method of the values is called: numbers and text can't lie about `==`.
    """
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return left == right or abs(left - right) <= tolerance * max(1.0, abs(right))
    if isinstance(left, list):
        return len(left) == len(right) and all(
            same(a, b, tolerance) for a, b in zip(left, right, strict=True)
        )
    if isinstance(left, dict):
        if left.keys() != right.keys() or len(left) != 1:
            return False
        ((kind, a),) = left.items()
        (b,) = right.values()
        if kind in ("set", "dict") and isinstance(a, list) and isinstance(b, list):
            a, b = sorted(a, key=json.dumps), sorted(b, key=json.dumps)
        return same(a, b, tolerance)
    return left == right


def _jsonable(value: Any) -> Any:
    """An encoded value as it would come back from JSON: tuples as lists, keys as text."""
    if isinstance(value, list):
        return [_jsonable(item) for item in value]
    if isinstance(value, dict) and "tuple" in value:
        return _jsonable(value["tuple"])
    if isinstance(value, dict) and "dict" in value:
        return {"dict": [[_key(key), _jsonable(item)] for key, item in value["dict"]]}
    return value


def _key(key: Any) -> Any:
    return json.dumps(key) if key is None or isinstance(key, int | float) else key


def _guarded(compare) -> bool:
    """False where a forged value is too deep, or not of the form that the harness writes."""
    try:
        return compare()
    except (ValueError, TypeError, RecursionError, AttributeError):
        return False


# ----------------------------------------------------------------------------
# Standard input and output
# ----------------------------------------------------------------------------


def _run_stdio(program, tests, runner, limits, language) -> CodeReport:
    cases = _field(tests, "cases", list)
    pairs = [(_field(case, "stdin", str), _field(case, "stdout", str)) for case in cases]
    compiled, passed, notes, timeouts = None, [], [], 0
    for stdin, stdout in pairs:
        if timeouts >= _PATIENCE:
            break
        outcome = runner.run(_program_job(program, stdin, limits, language))
        timeouts += outcome.status == "timeout"
        if outcome.status == "unavailable":
            return CodeReport(None, (), available=False, notes=(outcome.reason,))
        compiled = outcome.results.startswith('["compiled"]\n')
        if not compiled:
            return CodeReport(False, (False,) * len(cases), notes=_ending(outcome))
        well = outcome.status == "exited" and outcome.exit_code == 0
        passed.append(well and _lines(outcome.stdout) == _lines(stdout))
        notes += _ending(outcome)
    passed += [False] * (len(cases) - len(passed))
    return CodeReport(compiled, tuple(passed), notes=tuple(notes[:5]))


def _program_job(program: str, stdin: str, limits: Limits, language: Language) -> Job:
    files = {"harness.py": _HARNESS, language.file: program}
    if language == PYTHON:
        return Job(("python3", "harness.py", "program", "{results}"), files, stdin, limits)
    files["recipe.json"] = json.dumps({"build": language.build, "run": language.run})
    return Job(("python3", "harness.py", "build", "{results}"), files, stdin, limits)


def _lines(text: str) -> list[str]:
    """Lines without trailing white space, and without trailing empty lines."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


# ----------------------------------------------------------------------------
# Asserts
# ----------------------------------------------------------------------------


def _run_asserts(program, tests, runner, limits, language) -> CodeReport:
    setup = _field(tests, "setup", str, "")
    entry = _field(tests, "entry", str, "")
    asserts, for_calls = split_asserts(_field(tests, "asserts", (list, str)), setup, entry)
    rows = [{"expressions": list(each.calls)} for each in asserts]
    report, values, notes = _in_sandbox(
        program, {"setup": for_calls, "cases": rows}, runner, limits
    )
    shaped = {
        i: value
        for i, value in values.items()
        if 0 <= i < len(asserts) and isinstance(value, list) and len(value) == len(asserts[i].calls)
    }
    passed = [False] * len(asserts)
    judged = []
    for i, value in shaped.items():
        if asserts[i].is_literal and _guarded(lambda value=value: is_plain(value)):
            passed[i] = _guarded(
                lambda i=i, value=value: same(equal_forms(value[0]), asserts[i].expected)
            )
        else:
            judged.append(i)
    if judged:
        cases = [{"condition": asserts[i].condition, "values": shaped[i]} for i in judged]
        second, holds, more = _in_sandbox(None, {"setup": setup, "cases": cases}, runner, limits)
        if not second.available:
            return dataclasses.replace(second, notes=more)
        for place, i in enumerate(judged):
            passed[i] = holds.get(place) is True
    return dataclasses.replace(report, passed=tuple(passed), notes=notes)


TEST_KINDS = {"calls": _run_calls, "stdio": _run_stdio, "asserts": _run_asserts}
