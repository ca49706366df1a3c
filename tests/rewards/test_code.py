# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest

from jaxrl_llm.errors import RewardError
from jaxrl_llm.rewards.base import score
from jaxrl_llm.rewards.code import (
    ALL_OR_NOTHING,
    CodeReward,
    CodeWeights,
    continued_function,
    last_fenced_block,
)
from jaxrl_llm.rewards.code_harness import decode, encode
from jaxrl_llm.rewards.code_tests import LANGUAGES, Language, run_tests, same
from jaxrl_llm.rewards.sandbox import Job, Limits, Outcome, Sandbox
from jaxrl_llm.types import Prompt, Reward, Rollout

_LIMITS = Limits(cpu_s=1.0, idle_s=1.0)
_ADD = "def add(a, b):\n    return a + b\n"


def _rollout(completion, columns=None):
    none = np.zeros(0, np.int32)
    prompt = Prompt("p", (1,), "p", None, columns or {})
    logp = np.zeros(0, np.float32)
    return Rollout(prompt, 0, none, logp, none > 0, none, "stop", completion)


def _passed(program, tests, language="python"):
    report = run_tests(program, tests, Sandbox(), limits=_LIMITS, language=LANGUAGES[language])
    assert report.available
    return list(report.passed)


def _calls(*cases, entry="add", **more):
    rows = [{"args": list(args), "expected": expected} for *args, expected in cases]
    return {"kind": "calls", "entry": entry, "cases": rows, **more}


# ----------------------------------------------------------------------------
# Extraction
# ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("```\na\nb\n```\nmore", "a\nb\n"),
        ("```py\na\n```\n```\nb\n```\n", "b\n"),
        ("~~~\na\n~~~", "a\n"),
        ("````\n```\na\n```\n````", "```\na\n```\n"),
        ("```python\r\na\r\n```", "a\r\n"),
        ("```\n```", ""),
        ("```\na", None),
        ("```\na\n```\n```\nb", None),
        ("a ```python\na\n```", None),
        ("a", None),
        ("", None),
    ],
)
def test_the_last_fenced_block(completion, program):
    assert last_fenced_block(_rollout(completion)) == program


def test_a_continued_function_ends_with_its_body():
    rollout = _rollout(
        "    x = 1\n\n    return x\n\nprint(2)\n    y", {"code_prefix": "def f():\n"}
    )
    assert continued_function(rollout) == "def f():\n    x = 1\n\n    return x\n\n"
    inline = _rollout(" return x\ndef g", {"code_prefix": "def f(x):"})
    assert continued_function(inline) == "def f(x): return x\n"


# ----------------------------------------------------------------------------
# Kinds of tests
# ----------------------------------------------------------------------------


def test_calls_compare_exact_types():
    tests = _calls(
        (1, 2, 3), (1, 2, 3.0), (1, 2, "3"), (1.0, 2, 3.0), ([1], [2], [1, 2]), (1, 2, 4)
    )
    assert _passed(_ADD, tests) == [True, False, False, True, True, False]
    assert _passed("def add(a, b): return a == b", _calls((1, 1, True), (1, 1, 1))) == [True, False]
    assert _passed("def add(a): return (a, {a: None})", _calls((1, [1, {"1": None}]))) == [True]
    assert _passed("def add(a): return {a}", _calls((1, [1]))) == [False]
    assert _passed("def add(a): return float('nan')", _calls((1, None), (1, "nan"))) == [False] * 2
    assert _passed("def add(a): return 10**a", _calls((5000, 10**5000))) == [True]
    assert _passed("def add(a): return a / 3", _calls((1.0, 0.33), tolerance=0.01)) == [True]
    assert _passed("def add(a): return a / 3", _calls((1.0, 0.33))) == [False]


def test_calls_of_methods_keywords_and_one_failure_among_others():
    program = "class Solution:\n    def add(self, a, *, b=0):\n        return a // b\n"
    tests = {
        "kind": "calls",
        "entry": "Solution.add",
        "cases": [
            {"args": [6], "kwargs": {"b": 2}, "expected": 3},
            {"args": [6], "expected": 3},
            {"args": [6], "kwargs": {"b": 3}, "expected": 2},
        ],
    }
    assert _passed(program, tests) == [True, False, True]
    dataclass = "import dataclasses\n@dataclasses.dataclass\nclass P:\n    x: int\n"
    assert _passed(dataclass + "def add(a): return P(a).x", _calls((1, 1))) == [True]


def test_a_lost_result_fails_the_tests_after_it():
    program = "import os\ndef add(a):\n    if a == 2: os._exit(0)\n    return a\n"
    assert _passed(program, _calls((1, 1), (2, 2), (3, 3))) == [True, False, False]
    loop = "def add(a):\n    while a == 2: pass\n    return a\n"
    assert _passed(loop, _calls((1, 1), (2, 2), (3, 3))) == [True, False, False]


