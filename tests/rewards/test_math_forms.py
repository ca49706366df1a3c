# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Other ways to write the right answer, and what they could be mistaken for."""

from __future__ import annotations

import pytest

from jaxrl_llm.rewards.math_answers import same_mathematics

_SAME = [
    (r"\{\}", r"\emptyset"),
    (r"\varnothing", r"\emptyset"),
    (r"\{1,1,2\}", r"\{1,2\}"),
    ("x>2", r"(2,\infty)"),
    (r"(2,\infty)", "x>2"),
    ("2<x", r"(2,\infty)"),
    (r"x\le 1", r"(-\infty,1]"),
    ("1<x<2", r"x\in(1,2)"),
    ("2>x>1", "(1,2)"),
    (r"1\le x<2", "[1,2)"),
    (r"x\in(1,2)", "(1,2)"),
    ("½", r"\frac12"),
    ("−½", r"-\frac12"),
    ("-(-34)", "34"),
    (r"x\geqslant3", r"x\ge3"),
    (r"\langle1,2\rangle", "(1,2)"),
    ("101_2", "101_{2}"),
    (r"\sqrt[3]{-8}", "-2"),
    ("m+n=34", "34"),
    (r"1\pm2", r"\{-1,3\}"),
    (r"0.\dot{3}", "1/3"),
    (r"34^{\text{th}}", "34"),
    (r"\angle A=30^\circ", "30"),
    (r"\angle ABC = 30^\circ", r"30^\circ"),
]

_OTHER = [
    (r"\{0\}", r"\emptyset"),
    (r"\{1,1,2\}", r"\{1,2,2,3\}"),
    ("1,1,2", "1,2"),
    ("x>2", r"[2,\infty)"),
    (r"x\ge 2", r"(2,\infty)"),
    ("x<2", r"(2,\infty)"),
    ("1<x<2", "(1,3)"),
    ("1<x>2", "(1,2)"),
    ("2<1", "(1,2)"),
    ("2x>4", r"(2,\infty)"),
    ("x>y", r"(y,\infty)"),
    ("-(34)", "34"),
    ("-(-30-4)", "34"),
    ("101_3", "101_{2}"),
    ("x+x=34", "34"),
    ("m+n=33", "34"),
    (r"1\pm2", r"\{-1,2\}"),
    (r"33\pm1", "34"),
    (r"0.\dot{3}4", "1/3"),
    (r"34^{\text{two}}", "34"),
    (r"\angle A=30^\circ", "60"),
    (r"\sqrt{-4}", "-2"),
]


@pytest.mark.parametrize(("stated", "right"), _SAME)
def test_another_way_to_write_it(stated, right):
    assert same_mathematics(stated, right)


@pytest.mark.parametrize(("stated", "right"), _OTHER)
def test_not_another_way_to_write_it(stated, right):
    assert not same_mathematics(stated, right)
