# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Rewards for the length and the repetitiveness of completions; lengths are in tokens.

A penalty is a row of its own, so that the curves show it apart. `CosineLength` changes the scale of
another reward, and reports that reward unshaped beside it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jaxrl_llm.errors import RewardError
from jaxrl_llm.rewards.base import RewardFn, judge
from jaxrl_llm.types import Reward, Rollout


@dataclasses.dataclass(frozen=True)
class SoftOverlong:
    """Soft overlong punishment (DAPO, https://arxiv.org/abs/2503.14476, Eq. 13).

    With L tokens, the limit M and the cache C: 0 if L ≤ M - C, ((M - C) - L) / C up to M, -1 beyond
    it. Bounded below by -1.

    Attributes:
        limit: M.
        cache: C, the length of the slope, 0 < C ≤ M.
    """

    limit: int
    cache: int

    def __post_init__(self) -> None:
        if not 0 < self.cache <= self.limit:
            raise RewardError(
                "the slope of the overlong punishment does not fit below its limit",
                got=f"cache={self.cache} and limit={self.limit}",
                expected="0 < cache ≤ limit",
            )

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        start = self.limit - self.cache
        return [min(0.0, max(-1.0, (start - len(r.tokens)) / self.cache)) for r in rollouts]


@dataclasses.dataclass(frozen=True)
class CosineLength:
    """Cosine-scaled reward (https://arxiv.org/abs/2502.03373, Eq. 1): how long is an answer worth
    it?

    With L tokens and the limit M, a right answer is worth
    `right_long + ½ (right_short - right_long)(1 + cos(π L/M))`, a wrong one the same with
    `wrong_…`, and any answer of M tokens or more, or cut off, `exceeded`. The part `unshaped` is
    the reward itself.

    Attributes:
        reward: what says right (at least `threshold`) or wrong.
        limit: M.
        right_short, right_long: worth of a right answer of length 0 and of length M.
        wrong_short, wrong_long: worth of a wrong answer of length 0 and of length M.
        exceeded: worth of an answer that is too long.
        threshold: the smallest right reward.
    """

    reward: RewardFn
    limit: int
    right_short: float = 2.0
    right_long: float = 1.0
    wrong_short: float = -10.0
    wrong_long: float = 0.0
    exceeded: float = -10.0
    threshold: float = 0.5

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise RewardError("the limit of a length reward is not positive", got=self.limit)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Reward | None]:
        verdicts = judge({"reward": self.reward}, rollouts)["reward"]
        return [
            verdict
            and Reward(self._worth(verdict.value, r), {"unshaped": verdict.value}, verdict.info)
            for verdict, r in zip(verdicts, rollouts, strict=True)
        ]

    def _worth(self, value: float, rollout: Rollout) -> float:
        length = len(rollout.tokens)
        if length >= self.limit or rollout.finish_reason == "length":
            return self.exceeded
        right = value >= self.threshold
        short, long = (
            (self.right_short, self.right_long) if right else (self.wrong_short, self.wrong_long)
        )
        return long + 0.5 * (short - long) * (1.0 + math.cos(math.pi * length / self.limit))


@dataclasses.dataclass(frozen=True)
class Repetition:
    """Penalty for repeated n-grams of tokens: `-(1 - distinct / all)`, from 0 down to nearly -1.

    A completion of fewer than n tokens repeats nothing.

    Attributes:
        n: tokens in an n-gram.
    """

    n: int = 20

    def __post_init__(self) -> None:
        if self.n < 1:
            raise RewardError("an n-gram of no tokens", got=self.n, expected="n ≥ 1")

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        return [self._penalty(rollout.tokens.tolist()) for rollout in rollouts]

    def _penalty(self, tokens: list[int]) -> float:
        count = len(tokens) - self.n + 1
        if count < 1:
            return 0.0
        distinct = len({tuple(tokens[i : i + self.n]) for i in range(count)})
        return distinct / count - 1.0