def test_standard_input_and_output():
    cases = [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "5 5", "stdout": "10"}]
    tests = {"kind": "stdio", "cases": cases}
    assert _passed("print(sum(map(int, input().split())), '')", tests) == [True, True]
    assert _passed("print(3)", tests) == [True, False]
    assert (
        _passed("print(sum(map(int, input().split())))\nraise SystemExit(1)", tests) == [False] * 2
    )
    assert _passed("if __name__ == '__main__': print(3)", tests) == [True, False]
    assert _passed("import sys; print(len(sys.argv) + 2)", tests) == [True, False]
    # Three tests that sleep take no longer than two.
    report = run_tests(
        "import time; time.sleep(60)",
        {"kind": "stdio", "cases": cases * 2},
        Sandbox(),
        limits=_LIMITS,
    )
    assert report.passed == (False,) * 4 and len(report.notes) == 2


def test_other_languages():
    tests = {"kind": "stdio", "cases": [{"stdin": "b\na\n", "stdout": "a\nb"}]}
    assert _passed("sort", tests, "shell") == [True]
    assert _passed("sort -r", tests, "shell") == [False]
    recipe = Language("p.txt", (), ("sh", "-c", "sort p.txt"))
    reward = CodeReward(limits=_LIMITS, language=recipe)
    assert _graded("```\nb\na\n```", reward, hidden_tests=tests).value == 1.0
    report = run_tests("if", tests, Sandbox(), limits=_LIMITS, language=LANGUAGES["shell"])
    assert report.compiled is False and report.passed == (False,)


def test_asserts_follow_python_where_it_does_not_lie():
    tests = {
        "kind": "asserts",
        "setup": "import math\ndef near(x): return math.isclose(x, 0.3)",
        "asserts": [
            "assert add(1, 2) == 3",
            "assert 3.0 == add(1, 2), 'message'",
            "assert add((1,), (2,)) == (1, 2)",
            "assert add([1], [2]) == (1, 2)",
            "assert add(True, False) == True",
            "assert near(add(0.1, 0.2))",
            "assert set(add([1], [1])) == set([1])",
            "assert not add(0, 0)",
            "assert add(add(1, 2), 3) == 6",
            "assert add(sum([x for x in range(3)]), 0) == 3",
            "assert add({1: 2}.get(1), 0) > 1 and add(0, 0) == 0",
            "assert add('a', 'b') == 'a'",
        ],
    }
    # 1 == True and [1] != (1,): the `==` of an assert is the one of Python.
    wanted = [True, True, True, False, True, True, True, True, True, True, True, False]
    assert _passed(_ADD, tests) == wanted
    check = {
        "kind": "asserts",
        "entry": "add",
        "asserts": "def check(c):\n    assert c(1, 2) == 3\n    assert c(1, 2) == 4",
    }
    assert _passed(_ADD, check) == [True, False]


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ({}, "need a kind"),
        ({"kind": "unknown"}, "need a kind"),
        ({"kind": "calls", "cases": []}, "'entry'"),
        ({"kind": "calls", "entry": "f", "cases": [{"args": 1, "expected": 1}]}, "'args'"),
        ({"kind": "calls", "entry": "f", "cases": [{"args": []}]}, "'expected'"),
        ({"kind": "stdio", "cases": [{"stdin": ""}]}, "'stdout'"),
        ({"kind": "asserts", "asserts": ["x = f(1)"]}, "only assert statements"),
        ({"kind": "asserts", "asserts": ["assert len([]) == 0"]}, "calls nothing of the program"),
        ({"kind": "asserts", "asserts": ["assert all(f(x) for x in [1])"]}, "x of an assert"),
    ],
)
def test_tests_that_are_malformed_are_the_tasks_fault(tests, message):
    with pytest.raises(ValueError, match=message):
        run_tests(_ADD, tests, Sandbox(), limits=_LIMITS)


def test_values_keep_their_types_on_the_way():
    for value in (
        None,
        True,
        1,
        2**70,
        -1.5,
        "a",
        b"\xff",
        1j,
        [1, (2, {3})],
        {(1,): {"a": [None]}},
    ):
        assert decode(encode(value)) == value and type(decode(encode(value))) is type(value)
        assert same(encode(value), encode(value))
    assert repr(decode(encode(float("nan")))) == "nan" and decode(encode(-1e999)) == float("-inf")
    assert same(encode({1: 2, 3: 4}), encode({3: 4, 1: 2})) and same(encode({1, 2}), encode({2, 1}))
    for left, right in (
        (1, True),
        (1, 1.0),
        ([1], (1,)),
        ({1}, [1]),
        (0, None),
        ("1", 1),
        ({}, set()),
    ):
        assert not same(encode(left), encode(right))
    with pytest.raises(TypeError, match="can't be compared"):
        encode(object())


