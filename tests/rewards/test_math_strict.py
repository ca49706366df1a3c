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


_NO_UNITS = [
    *(
        (f"34{words}", "34")
        for words in (
            " million",
            r"\text{ thousand}",
            " hundred",
            " dozen",
            r"\text{ squared}",
            r"\text{ minus one}",
            r"\text{ negative}",
            " sqrt",
            " factorial",
            r"\mathrm{e}",
            r"\text{ thirty five }",
            " thirtyfive",
            r"\text{ not sure }",
            r"\text{ wrong}",
            " thirds",
            " guesses",
            " pairs",
            r"\text{ times two}",
            " plus",
            r"\text{ zeros}",
        )
    ),
    (r"x=35\text{ wrong}", "35"),
    ("34", "34 million"),
    ("5 apples", "5 oranges"),
    ("5 minutes", "5 hours"),
    ("€12", r"\$12"),
    ("12 euros", "12 dollars"),
    ("34 K", "34"),
    (r"34\mathrm{d}", "34"),
    ("2:5", "12:30"),
    ("AB", "BA"),
    (r"2\frac{3}{2}", "3"),
    ("x+10^{-45}", "x"),
    (r"\pi+10^{-45}", r"\pi"),
    (r"1\%", "1"),
    ("1", r"1\%"),
]

_UNITS = [
    ("5 million", "5000000"),
    (r"1.5\text{ million people}", "1500000"),
    (r"\$5 million", "5000000"),
    ("5 apples", "5"),
    ("5 apples", "5 apples"),
    (r"1\text{ blue marble}", "1 blue marble"),
    ("5", r"5\text{ blue marbles}"),
    ("5 min", "5 minutes"),
    ("5 m", "5 meters"),
    (r"5\text{ square meters}", r"5\text{ m}^2"),
    ("60 mph", "60 miles per hour"),
    ("12 USD", r"\$12"),
    ("12 euros", "€12"),
    (r"34\text{th}", "34"),
    (r"34\text{ times}", "34"),
    ("12:30", "12:30"),
    ("2:3", r"\frac23"),
    (r"\frac{1}{20}", "1:20"),
    ("12 pounds", "£12"),
    ("12 pounds", "12 lb"),
]


@pytest.mark.parametrize(("stated", "right"), _NO_UNITS)
def test_a_word_that_changes_a_number_is_no_unit(stated, right):
    assert not same_mathematics(stated, right)


@pytest.mark.parametrize(("stated", "right"), _UNITS)
def test_a_unit_may_be_written_either_way_or_left_out(stated, right):
    assert same_mathematics(stated, right)
