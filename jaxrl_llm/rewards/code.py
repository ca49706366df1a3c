# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Rewards for programs: extracted from the completion, run in the sandbox, graded in parts."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any

from jaxrl_llm.errors import RewardError
from jaxrl_llm.rewards.code_tests import LANGUAGES, CodeReport, Language, run_tests
from jaxrl_llm.rewards.sandbox import Limits, Runner, Sandbox
from jaxrl_llm.types import Reward, Rollout

_FENCE = re.compile(r"^ {0,3}(?P<fence>`{3,}|~{3,})(?P<label>[^\r\n`]*)\r?$", re.MULTILINE)
_AT_ONCE = 8


# ----------------------------------------------------------------------------
# Extraction
# ----------------------------------------------------------------------------


def last_fenced_block(rollout: Rollout) -> str | None:
    """The text of the completion's last fenced block; None if there is none, or it is not closed.

    A fence is a line of three or more backticks or tildes, as in CommonMark; the block ends at the
    next line of at least as many of them and nothing else.
    """
    text, block, opening = rollout.completion, None, None
    for match in _FENCE.finditer(text):
        fence = match["fence"]
        if opening is None:
            opening = match
            block = None
        elif fence.startswith(opening["fence"]) and not match["label"].strip():
            block = text[opening.end() + 1 : match.start()]
            opening = None
    return block if opening is None else None


def continued_function(rollout: Rollout) -> str | None:
    """For models that continue a function: the column `code_prefix` and the lines of its body.

    The body ends at the first line that is not indented (that begins another function, say).
    """
    body = []
    for line in rollout.completion.split("\n"):
        if body and line.strip() and not line[0].isspace():
            break
        body.append(line)
    return rollout.prompt.columns["code_prefix"] + "\n".join(body) + "\n"


# ----------------------------------------------------------------------------
# The reward
# ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CodeWeights:
    """What each part is worth. Parts that a task does not have are left out and the others
    renormalised.

    Attributes:
        format: there is a program in the completion.
        compiles: it is valid.
        public: share of the public tests (column `public_tests`) that pass.
        hidden: share of the hidden tests (column `hidden_tests`) that pass.
        judge: what a judge says, in [0, 1].
    """

    format: float = 0.05
    compiles: float = 0.05
    public: float = 0.5
    hidden: float = 0.3
    judge: float = 0.1

    def __post_init__(self) -> None:
        for name, weight in dataclasses.asdict(self).items():
            if not (math.isfinite(weight) and 0 <= weight <= 1):
                raise RewardError(
                    f"the weight {name!r} of the code reward is out of range",
                    got=weight,
                    expected="0 to 1",
                )


ALL_OR_NOTHING = CodeWeights(format=0.0, compiles=0.0, public=0.0, hidden=0.0, judge=0.0)
"""Only `passed` counts: 1 if every test passed, otherwise 0."""


@dataclasses.dataclass(frozen=True)
class CodeReward:
    """Graded reward for a program: format → compiles → public tests → hidden tests (→ judge).

    `Σᵢ wᵢ·partᵢ / Σᵢ wᵢ` over the parts that the task has. A part is judged only if the one before
    it is not 0; an empty list of tests passes nothing. `passed`, which is 1 if there was a test and
    none failed, is reported beside the parts. See `jaxrl_llm.rewards.code_tests` for the form of
    tests.

    Attributes:
        weights: of the parts; `ALL_OR_NOTHING` pays `passed` alone.
        extract: from a rollout to the program's text, or None.
        runner: where programs run.
        limits: of each run.
        language: a name from `LANGUAGES`, or a recipe of one's own; tests of the kinds calls and
            asserts are for Python.
        judge: a reward function with values in [0, 1], asked about programs that compile.
    """

    weights: CodeWeights = CodeWeights()
    extract: Callable[[Rollout], str | None] = last_fenced_block
    runner: Runner = Sandbox()
    limits: Limits = Limits()
    language: str | Language = "python"
    judge: Callable[[Sequence[Rollout]], Sequence[Any]] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.language, Language) and self.language not in LANGUAGES:
            raise RewardError(
                "unknown programming language",
                got=repr(self.language),
                expected=", ".join(LANGUAGES),
            )

    @property
    def judges_alone(self) -> bool:
        """Whether each rollout can be judged by itself, while others are still sampled."""
        return self.judge is None or getattr(self.judge, "judges_alone", False)

    @property
    def stays(self) -> bool:
        """Whether it needs this process, as its judge does where that is a model."""
        return getattr(self.judge, "stays", False)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Reward | None]:
        """Judges completions; None where the sandbox or the judge was not available."""
        if not rollouts:
            return []
        with futures.ThreadPoolExecutor(min(_AT_ONCE, len(rollouts))) as pool:
            graded = list(pool.map(self._grade, rollouts))
        if self.judge is None:
            return [parts and self._reward(*parts) for parts in graded]
        valid = [i for i, each in enumerate(graded) if each and each[0].get("compiles")]
        opinions = dict(zip(valid, self.judge([rollouts[i] for i in valid]), strict=True))
        rewards: list[Reward | None] = []
        for i, each in enumerate(graded):
            opinion = opinions.get(i, 0.0)
            if each is None or opinion is None:
                rewards.append(None)
                continue
            value = opinion.value if isinstance(opinion, Reward) else float(opinion)
            if not 0 <= value <= 1:
                raise ValueError(f"the judge said {value}; it must be in [0, 1]")
            rewards.append(self._reward({**each[0], "judge": value}, each[1]))
        return rewards

    def _grade(self, rollout: Rollout) -> tuple[dict[str, float], tuple[str, ...]] | None:
        sets = {
            part: rollout.prompt.columns[f"{part}_tests"]
            for part in ("public", "hidden")
            if rollout.prompt.columns.get(f"{part}_tests") is not None
        }
        if not sets:
            raise ValueError(
                f"prompt {rollout.prompt.id} has neither public_tests nor hidden_tests; "
                f"it has {', '.join(rollout.prompt.columns) or 'no columns'}"
            )
        program = self.extract(rollout)
        parts = {"format": float(bool(program and program.strip())), "compiles": 0.0}
        parts |= {part: 0.0 for part in sets}
        passed: list[bool] = []
        notes: tuple[str, ...] = () if parts["format"] else ("no program",)
        for part, tests in sets.items():
            if not parts["format"] or (passed and not any(passed)):
                passed.append(False)
                continue
            report = self._run(program, tests)
            if not report.available:
                return None
            parts["compiles"] = max(parts["compiles"], float(bool(report.compiled)))
            parts[part] = sum(report.passed) / len(report.passed) if report.passed else 0.0
            passed += report.passed or (False,)
            notes += tuple(f"{part} {note}" for note in report.notes)
        return {**parts, "passed": float(bool(passed) and all(passed))}, notes

    def _run(self, program: str, tests: Mapping[str, Any]) -> CodeReport:
        language = self.language
        if not isinstance(language, Language):
            language = LANGUAGES[language]
        return run_tests(program, tests, self.runner, limits=self.limits, language=language)

    def _reward(self, parts: dict[str, float], notes: tuple[str, ...]) -> Reward:
        weights = {n: w for n, w in dataclasses.asdict(self.weights).items() if n in parts}
        total = sum(weights.values())
        value = parts["passed"]
        if total > 0:
            value = sum(weight * parts[name] for name, weight in weights.items()) / total
        return Reward(value, parts, {"notes": list(notes)} if notes else {})