# ----------------------------------------------------------------------------
# The reward
# ----------------------------------------------------------------------------


def _graded(completion, reward=None, **columns):
    (verdict,) = (reward or CodeReward(limits=_LIMITS))([_rollout(completion, columns)])
    return verdict


def test_parts_follow_each_other():
    half = _calls((1, 2, 3), (1, 2, 4))
    right, wrong = _calls((1, 2, 3)), _calls((1, 2, 4))
    parts = [
        ("no block", right, right, 0.0, (0, 0, 0, 0, 0)),
        ("```\n \n```", right, right, 0.0, (0, 0, 0, 0, 0)),
        ("```\ndef add(\n```", right, right, 0.05, (1, 0, 0, 0, 0)),
        (f"```\n{_ADD}```", wrong, right, 0.1, (1, 1, 0, 0, 0)),
        (f"```\n{_ADD}```", half, right, 0.65, (1, 1, 0.5, 1, 0)),
        (f"```\n{_ADD}```", right, half, 0.75, (1, 1, 1, 0.5, 0)),
        (f"```\n{_ADD}```", right, right, 0.9, (1, 1, 1, 1, 1)),
    ]
    for completion, public, hidden, value, wanted in parts:
        reward = _graded(completion, public_tests=public, hidden_tests=hidden)
        names = ("format", "compiles", "public", "hidden", "passed")
        assert tuple(reward.parts[name] for name in names) == wanted
        assert reward.value == pytest.approx(value / 0.9)
        strict = CodeReward(ALL_OR_NOTHING, limits=_LIMITS)
        paid = _graded(completion, strict, public_tests=public, hidden_tests=hidden)
        assert paid.value == wanted[-1]


def test_weights_are_renormalised_over_what_a_task_has():
    reward = _graded(f"```\n{_ADD}```", hidden_tests=_calls((1, 2, 3), (1, 2, 4)))
    assert reward.value == pytest.approx((0.05 + 0.05 + 0.3 * 0.5) / 0.4)
    assert "public" not in reward.parts
    empty = _graded(f"```\n{_ADD}```", public_tests=_calls(), hidden_tests=_calls((1, 2, 3)))
    assert empty.parts["public"] == 0.0 and empty.parts["passed"] == 0.0
    with pytest.raises(RewardError, match="neither public_tests nor hidden_tests"):
        score({"code": CodeReward()}, [_rollout("```\na\n```")])


def test_a_judge_is_asked_about_programs_that_compile():
    asked = []

    def judge(rollouts):
        asked.extend(rollout.completion for rollout in rollouts)
        return [0.5, Reward(1.0), None][: len(rollouts)]

    reward = CodeReward(limits=_LIMITS, judge=judge)
    rollouts = [
        _rollout(text, {"public_tests": _calls((1, 2, 3))})
        for text in ("none", f"```\n{_ADD}```", f"```\n# 2\n{_ADD}```", f"```\n# 3\n{_ADD}```")
    ]
    first, second, third, fourth = reward(rollouts)
    assert len(asked) == 3
    assert first.value == 0.0 and first.parts["judge"] == 0.0
    assert second.value == pytest.approx((0.6 + 0.05) / 0.7)
    assert third.value == 1.0 and fourth is None
    with pytest.raises(ValueError, match=r"must be in \[0, 1\]"):
        CodeReward(limits=_LIMITS, judge=lambda rs: [2.0 for _ in rs])(rollouts[1:2])


@dataclasses.dataclass(frozen=True)
class _Broken:
    reason: str = "no machine"

    def run(self, job: Job) -> Outcome:
        return Outcome("unavailable", reason=self.reason)


def test_without_a_sandbox_there_is_no_verdict():
    tests = {"public_tests": _calls((1, 2, 3))}
    assert _graded(f"```\n{_ADD}```", CodeReward(runner=_Broken()), **tests) is None
    # A completion without a program needs no sandbox to be judged.
    assert _graded("none", CodeReward(runner=_Broken()), **tests).value == 0.0
    for kind in (
        {"kind": "stdio", "cases": [{"stdin": "", "stdout": ""}]},
        {"kind": "asserts", "asserts": ["assert add(1, 2) == 3"]},
    ):
        assert _graded(f"```\n{_ADD}```", CodeReward(runner=_Broken()), hidden_tests=kind) is None


def test_mistakes_in_the_config():
    for weights in ({"public": 1.5}, {"hidden": -0.1}, {"format": float("nan")}):
        with pytest.raises(RewardError, match="out of range"):
            CodeWeights(**weights)
    with pytest.raises(RewardError, match="unknown programming language"):
        CodeReward(language="fortran")
    assert pickle.loads(pickle.dumps(CodeReward())) == CodeReward()
