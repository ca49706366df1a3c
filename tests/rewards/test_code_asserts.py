# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What of an assert reaches the program, and that the rest of it means what Python means."""

from __future__ import annotations

import ast

import naive_grader
import pytest

from jaxrl_llm.rewards.code_asserts import split_asserts
from jaxrl_llm.rewards.code_tests import run_tests
from jaxrl_llm.rewards.sandbox import Limits, Sandbox

_LIMITS = Limits(cpu_s=1.0, idle_s=1.0)


def _passed(program, asserts, setup="", entry="f"):
    tests = {"kind": "asserts", "entry": entry, "setup": setup, "asserts": asserts}
    report = run_tests(program, tests, Sandbox(), limits=_LIMITS)
    assert report.available
    return list(report.passed)


# ----------------------------------------------------------------------------
# The setup
# ----------------------------------------------------------------------------

_REFERENCE = "def ref(x):\n    return x*x + 1\n"
_READS_THE_SETUP = {
    "frame": "import sys\ndef f(x):\n    return sys._getframe(1).f_globals['ref'](x)\n",
    "file": (
        "import json\n"
        "names = {}\n"
        "exec(json.load(open(FILE))['setup'], names)\n"
        "def f(x):\n    return names['ref'](x)\n"
    ),
    "garbage": (
        "import gc\n"
        "def f(x):\n"
        "    for value in gc.get_objects():\n"
        "        if getattr(value, '__name__', '') == 'ref': return value(x)\n"
    ),
    "main": "def f(x):\n    import __main__\n    return __main__.ref(x)\n",
}


@pytest.mark.parametrize("name", _READS_THE_SETUP)
def test_a_reference_in_the_setup_is_out_of_reach(name, tmp_path):
    program = _READS_THE_SETUP[name]
    asserts = ["assert f(3) == ref(3)", "assert f(5) == ref(5)"]
    there = program.replace("FILE", "'setup.json'")
    assert naive_grader.grade_asserts(there, asserts, _REFERENCE, tmp_path)
    ours = program.replace("FILE", "'cases.json'")
    assert _passed(ours, asserts, _REFERENCE) == [False, False]
    assert _passed("def f(x): return x*x + 1", asserts, _REFERENCE) == [True, True]


@pytest.mark.parametrize(
    ("setup", "call", "condition", "seen"),
    [
        (_REFERENCE, "f(3)", "ref(3)", ""),
        ("ANSWERS = [10, 26]", "f(3)", "ANSWERS[0]", ""),
        ("import math\nX = math.pi\nY = math.e", "f(X)", "Y", "import math\nX = math.pi"),
        ("A = 1\nB = A + 1\nC = 3", "f(B)", "C", "A = 1\nB = A + 1"),
        ("def g(x): return h(x)\ndef h(x): return x\nR = 1", "f(g(1))", "R", "def g def h"),
        ("T = []\nT.append(2)\nR = 1", "f(T)", "R", "T = []\nT.append(2)"),
        ("def f(x): return x", "f(3)", "3", ""),
        ("from math import *\nR = 1", "f(3)", "R", "from math import *"),
    ],
)
def test_the_program_gets_what_its_arguments_need(setup, call, condition, seen):
    _, text = split_asserts([f"assert {call} == {condition}"], setup, "f")
    if seen.startswith("def"):
        assert [f"def {node.name}" for node in ast.parse(text).body] == ["def g", "def h"]
    else:
        assert text == seen


@pytest.mark.parametrize(
    ("setup", "asserts"),
    [
        (_REFERENCE, ["assert f(ref(3)) == ref(3)"]),
        (_REFERENCE, ["assert f(ref(3)) == 4", "assert f(1) == ref(1)"]),
        ("T = [(3, 10)]", ["assert f(T[0][0]) == T[0][1]"]),
        ("T = [(3, 10)]\nX = T[0][0]", ["assert f(X) == T[0][1]"]),
        ("T = []\nT.append(2)", ["assert f(T) == T"]),
        ("X, ANSWER = 3, 10", ["assert f(X) == ANSWER"]),
        ("X, f = 3, (lambda x: 10)", ["assert f(X) == 10"]),
    ],
)
def test_a_setup_that_would_show_what_is_expected_is_refused(setup, asserts):
    with pytest.raises(ValueError, match="same part of the setup"):
        split_asserts(asserts, setup, "f")


