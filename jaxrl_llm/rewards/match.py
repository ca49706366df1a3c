# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Verifiers for answers in words: multiple choice, exact and fuzzy match.

Each judges the stated answer (`jaxrl_llm.rewards.answer`: the last `Answer:` line or box), or with
`whole=True` the whole completion.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Sequence

from jaxrl_llm.rewards.answer import answer_text, stated_answer
from jaxrl_llm.rewards.math_choices import chosen_letter
from jaxrl_llm.types import Rollout


def _said(rollout: Rollout, whole: bool) -> str | None:
    return rollout.completion.strip() if whole else stated_answer(rollout.completion)


@dataclasses.dataclass(frozen=True)
class MultipleChoice:
    """1 where exactly the right letter is chosen, otherwise 0.

    `B`, `(B)`, `B.` and `(B) its text` choose B, in upper or lower case; naming a second letter
    chooses nothing. `prompt.answer` is the letter, alone or in brackets.

    Attributes:
        whole: judge the whole completion.
    """

    whole: bool = False

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        return [
            float(_choice(_said(r, self.whole)) == _right_choice(r.prompt.answer)) for r in rollouts
        ]


def _choice(text: str | None) -> str | None:
    return chosen_letter(text) if text else None


def _right_choice(answer: object) -> str:
    letter = str(answer).strip().strip("().").upper()
    if not re.fullmatch("[A-Z]", letter):
        raise ValueError(f"the right choice {answer!r} is not a letter")
    return letter


@dataclasses.dataclass(frozen=True)
class ExactMatch:
    """1 where the answer is `prompt.answer`, or one of them if that is a list; otherwise 0.

    Attributes:
        whole: judge the whole completion.
        normalize: compare without case, punctuation, articles and extra space (as SQuAD does,
            https://arxiv.org/abs/1606.05250).
    """

    whole: bool = False
    normalize: bool = True

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        return [self._match(_said(r, self.whole), _right_answers(r)) for r in rollouts]

    def _match(self, said: str | None, answers: list[str]) -> float:
        if said is None:
            return 0.0
        if not self.normalize:
            return float(said in answers)
        words = _words(said)
        return float(bool(words) and words in [_words(answer) for answer in answers])


@dataclasses.dataclass(frozen=True)
class FuzzyMatch:
    """F1 between the words of the answer and of `prompt.answer` (the best, if that is a list).

    `2·p·r / (p + r)` with p the share of the answer's words that are right and r the share of the
    right words that are there: more words than needed cost.

    Attributes:
        whole: judge the whole completion.
        least: anything below earns 0.
    """

    whole: bool = False
    least: float = 0.0

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        return [self._best(_said(r, self.whole), _right_answers(r)) for r in rollouts]

    def _best(self, said: str | None, answers: list[str]) -> float:
        best = max((_f1(_words(said or ""), _words(answer)) for answer in answers), default=0.0)
        return best if best >= self.least else 0.0


def _right_answers(rollout: Rollout) -> list[str]:
    answer = rollout.prompt.answer
    return [answer_text(each) for each in (answer if isinstance(answer, list) else [answer])]


def _words(text: str) -> list[str]:
    words = re.findall(r"\w+", text.casefold())
    return [word for word in words if word not in ("a", "an", "the")] or words


def _f1(left: list[str], right: list[str]) -> float:
    shared = sum((collections.Counter(left) & collections.Counter(right)).values())
    return 2.0 * shared / (len(left) + len(right)) if shared else 0.0
