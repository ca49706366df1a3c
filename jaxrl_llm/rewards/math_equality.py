# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Whether two SymPy expressions are the same: exact arithmetic, or values at a few points."""

from __future__ import annotations

import functools

import sympy

from jaxrl_llm.rewards.math_parser import digits

_PRECISION = 60
_AGREE = sympy.Rational(1, 10**40)


@functools.cache
def _probe_points(symbol: str) -> tuple[sympy.Expr, ...]:
    """Where expressions are compared: off the real axis and on its negative side, per symbol."""
    offset = sum(ord(c) * (k + 1) for k, c in enumerate(symbol)) % 97
    return (
        sympy.Rational(1201 + offset, 977),
        -sympy.Rational(1409 + offset, 1013),
        sympy.Rational(733 + offset, 601) + sympy.I * sympy.Rational(389 + offset, 467),
    )


def equal(left: sympy.Expr, right: sympy.Expr) -> bool:
    """Whether two expressions are the same function of their symbols.

    Rationals are compared exactly. Anything else must agree to 40 digits at a positive, a negative
    and a complex point: chance agreement is out of the question, and √(x²) differs from x there.
    """
    if left == right:
        return True
    if left.is_Rational and right.is_Rational:
        return False
    if left.is_infinite or right.is_infinite:
        return False
    for long, other in ((left, right), (right, left)):
        # A long decimal is not the irrational number that it begins like.
        if long.is_Rational and digits(long) > 30 and other.is_number:
            return False
    # A number too small to show at any point must stand on both sides.
    if _long_numbers(left) != _long_numbers(right):
        return False
    values = [
        _values(expression, left.free_symbols | right.free_symbols) for expression in (left, right)
    ]
    return all(
        a is not None and b is not None and _close(a, b) for a, b in zip(*values, strict=True)
    )


def _long_numbers(expression: sympy.Expr) -> set[sympy.Expr]:
    return {number for number in expression.atoms(sympy.Rational) if digits(number) > 30}


def proportional(left: sympy.Expr, right: sympy.Expr) -> bool:
    """Whether `left = 0` and `right = 0` are one equation: their ratio is a constant other than
    0.
    """
    symbols = left.free_symbols | right.free_symbols
    pairs = list(zip(_values(left, symbols), _values(right, symbols), strict=True))
    if not symbols or any(a is None or b is None or _close(b, 0) or _close(a, 0) for a, b in pairs):
        return False
    ratios = [(a / b).evalf(_PRECISION) for a, b in pairs]
    return all(_close(ratio, ratios[0]) for ratio in ratios[1:])


def _values(expression: sympy.Expr, symbols: set[sympy.Symbol]) -> list[sympy.Expr | None]:
    values: list[sympy.Expr | None] = []
    for k in range(3 if symbols else 1):
        points = {symbol: _probe_points(symbol.name)[k] for symbol in symbols}
        value = expression.subs(points).evalf(_PRECISION, maxn=4 * _PRECISION)
        values.append(value if value.is_number and value.is_finite else None)
    return values


def _close(a: sympy.Expr, b: sympy.Expr | int) -> bool:
    difference = abs(a - b).evalf(_PRECISION)
    largest = max(1, abs(a).evalf(_PRECISION))
    return bool(difference <= _AGREE * largest)
