# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import time

import numpy as np
import pytest

from jaxrl_llm.rewards.answer import (
    anchored_answer,
    leading_number,
    same_answer,
    stated_answer,
    states_answer,
    well_formed,
)
from jaxrl_llm.rewards.base import RewardError
from jaxrl_llm.rewards.format import THINK_THEN_ANSWER, Matches, stops
from jaxrl_llm.types import Prompt, Rollout


def _judge(fn, completion, answer="79", finish_reason="stop"):
    none = np.zeros(0, np.int32)
    prompt = Prompt("p", (1,), "p", answer)
    logp = np.zeros(0, np.float32)
    rollout = Rollout(prompt, 0, none, logp, none > 0, none, finish_reason, completion)
    (reward,) = fn([rollout])
    return reward


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        # The last anchor decides.
        ("Answer: 34", "34"),
        ("so\n  answer : 34.\nDone", "34"),
        ("**Answer:** 34", "34"),
        ("**Final Answer: 34**", "34"),
        ("### Answer: $34$.", "34"),
        ("Answer：34", "34"),
        ("Answer: 33\nAnswer: 34", "34"),
        (r"\boxed{33}, no, \boxed{34}", "34"),
        ("\\boxed{33}\nAnswer: 34", "34"),
        ("Answer: 33\n\\boxed{34}", "34"),
        (r"\boxed {\frac{1}{\{2\}}}", r"\frac{1}{\{2\}}"),
        (r"Answer: \boxed{34}", "34"),
        (r"Answer: $\boxed{34}$.", "34"),
        (r"**Answer:** \(\boxed{34}\)", "34"),
        (
            "Answer: \\boxed{\\begin{matrix}1\\\\\n2\\end{matrix}}",
            "\\begin{matrix}1\\\\\n2\\end{matrix}",
        ),
        # A line states the whole line.
        ("Answer: 33 or 34", "33 or 34"),
        (r"Answer: 33 or \boxed{34}", r"33 or \boxed{34}"),
        (r"Answer: \boxed{33} \boxed{34}", r"\boxed{33} \boxed{34}"),
        ("Answer: 34, or Answer: 35", "34, or Answer: 35"),
        # Nothing is stated.
        ("34", None),
        ("The answer is 34", None),
        ("I think the answer: 34", None),
        ("The final Answer: 34", None),
        ("Answer 34", None),
        ("Answer:", None),
        ("Answer: 34\nAnswer:\n", None),
        (r"\boxed{}", None),
        (r"\boxed{33} \boxed{34", None),
        (r"\boxed{34\}", None),
        (r"boxed{34}", None),
        (r"\boxed 34", None),
        ("", None),
    ],
)
def test_stated_answer(text, stated):
    assert stated_answer(text) == stated
    assert _judge(states_answer, text) == float(stated is not None)


@pytest.mark.parametrize(
    ("stated", "answer", "same"),
    [
        ("34", "34", True),
        ("34", 34, True),
        ("34.0", "34", True),
        ("0.50", 0.5, True),
        ("0.00001", 1e-5, True),
        ("+34", "34", True),
        ("034", "34", True),
        ("1,000", "1000", True),
        ("$34$", "34", True),
        ("The  Cat", "the cat", True),
        ("9" * 5000, "9" * 5000, True),
        ("9" * 5000, "9" * 4999 + "8", False),
        ("1,00", "100", False),
        ("34", "35", False),
        ("-34", "34", False),
        ("33, 34", "34", False),
        ("33=34", "34", False),
        ("33 34", "34", False),
        ("34 or 35", "34", False),
        ("34.0000000000000000000000000000000001", "34", False),
        ("3٤", "34", False),
        ("nan", "34", False),
        ("1e1", "10", False),
    ],
)
def test_same_answer(stated, answer, same):
    assert same_answer(stated, answer) is same
    assert _judge(anchored_answer, f"Answer: {stated}", answer) == float(same)


def test_an_answer_with_more_digits_than_str_writes():
    assert same_answer("9" * 5000, 10**5000 - 1)
    assert not same_answer("9" * 4999 + "8", 10**5000 - 1)


