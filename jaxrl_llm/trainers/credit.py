# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Rewards of rollouts → what every token is worth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.algorithms.advantages import reward_arrays
from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.errors import RewardError
from jaxrl_llm.types import Batch, Rollout

_LARGEST_REWARD = 1e15


def credit(
    batch: Batch,
    rollouts: Sequence[Rollout],
    baseline: Sequence[Rollout],
    algorithm: Algorithm,
    *,
    group_size: int,
    reward_parts: Sequence[str],
    kl_coef: float,
) -> Batch:
    """The batch with an advantage for each token, and returns where there is a critic.

    Every statistic is that of the whole batch; rollouts that were not judged get 0.

    Args:
        batch: samples, with the log-probabilities and values that the algorithm needs.
        rollouts: those of the samples, group by group.
        baseline: a greedy rollout for each group, where the algorithm needs them.
        reward_parts: names of the rewards that count.
        kl_coef: the present coefficient of a KL in the reward.
    """
    rewards, valid = reward_arrays(values(rollouts), group_size)
    inputs: dict[str, Any] = {"valid": valid, "values": batch.values}
    if algorithm.needs_greedy_baseline:
        greedy, judged = reward_arrays(values(baseline), 1)
        inputs |= {"greedy_rewards": greedy[:, 0], "valid": valid & judged}
    if algorithm.needs_reward_parts:
        unjudged = dict.fromkeys(reward_parts, 0.0)
        parts = [r.reward.parts if r.reward else unjudged for r in rollouts]
        table = [[row[name] for name in reward_parts] for row in parts]
        inputs["reward_parts"] = np.array(table).reshape(*rewards.shape, -1)
    if algorithm.needs_rollout_logp:
        inputs |= {"logp": batch.logp_old, "logp_ref": batch.logp_ref, "kl_coef": kl_coef}
    estimate = algorithm.estimate(rewards, batch.mask, **inputs)
    found = {"advantages": np.asarray(estimate.advantages, np.float32)}
    if algorithm.needs_values:
        found["returns"] = np.asarray(estimate.returns, np.float32)
    return batch.replace(**found)


def values(rollouts: Sequence[Rollout]) -> list[float | None]:
    """The reward of each rollout, None where no verdict could be formed."""
    rewards = [None if rollout.reward is None else rollout.reward.value for rollout in rollouts]
    largest = max((abs(reward) for reward in rewards if reward is not None), default=0.0)
    if largest > _LARGEST_REWARD:
        raise RewardError(
            "a reward is too large: the squares of its group's spread overflow float32",
            got=f"{largest:g}",
            expected=f"at most {_LARGEST_REWARD:g} in magnitude",
            hint="a smaller weight",
        )
    return rewards
