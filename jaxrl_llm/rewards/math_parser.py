# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""From a mathematical expression in LaTeX, or as typed, to SymPy; nothing is ever evaluated as
code.

What is not understood raises `NotMathematics`, and so does what would be too large to work out,
such as 9^{9^{9^{9}}}: the sizes of powers and factorials are known before they are computed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import sympy

_MOST_CHARACTERS = 2000
_MOST_DEPTH = 60
_MOST_DIGITS = 2000
_LARGEST_FACTORIAL = 300

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[0-9]+\.(?=\\overline)|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
    r"|(?P<command>\\[A-Za-z]+|\\.)|(?P<word>[A-Za-z]+)|(?P<sign>\S))"
)
_SPACING = re.compile(
    r"\\(?:left|right|[bB]ig+[lr]?|displaystyle|limits|q?quad)(?![A-Za-z])|\\[,;:!> ]|[~$]"
)
_REPLACED = {
    **{f"\\{kind}frac": "\\frac" for kind in "dtc"},
    **{"\\lbrack": "[", "\\rbrack": "]", "\\lparen": "(", "\\rparen": ")"},
    **{"\\lvert": "|", "\\rvert": "|", "{,}": "", "**": "^", "½": "\\frac12 "},
    **{"−": "-", "–": "-", "×": "*", "·": "*", "÷": "/", "²": "^2", "³": "^3"},
    **{"π": "\\pi ", "∞": "\\infty ", "√": "\\sqrt "},
}
_TIMES = ("*", "\\cdot", "\\times", "\\ast")
_DIVIDED = ("/", "\\div", ":")
_FUNCTIONS: dict[str, Callable] = {
    **{n: getattr(sympy, n) for n in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh")},
    **{"tanh": sympy.tanh, "exp": sympy.exp, "ln": sympy.log, "log": sympy.log},
    **{"arcsin": sympy.asin, "arccos": sympy.acos, "arctan": sympy.atan, "lg": sympy.log},
    **{"asin": sympy.asin, "acos": sympy.acos, "atan": sympy.atan},
}
_CONSTANTS = {"pi": sympy.pi, "infty": sympy.oo, "infinity": sympy.oo, "inf": sympy.oo}
_GREEK = frozenset(
    re.findall(
        "[A-Za-z]+",
        "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu"
        " xi rho sigma tau upsilon phi varphi chi psi omega"
        " Gamma Delta Theta Lambda Xi Sigma Upsilon Phi Psi Omega",
    )
)
_FONTS = ("\\mathrm", "\\mathbf", "\\mathit", "\\boldsymbol", "\\mathbb", "\\operatorname", "\\bf")


class NotMathematics(ValueError):
    """The text is no expression that is understood here, or one too large to work out."""


def parse(text: str) -> sympy.Expr:
    """Reads an expression.

    Understood: numbers, letters with subscripts, + - · × / ^ !, fractions, mixed numbers, repeating
    decimals, roots, absolute values, binomials, π, e, i, ∞ and elementary functions. Decimals are
    exact. A word of three or more letters that is no function is text, not a product of letters.

    Raises:
        NotMathematics: see there.
    """
    if len(text) > _MOST_CHARACTERS:
        raise NotMathematics("too long")
    for old, new in _REPLACED.items():
        text = text.replace(old, new)
    tokens = _tokens(_SPACING.sub(" ", text))
    if not tokens:
        raise NotMathematics("empty")
    parser = _Parser(tokens)
    try:
        expression = parser.sum()
    except (RecursionError, ArithmeticError, TypeError, AttributeError) as error:
        raise NotMathematics(str(error)) from None
    if parser.place != len(tokens):
        raise NotMathematics(f"unexpected {tokens[parser.place]}")
    return expression


def _tokens(text: str) -> list[str]:
    tokens = []
    for match in _TOKEN.finditer(text):
        word = match["word"]
        if word is None or word in _FUNCTIONS or word in _CONSTANTS or word == "sqrt":
            tokens.append(match[0].strip() if word is None else f"\\{word}")
        elif len(word) > 2 and match.start("word") and tokens and tokens[-1] in _FONTS:
            tokens += word
        elif len(word) > 2:
            raise NotMathematics(f"the word {word}")
        else:
            tokens += word
    return tokens


class _Parser:
    """Recursive descent; every rule takes what it can and leaves `place` behind it."""

    def __init__(self, tokens: list[str]):
        self.tokens, self.place, self.depth = tokens, 0, 0

    def peek(self, ahead: int = 0) -> str:
        place = self.place + ahead
        return self.tokens[place] if place < len(self.tokens) else ""

    def take(self, *wanted: str) -> str:
        token = self.peek()
        if not token or (wanted and token not in wanted):
            raise NotMathematics(f"expected {' or '.join(wanted)}, got {token or 'the end'}")
        self.place += 1
        return token

    def sum(self) -> sympy.Expr:
        self.depth += 1
        if self.depth > _MOST_DEPTH:
            raise NotMathematics("too deep")
        total = self.signed()
        while self.peek() in ("+", "-"):
            sign = self.take()
            term = self.product()
            total = total + term if sign == "+" else total - term
        self.depth -= 1
        return total

    def signed(self) -> sympy.Expr:
        sign = 1
        while self.peek() in ("+", "-"):
            sign = -sign if self.take() == "-" else sign
        return sign * self.product()

    def product(self) -> sympy.Expr:
        value = self.power()
        while True:
            token = self.peek()
            if token in _TIMES:
                self.take()
                value = value * self.signed_power()
            elif token in _DIVIDED:
                self.take()
                divisor = self.signed_power()
                if divisor == 0:
                    raise NotMathematics("division by 0")
                value = value / divisor
            elif self.starts_factor(token):
                # Two numbers side by side are no product: "33 34" says nothing.
                if token[0].isdigit() or token[0] == ".":
                    raise NotMathematics("a number after a factor")
                value = value * self.power()
            else:
                return value

    def signed_power(self) -> sympy.Expr:
        return -self.signed_power() if self.peek() == "-" and self.take() else self.power()

    def starts_factor(self, token: str) -> bool:
        if not token or token in ("|",):
            return False
        named = token[1:] in _FUNCTIONS or token[1:] in _CONSTANTS or token[1:] in _GREEK
        return (
            token[0].isalnum()
            or token in ("(", "{", "[", "\\frac", "\\sqrt", "\\binom", *_FONTS)
            or (token[0] == "\\" and named)
        )

    def power(self) -> sympy.Expr:
        value = self.atom()
        while self.peek() in ("^", "!"):
            if self.take() == "!":
                value = _factorial(value)
            else:
                return _power(value, self.argument(signed=True))
        return value

    def argument(self, *, signed: bool = False) -> sympy.Expr:
        """A braced group or, as TeX takes it, one digit or letter (`\\frac12`, `x^2`)."""
        token = self.peek()
        if token == "{":
            return self.group("{", "}")
        if token and token[0].isdigit() and not signed and token.isdigit():
            self.tokens[self.place : self.place + 1] = list(token)
        if signed and token == "-":
            self.take()
            return -self.argument(signed=True)
        return self.atom()

    def group(self, left: str, *right: str) -> sympy.Expr:
        self.take(left)
        value = self.sum()
        self.take(*right)
        return value

    def atom(self) -> sympy.Expr:
        token = self.peek()
        if not token:
            raise NotMathematics("unexpected end")
        if token[0].isdigit() or token[0] == ".":
            return self.number()
        if token in ("(", "[", "{"):
            return self.group(token, {"(": ")", "[": "]", "{": "}"}[token])
        if token == "|":
            return sympy.Abs(self.group("|", "|"))
        if token in _FONTS:
            self.take()
            return self.argument()
        if token.isalpha():
            return self.letter(self.take())
        name = self.take()[1:]
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        if name in _GREEK:
            return self.letter(name)
        if name == "frac":
            above, below = self.argument(), self.argument()
            if below == 0:
                raise NotMathematics("division by 0")
            return above / below
        if name == "sqrt":
            return self.root()
        if name == "binom":
            above, below = self.argument(), self.argument()
            if not (above.is_Integer and below.is_Integer and abs(above) <= _LARGEST_FACTORIAL):
                raise NotMathematics("a binomial of large or unknown numbers")
            return sympy.binomial(above, below)
        if name in _FUNCTIONS:
            return self.function(name)
        raise NotMathematics(f"unknown {token}")

    def number(self) -> sympy.Expr:
        token = self.take()
        if len(token) > _MOST_DIGITS:
            raise NotMathematics("too many digits")
        value = sympy.Rational(token.rstrip("."))
        if self.peek() == "\\overline" and "." in token:
            self.take()
            self.take("{")
            period = self.take()
            self.take("}")
            if not period.isdigit() or len(period) > _MOST_DIGITS:
                raise NotMathematics("a repeating decimal of no digits")
            places = len(token.partition(".")[2])
            return value + sympy.Rational(int(period), 10**places * (10 ** len(period) - 1))
        if token.isdigit() and (fraction := self.proper_fraction()) is not None:
            return value + fraction
        return value

    def proper_fraction(self) -> sympy.Expr | None:
        """The fraction of a mixed number: `1\\frac{2}{3}` or `1 2/3`."""
        if self.peek() == "\\frac":
            before = self.place
            tokens = "".join(self.tokens[before + 1 : before + 7])
            match = re.match(r"\{([0-9]+)\}\{([0-9]+)\}|([0-9])([0-9])(?![0-9])", tokens)
            length = 7 if match and match[1] else 2
        else:
            tokens = " ".join(self.tokens[self.place : self.place + 3])
            match = re.match(r"([0-9]+) / ([0-9]+)$", tokens)
            length = 3
        if match is None:
            return None
        above, below = (int(group) for group in match.groups() if group is not None)
        if above >= below:
            raise NotMathematics("a number before a fraction of 1 or more")
        self.place += length
        return sympy.Rational(above, below)

    def letter(self, name: str) -> sympy.Expr:
        if self.peek() == "_":
            self.take()
            if self.peek() == "{":
                end = self.place
                while end < len(self.tokens) and self.tokens[end] != "}":
                    end += 1
                name += "_" + "".join(self.tokens[self.place + 1 : end])
                self.place = min(end + 1, len(self.tokens))
            else:
                name += "_" + self.take()
        return {"e": sympy.E, "i": sympy.I}.get(name) or sympy.Symbol(name)

    def root(self) -> sympy.Expr:
        degree = sympy.Integer(2)
        if self.peek() == "[":
            degree = self.group("[", "]")
        radicand = self.group("(", ")") if self.peek() == "(" else self.argument()
        if degree == 0:
            raise NotMathematics("a root of degree 0")
        if degree.is_Integer and degree % 2 == 1 and radicand.is_Rational and radicand < 0:
            return -_power(-radicand, 1 / degree)  # the real root
        return _power(radicand, 1 / degree)

    def function(self, name: str) -> sympy.Expr:
        base = exponent = None
        while self.peek() in ("_", "^"):
            if self.take() == "_":
                base = self.argument()
            else:
                exponent = self.argument(signed=True)
        if self.peek() in ("(", "[", "{"):
            argument = self.atom()
        else:
            argument = self.power()
            while self.starts_factor(self.peek()) and self.peek()[1:] not in _FUNCTIONS:
                argument = argument * self.power()
        if name in ("log", "lg") and base is None and name == "lg":
            base = sympy.Integer(10)
        if exponent == -1:
            inverse = {"sin": sympy.asin, "cos": sympy.acos, "tan": sympy.atan}.get(name)
            if inverse is None:
                raise NotMathematics(f"an inverse of {name}")
            return inverse(argument)
        value = _bounded(_FUNCTIONS[name], argument)
        if base is not None:
            value = value / sympy.log(base)
        return value if exponent is None else _power(value, exponent)


# ----------------------------------------------------------------------------
# Sizes
# ----------------------------------------------------------------------------


def _power(base: sympy.Expr, exponent: sympy.Expr) -> sympy.Expr:
    if base.is_Rational and exponent.is_Rational:
        if digits(base) * abs(exponent) > _MOST_DIGITS and base not in (0, 1, -1):
            raise NotMathematics("too large a power")
        if base == 0 and exponent < 0:
            raise NotMathematics("division by 0")
    elif base.is_number and exponent.is_number:
        size = _magnitude(base) * _magnitude(exponent)
        if not size <= _MOST_DIGITS**2:
            raise NotMathematics("too large a power")
    elif exponent.is_Rational and digits(exponent) > 6:
        raise NotMathematics("too large an exponent")
    return base**exponent


def _bounded(function: Callable, argument: sympy.Expr) -> sympy.Expr:
    if argument.is_number and not _magnitude(argument) <= 10 * _MOST_DIGITS:
        raise NotMathematics("too large an argument")
    return function(argument)


def digits(value: sympy.Rational) -> float:
    """Decimal digits of the larger of numerator and denominator, not rounded."""
    return max(1.0, math.log10(max(abs(value.p), value.q, 2)))


def _magnitude(value: sympy.Expr) -> float:
    """How large a number is; infinite if that is not known."""
    if value.is_Rational:
        return abs(float(value)) if digits(value) < 300 else math.inf
    approximate = value.evalf(10)
    try:
        return float(abs(approximate))
    except (TypeError, OverflowError):
        return math.inf


def _factorial(value: sympy.Expr) -> sympy.Expr:
    if not (value.is_Integer and 0 <= value <= _LARGEST_FACTORIAL):
        raise NotMathematics("a factorial of a large or unknown number")
    return sympy.factorial(value)