def test_prose_earns_nothing():
    for completion in ("79", "It is 79.", "78 79 80", "the answer is 79", "Answer 79", "= 79"):
        assert _judge(anchored_answer, completion) == 0.0
    assert _judge(anchored_answer, "It is 78.\nAnswer: 79") == 1.0


@pytest.mark.parametrize("answer", [None, True, [79], {"a": 1}])
def test_an_answer_that_can_not_be_compared_is_an_error(answer):
    with pytest.raises(ValueError, match="neither text nor a number"):
        _judge(anchored_answer, "Answer: 79", answer)
    with pytest.raises(ValueError, match="neither text nor a number"):
        _judge(leading_number, "79", answer)


def test_an_answer_that_is_no_whole_number_is_an_error():
    for answer in ("7.5", "seven", "", 7.5, "٧"):
        with pytest.raises(ValueError, match="not a whole number"):
            _judge(leading_number, "79", answer)


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        ("79", "79", 1),
        ("79\n21+4", "79", 1),
        (" \n79", 79, 1),
        ("79.", "79", 1),
        ("79, I think", "79", 1),
        ("79apples", "79", 1),
        ("079", "79", 1),
        ("-5", "-5", 1),
        ("0", "0", 1),
        ("-0", "0", 1),
        ("00", "0", 1),
        ("9" * 5000, "9" * 5000, 1),
        ("9" * 5000, "79", 0),
        ("790", "79", 0),
        ("7", "79", 0),
        ("", "79", 0),
        ("is 79", "79", 0),
        ("=79", "79", 0),
        ("+79", "79", 0),
        ("-79", "79", 0),
        ("- 79", "-79", 0),
        ("5", "-5", 0),
        ("79.5", "79", 0),
        ("79,000", "79", 0),
        ("79٣", "79", 0),
        ("٧٩", "79", 0),
        ("７９", "79", 0),
        ("7 9", "79", 0),
        ("78 79", "79", 0),
    ],
)
def test_leading_number(completion, answer, right):
    assert _judge(leading_number, completion, answer) == right


def test_well_formed():
    for completion in ("79", " 79 ", "-3", "0"):
        assert _judge(well_formed, completion) == 1.0
        assert _judge(well_formed, completion, finish_reason="length") == 0.0
    for completion in ("", "79\n21", "79.", "7 9", "x", "٧", "+7", "--7"):
        assert _judge(well_formed, completion) == 0.0


def test_formats():
    assert _judge(Matches(r"a.*b"), "a\nb") == 1.0
    assert _judge(Matches(r"a.*b"), "xa\nb") == 0.0
    for completion in ("<think>a</think>b", " <think>\na\n</think>\n\nb\n"):
        assert _judge(THINK_THEN_ANSWER, completion) == 1.0
    for completion in (
        "b",
        "<think>a</think>",
        "<think></think>b",
        "<think>a<think>a</think>b",
        "<think>a</think>b</think>c",
        "x<think>a</think>b",
        "</think>a<think>b",
    ):
        assert _judge(THINK_THEN_ANSWER, completion) == 0.0
    with pytest.raises(RewardError, match="not a regular expression"):
        Matches("(")
    assert _judge(stops, "", finish_reason="stop") == 1.0
    assert _judge(stops, "", finish_reason="length") == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 20_000,
        "{" * 200_000,
        "\\boxed{" + "{" * 200_000,
        "answer" * 30_000,
        "Answer: " + "*_`" * 60_000,
        ("Answer" + " " * 50 + "\n") * 3000,
        " " * 200_000,
        "\n" * 200_000,
        "<think>" * 20_000,
        "9" * 200_000,
        "Answer: " + "9," * 90_000,
        "Answer: " + "$" * 200_000,
    ],
)
def test_hostile_text_is_judged_in_linear_time(text):
    start = time.process_time()
    for fn in (anchored_answer, states_answer, leading_number, well_formed, THINK_THEN_ANSWER):
        assert _judge(fn, text) in (0.0, 1.0)
    assert time.process_time() - start < 5.0
