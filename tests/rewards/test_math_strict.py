# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Answers that look like the right one and are another."""

from __future__ import annotations

import pytest

from jaxrl_llm.rewards.math_answers import same_mathematics

_UNSOLVED = [
    ("2x+3=7", "x=2"),
    ("x^2+5=x^2+2x+1", "x=2"),
    ("x-34=0", "x=34"),
    ("x+x=4", "x=2"),
    ("4x+6=14", "x = 2"),
    ("3x+1=x+5", "x=2"),
    ("2x=4", "2=x"),
    (r"(x-2)\cdot 10^{50}=0", "x=2"),
    ("2x=4, 3y=9", "x=2, y=3"),
    ("x-a-b=a", "x=34"),
    ("y=2", "x=2"),
    (r"x-\sqrt2=0", r"x=\sqrt{2}"),
    ("2x=4", "x=2 cm"),
    (r"x=17\cdot 2", "x=34"),
]

_SOLVED = [
    ("2=x", "x=2"),
    ("x=2", "2=x"),
    (r"x=\frac{10}{5}", "x=2"),
    ("2", "x=2"),
    ("y-2x-1=0", "y=2x+1"),
    ("y=2(x+1)-1", "y=2x+1"),
    ("x+y=0", "y=-x"),
    ("x^2+y^2-4=0", "x^2+y^2=4"),
]

_GUESSES = [
    ("(B) or C", "B"),
    ("(B), C, D", "B"),
    ("(B) 3 C", "B"),
    ("(B) or 34", "B"),
    ("(B) C", r"\text{(B)}"),
    ("(B) 3C", "B"),
    ("BC", "B"),
]


@pytest.mark.parametrize(("stated", "right"), _UNSOLVED)
def test_an_equation_with_the_same_root_is_not_its_solution(stated, right):
    assert not same_mathematics(stated, right)


@pytest.mark.parametrize(("stated", "right"), _SOLVED)
def test_a_solution_and_a_curve_may_be_written_either_way(stated, right):
    assert same_mathematics(stated, right)


@pytest.mark.parametrize(("stated", "right"), _GUESSES)
def test_a_list_of_letters_is_no_choice(stated, right):
    assert not same_mathematics(stated, right)
    assert same_mathematics("B) 34", right)
