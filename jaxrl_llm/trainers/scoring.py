# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Rollouts → text and rewards, as far as possible while the sampler still works."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_llm.rewards.base import RewardRows
from jaxrl_llm.rewards.pool import ScoringPool
from jaxrl_llm.sharding.processes import gathered, of_first
from jaxrl_llm.text.thinking import opens_thinking, split_thinking
from jaxrl_llm.types import Rollout


class Scorer:
    """Renders completions and judges them by the rewards of a run.

    Args:
        rewards: as for `jaxrl_llm.rewards.base.score`.
        decode: tokens → text.
        workers: as for `jaxrl_llm.rewards.pool.ScoringPool`.
    """

    def __init__(self, rewards: RewardRows, decode: Callable[[list[int]], str], workers: int):
        self._decode = decode
        self._pool = ScoringPool(rewards, workers=workers)

    @property
    def lost(self) -> int:
        """Rollouts so far that are not judged because their reward ran out of time or died."""
        return self._pool.lost

    def submit(self, rollout: Rollout) -> Rollout:
        """The rollout with its completion as text; its scoring begins, if it can."""
        tokens = rollout.tokens[:-1] if rollout.finish_reason == "stop" else rollout.tokens
        text = self._decode(tokens.tolist())
        thought = split_thinking(text, opened=opens_thinking(rollout.prompt.text))
        rendered = dataclasses.replace(
            rollout, completion=text, thinking=thought.thinking, reply=thought.answer
        )
        self._pool.submit(rendered)
        return rendered

    def finish(self, rollouts: Sequence[Rollout], place: Callable[[Rollout], Any]) -> list[Rollout]:
        """The submitted rollouts of all processes with their rewards; waits for missing verdicts.

        Each process hands over its share. What judges each rollout by itself judges it there; other
        rewards get all rollouts at once, in order, in process 0.

        Args:
            place: of a rollout among all of them, which are sorted by it.
        """
        judged = self._pool.alone(rollouts)
        verdicts = [
            {name: values[i] for name, values in judged.items()} for i in range(len(rollouts))
        ]
        everyone = gathered(list(zip(rollouts, verdicts, strict=True)), "rollouts")
        everyone.sort(key=lambda pair: place(pair[0]))
        whole = [rollout for rollout, _ in everyone]
        every = {name: [said[name] for _, said in everyone] for name in judged}
        every |= of_first(lambda: self._pool.together(whole), "rewards of all rollouts")
        return [
            dataclasses.replace(rollout, reward=reward)
            for rollout, reward in zip(whole, self._pool.combine(every, whole), strict=True)
        ]

    def close(self) -> None:
        """Ends the processes that judge."""
        self._pool.close()
