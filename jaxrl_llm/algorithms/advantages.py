# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Advantages of whole answers: one number per sequence, from the rewards of its group.

`rewards` are [B, G]: B prompts, G samples each. `valid` is False where no verdict could be formed: such a row is
left out of its group's statistics and gets 0; `drop_unjudged` takes it out of the mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxrl_llm.errors import RewardError


def reward_arrays(
    rewards: Sequence[float | None], group_size: int
) -> tuple[Float[np.ndarray, "B G"], Bool[np.ndarray, "B G"]]:
    """Rewards of N = B·G rollouts, group by group, as (values, valid); None becomes 0 and not valid.

    Source: outcome rewards of GRPO, https://arxiv.org/abs/2402.03300, Section 4.1.2.

    Raises:
        RewardError: a reward is NaN or infinite, or the number of rewards is no multiple of `group_size`.
    """
    if len(rewards) % group_size:
        raise RewardError(
            "the rewards do not fill whole groups",
            got=f"{len(rewards)} rewards",
            expected=f"a multiple of the group size {group_size}",
        )
    valid = np.array([reward is not None for reward in rewards], bool)
    values = np.array([0.0 if reward is None else reward for reward in rewards], np.float64)
    if not np.isfinite(values).all():
        row = int(np.argmin(np.isfinite(values)))
        raise RewardError(
            f"the reward of rollout {row} is not finite",
            got=values[row],
            expected="a finite number, or None where no verdict could be formed",
        )
    return values.reshape(-1, group_size), valid.reshape(-1, group_size)


def drop_unjudged(mask: Bool[Array, "N T"], valid: Bool[Array, "B G"]) -> Bool[Array, "N T"]:
    """The mask without the rows that could not be judged: they are neither trained on nor counted.

    Source: overlong filtering of DAPO, https://arxiv.org/abs/2503.14476, Section 3.4 (the same act, another cause).
    """
    return mask & valid.reshape(-1, 1)


def informative_groups(
    rewards: Float[Array, "B G"], valid: Bool[Array, "B G"] | None = None
) -> Bool[Array, " B"]:
    """True for groups whose judged rewards differ: whole groups are kept or dropped, never single rows.

    Source: dynamic sampling of DAPO, https://arxiv.org/abs/2503.14476, Eq. 11.
    """
    low, high = _group_range(rewards, _all_if_none(rewards, valid))
    return (high > low)[:, 0]


def group_advantages(
    rewards: Float[Array, "B G"],
    valid: Bool[Array, "B G"] | None = None,
    *,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Float[Array, "B G"]:
    """Group-relative advantages with the group's standard deviation.

    ``A[b, g] = (r[b, g] − mean_g r) / (std_g r + eps)``

    Identical rewards, a group with fewer than two judged rows, and a row that was not judged give exactly 0.

    Source: GRPO, https://arxiv.org/abs/2402.03300, Section 4.1.2.

    Args:
        valid: rows that were judged; all if None.
        ddof: 1 for the unbiased standard deviation (as verl and TRL), 0 for the population's.
    """
    rewards, valid = _wide(rewards), _all_if_none(rewards, valid)
    centred = mean_advantages(rewards, valid)
    free = jnp.maximum(_group_count(rewards, valid) - ddof, 1.0)
    std = jnp.sqrt(jnp.sum(jnp.square(centred), axis=1, keepdims=True) / free)
    return centred / (std + eps)


def mean_advantages(
    rewards: Float[Array, "B G"], valid: Bool[Array, "B G"] | None = None
) -> Float[Array, "B G"]:
    """``A[b, g] = r[b, g] − mean_g r``: the group's mean as baseline, no division by its spread.

    Identical rewards, a group with fewer than two judged rows, and a row that was not judged give exactly 0.

    Source: Dr. GRPO, https://arxiv.org/abs/2503.20783, Section 3.2.
    """
    rewards, valid = _wide(rewards), _all_if_none(rewards, valid)
    mean = _group_sum(rewards, valid) / jnp.maximum(_group_count(rewards, valid), 1.0)
    low, high = _group_range(rewards, valid)
    return jnp.where(valid & (high > low), rewards - mean, jnp.zeros_like(rewards))


def _wide(values):
    return values.astype(jnp.promote_types(values.dtype, jnp.float32))


def _all_if_none(rewards, valid):
    return jnp.ones(rewards.shape, bool) if valid is None else valid


def _group_sum(values, valid):
    return jnp.sum(jnp.where(valid, values, jnp.zeros_like(values)), axis=1, keepdims=True)


def _group_count(values, valid):
    return jnp.sum(valid, axis=1, keepdims=True, dtype=values.dtype)


def _group_range(rewards, valid):
    """Lowest and highest judged reward of each group; a mean in floats differs from its own equal terms."""
    low = jnp.min(jnp.where(valid, rewards, jnp.inf), axis=1, keepdims=True)
    high = jnp.max(jnp.where(valid, rewards, -jnp.inf), axis=1, keepdims=True)
    return low, high


# name → (function, the arrays it reads). The function's keyword-only parameters are its settings.
ADVANTAGES = {
    "group_std": (group_advantages, ("rewards", "valid")),
    "group_mean": (mean_advantages, ("rewards", "valid")),
}
GROUP_ADVANTAGES = frozenset({"group_std", "group_mean"})