def test_a_reference_of_the_same_name_does_not_replace_the_program():
    setup = "def f(x):\n    return x*x + 1\n"
    assert _passed("def f(x): return 0", ["assert f(3) == 10"], setup) == [False]


# ----------------------------------------------------------------------------
# What asserts mean
# ----------------------------------------------------------------------------

_SAME = "def f(x): return x"
_GENERATOR = "def f(n):\n    for i in range(n): yield i\n"
_RANGE = "def f(n): return range(n)"


@pytest.mark.parametrize(
    ("program", "rows"),
    [
        (
            _GENERATOR,
            {
                "list(f(3)) == [0, 1, 2]": True,
                "sum(f(3)) == 3": True,
                "sorted(f(3)) == [0, 1, 2]": True,
                "set(f(3)) == {0, 1, 2}": True,
                "next(f(3)) == 0": True,
                "list(f(3)) == [0, 1]": False,
                "f(3) == [0, 1, 2]": False,
                "len(f(3)) == 3": False,
            },
        ),
        (
            _RANGE,
            {
                "list(f(3)) == [0, 1, 2]": True,
                "len(f(3)) == 3": True,
                "f(3) == range(3)": True,
                "f(3) == [0, 1, 2]": False,
                "max(f(10**9)) == 10**9 - 1 if False else len(f(10**9)) == 10**9": True,
            },
        ),
        (
            "def f(n):\n    while True:\n        yield n\n        n += 1\n",
            {"next(f(3)) == 3": True, "list(f(3)) == [3]": False},
        ),
        (
            "def f(n):\n    yield n\n    raise KeyError",
            {"next(f(3)) == 3": True, "list(f(3)) == [3]": False},
        ),
        (
            _SAME,
            {
                "f(True) == 1": True,
                "f(1) == True": True,
                "f(1.0) == 1": True,
                "f([True, 2.0]) == [1, 2]": True,
                "f(0.1 + 0.2) == 0.3": False,
                "f(2) == True": False,
                "f('1') == 1": False,
                "f((1,)) == [1]": False,
                "f(None) == False": False,
                "f(frozenset({1})) == {1}": True,
                "f({frozenset({1})}) == {frozenset({1})}": True,
                "f(1) is True": False,
            },
        ),
        (
            "from decimal import Decimal\ndef f(x): return Decimal(x)",
            {"f('1.5') == 1.5": True, "f('0.1') == 0.1": False, "f('2') == 2": True},
        ),
        (
            "from collections import deque\ndef f(x): return deque(x)",
            {"list(f([1])) == [1]": True, "f([1]) == [1]": False, "len(f([1])) == 1": True},
        ),
        (
            "def f(x): return {x: 2}.keys()",
            {"list(f(1)) == [1]": True, "f(1) == {1}": True, "f(1) == [1]": False},
        ),
        (
            "class T(str):\n"
            "    def startswith(self, o): return True\n"
            "    def __eq__(self, o): return True\n"
            "    def strip(self): return self\n"
            "    __hash__ = str.__hash__\n"
            "def f(x): return T('no')\n"
            "class S:\n"
            "    def f(self, x): return T('no')\n"
            "    def count(self, x): return x\n",
            {
                "f(1).startswith('ab')": False,
                "f(1).strip().startswith('ab')": False,
                "f(1).__eq__('ab')": False,
                "S().f(1).startswith('ab')": False,
                "f(1).startswith('n')": True,
                "f(1).upper() == 'NO'": True,
                "S().f(1).count('o') == 1": True,
                "S().count(3) == 3": True,
            },
        ),
        (
            "class T(int):\n"
            "    def __eq__(self, o): return True\n"
            "    __hash__ = None\n"
            "def f(n): return T(7)",
            {
                "f(2) == 3": False,
                "f(2) == 1 + 2": False,
                "f(2) in [3, 4]": False,
                "f(2) == 7": True,
            },
        ),
    ],
)
def test_an_assert_means_what_python_means(program, rows):
    assert _passed(program, [f"assert {text}" for text in rows]) == list(rows.values())


def test_calls_still_compare_types():
    for program, expected in ((_GENERATOR, [0]), (_RANGE, [0]), (_SAME, 1.0), (_SAME, True)):
        tests = {"kind": "calls", "entry": "f", "cases": [{"args": [1], "expected": expected}]}
        assert run_tests(program, tests, Sandbox(), limits=_LIMITS).passed == (False,)
