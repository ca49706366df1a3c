# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Rewards for the form of a completion, whatever it says."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from jaxrl_llm.errors import RewardError
from jaxrl_llm.types import Rollout


@dataclasses.dataclass(frozen=True)
class Matches:
    """1 where the whole completion matches a regular expression, otherwise 0.

    Attributes:
        pattern: as in Python's `re`; `.` matches newlines too.
    """

    pattern: str

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern, re.DOTALL)
        except re.error as error:
            raise RewardError(
                "the pattern of a format reward is not a regular expression",
                got=f"{self.pattern!r} ({error})",
            ) from None

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        pattern = re.compile(self.pattern, re.DOTALL)
        return [float(pattern.fullmatch(rollout.completion) is not None) for rollout in rollouts]


THINK_THEN_ANSWER = Matches(
    r"\s*<think>(?!\s*</think>)(?:(?!</?think>).)+</think>\s*(?!.*</?think>)\S.*"
)
"""One block of thought, then an answer (the format of https://arxiv.org/abs/2501.12948)."""


def stops(rollouts: Sequence[Rollout]) -> list[float]:
    """1 where the policy ended the completion itself, 0 where the length limit did."""
    return [float(rollout.finish_reason == "stop") for rollout in rollouts]
