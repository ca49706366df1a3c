# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Which groups of rollouts a step learns from: dynamic sampling."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Literal

from jaxrl_llm.errors import ConfigError, DataError
from jaxrl_llm.types import Prompt, Rollout

Refill = Literal["off", "prompts", "samples"]


@dataclasses.dataclass(frozen=True)
class GroupFilter:
    """Dynamic sampling (DAPO, https://arxiv.org/abs/2503.14476, Sec. 3.2).

    A group whose samples all got the same reward has no advantage to learn from. It is dropped as a
    whole and its place filled again, with exactly as many prompts as are missing, so that the batch
    always has its size and no group that was kept is ever thrown away.

    Attributes:
        refill: "off"; "prompts": the next prompts take the place of dropped ones; "samples": the
            same prompt is sampled anew.
        max_rounds: how often a step samples at most; groups dropped in the last round are trained
            on as they are (and teach nothing).
        reward: the reward that must differ within a group; None: their weighted sum. Name the
            unshaped one, or a length penalty makes every group look informative.
    """

    refill: Refill = "off"
    max_rounds: int = 8
    reward: str | None = None

    def __post_init__(self) -> None:
        if self.refill == "off" and (self.max_rounds, self.reward) != (8, None):
            raise ConfigError(
                "filter.max_rounds and filter.reward have no effect without dynamic sampling",
                hint="--filter.refill=prompts",
            )
        if self.refill != "off" and self.max_rounds < 2:
            raise ConfigError(
                "filter.max_rounds is too small to refill", got=self.max_rounds, expected="≥ 2"
            )

    @property
    def rounds(self) -> int:
        """How often a step can sample."""
        return 1 if self.refill == "off" else self.max_rounds


@dataclasses.dataclass
class Collected:
    """Groups in the order of their places.

    Attributes:
        groups: one list of rollouts per place of the batch.
        filtered: whether groups could be dropped at all.
        rounds: how often was sampled.
        dropped: groups that were dropped.
    """

    groups: list[list[Rollout]]
    filtered: bool
    rounds: int
    dropped: list[list[Rollout]]

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group]

    @property
    def sampled(self) -> list[Rollout]:
        """All rollouts, dropped groups included."""
        return self.rollouts + [rollout for group in self.dropped for rollout in group]

    def metrics(self) -> dict[str, float]:
        """Of dynamic sampling, where it is on."""
        if not self.filtered:
            return {}
        return {
            "sampling/rounds": float(self.rounds),
            "sampling/groups_dropped": float(len(self.dropped)),
        }


def collect(
    prompts: Sequence[Prompt],
    sample: Callable[[Sequence[Prompt], int], list[list[Rollout]]],
    next_prompts: Callable[[int, Collection[str]], list[Prompt]],
    rule: GroupFilter,
) -> Collected:
    """Sample until every place of the batch holds an informative group, or the rounds are over.

    Args:
        prompts: one per place.
        sample: (prompts, round) → a scored group for each.
        next_prompts: (count, ids that the batch already holds) → so many prompts more.

    Raises:
        DataError: no reward has the part that decides.
    """
    groups = sample(prompts, 0)
    if rule.refill != "off":
        check_part(groups, rule.reward)
    rounds = 1
    dropped: list[list[Rollout]] = []
    while rule.refill != "off" and rounds < rule.max_rounds:
        places = [i for i, group in enumerate(groups) if not informative(group, rule.reward)]
        if not places:
            break
        again = [groups[place][0].prompt for place in places]
        dropped += [groups[place] for place in places]
        if rule.refill == "prompts":
            kept = {group[0].prompt.id for i, group in enumerate(groups) if i not in places}
            again = next_prompts(len(places), kept)
        for place, group in zip(places, sample(again, rounds), strict=True):
            groups[place] = group
        rounds += 1
    return Collected(groups, rule.refill != "off", rounds, dropped)


def check_part(groups: Sequence[Sequence[Rollout]], reward: str | None) -> None:
    """Refuses a part that no rollout's reward has: every group would be dropped, for ever."""
    verdicts = [rollout.reward for group in groups for rollout in group]
    judged = [verdict for verdict in verdicts if verdict is not None]
    if reward is None or not judged or any(reward in verdict.parts for verdict in judged):
        return
    raise DataError(
        "no reward has the part that filter.reward names",
        got=reward,
        expected=", ".join(sorted({part for verdict in judged for part in verdict.parts}))
        or "None: the reward itself",
    )


def informative(group: Sequence[Rollout], reward: str | None) -> bool:
    """Whether two samples of the group that could be judged differ in this reward."""
    judged = [rollout.reward for rollout in group if rollout.reward is not None]
    values = {verdict.value if reward is None else verdict.parts.get(reward) for verdict in judged}
    return len(values - {None}) > 1
