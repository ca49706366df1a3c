# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Advantages of whole answers: one number per sequence, from the rewards of its group.

`rewards` are [B, G]: B prompts, G samples each. `valid` is False where no verdict could be formed:
such a row is left out of every statistic and gets 0; `drop_unjudged` takes it out of the mask.
Where rows are compared with their group, a group with fewer than two judged rows gets exactly 0,
and so do identical rewards, whatever the rounding of their mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxrl_llm.algorithms.reductions import widened
from jaxrl_llm.errors import RewardError


def reward_arrays(
    rewards: Sequence[float | None], group_size: int
) -> tuple[Float[np.ndarray, "B G"], Bool[np.ndarray, "B G"]]:
    """Rewards of N = B·G rollouts, group by group, as (values, valid); None is 0 and not valid.

    Source: outcome rewards of GRPO, https://arxiv.org/abs/2402.03300, Section 4.1.2.

    Raises:
        RewardError: a reward is NaN or infinite, or the rewards do not fill whole groups.
    """
    if len(rewards) % group_size:
        raise RewardError(
            "the rewards do not fill whole groups",
            got=f"{len(rewards)} rewards",
            expected=f"a multiple of the group size {group_size}",
        )
    valid = np.array([reward is not None for reward in rewards], bool)
    values = np.array([0.0 if reward is None else reward for reward in rewards], np.float64)
    check_finite(values)
    return values.reshape(-1, group_size), valid.reshape(-1, group_size)


def check_finite(rewards: np.ndarray, what: str = "the reward of rollout") -> None:
    """Refuses rewards, one or several per row, that would poison their group.

    Source: outcome rewards of GRPO, https://arxiv.org/abs/2402.03300, Section 4.1.2.

    Raises:
        RewardError: a reward is NaN or infinite.
    """
    if not np.isfinite(rewards).all():
        place = int(np.argmin(np.isfinite(rewards)))
        row = place // (rewards.size // len(rewards))
        raise RewardError(
            f"{what} {row} is not finite",
            got=rewards.ravel()[place],
            expected="a finite number, or None where no verdict could be formed",
        )


def drop_unjudged(mask: Bool[Array, "N T"], valid: Bool[Array, "B G"]) -> Bool[Array, "N T"]:
    """The mask without the rows that could not be judged: neither trained on nor counted.

    Source: overlong filtering of DAPO, https://arxiv.org/abs/2503.14476, Section 3.4.
    """
    return mask & valid.reshape(-1, 1)


def informative_groups(
    rewards: Float[Array, "B G"], valid: Bool[Array, "B G"] | None = None
) -> Bool[Array, " B"]:
    """True for groups whose judged rewards differ: whole groups go or stay, never single rows.

    Source: dynamic sampling of DAPO, https://arxiv.org/abs/2503.14476, Eq. 11.
    """
    return _differs(rewards, _all_if_none(rewards, valid))[:, 0]


def group_advantages(
    rewards: Float[Array, "B G"],
    valid: Bool[Array, "B G"] | None = None,
    *,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Float[Array, "B G"]:
    """``A[b, g] = (r[b, g] − mean_g r) / (std_g r + eps)``.

    Source: GRPO, https://arxiv.org/abs/2402.03300, Section 4.1.2.

    Args:
        valid: rows that were judged; all if None.
        ddof: 1 for the unbiased standard deviation (as verl and TRL), 0 for the population's.
    """
    rewards, valid = widened(rewards), _all_if_none(rewards, valid)
    return divided(mean_advantages(rewards, valid), _group_std(rewards, valid, ddof) + eps)


def mean_advantages(
    rewards: Float[Array, "B G"], valid: Bool[Array, "B G"] | None = None
) -> Float[Array, "B G"]:
    """``A[b, g] = r[b, g] − mean_g r``: the group's mean as baseline, not divided by its spread.

    Source: Dr. GRPO, https://arxiv.org/abs/2503.20783.
    """
    rewards, valid = widened(rewards), _all_if_none(rewards, valid)
    return _where_informative(rewards - _group_mean(rewards, valid), rewards, valid)


def leave_one_out_advantages(
    rewards: Float[Array, "B G"], valid: Bool[Array, "B G"] | None = None
) -> Float[Array, "B G"]:
    """``A[b, g] = r[b, g] − mean of the others' r = n/(n − 1) (r[b, g] − mean_g r)``.

    Source: RLOO, https://arxiv.org/abs/2402.14740.
    """
    rewards, valid = widened(rewards), _all_if_none(rewards, valid)
    count = _group_count(rewards, valid)
    return mean_advantages(rewards, valid) * count / jnp.maximum(count - 1.0, 1.0)


def greedy_baseline_advantages(
    rewards: Float[Array, "B G"], valid: Bool[Array, "B G"], greedy_rewards: Float[Array, " B"]
) -> Float[Array, "B G"]:
    """``A[b, g] = r[b, g] − r(greedy answer to prompt b)``; groups of one are welcome.

    Source: ReMax, https://arxiv.org/abs/2310.10505.
    """
    rewards = widened(rewards)
    difference = rewards - greedy_rewards[:, None].astype(rewards.dtype)
    return jnp.where(valid, difference, jnp.zeros_like(rewards))


def length_weighted_advantages(
    rewards: Float[Array, "B G"], valid: Bool[Array, "B G"], lengths: Float[Array, "B G"]
) -> Float[Array, "B G"]:
    """``A[b, g] = r[b, g] − Σ_g l r / Σ_g l`` with l the number of trained tokens.

    The baseline of least variance where a gradient's squared norm grows with the answer's length.

    Source: OPO, https://arxiv.org/abs/2505.23585.
    """
    rewards = widened(rewards)
    lengths = jnp.where(valid, lengths.astype(rewards.dtype), jnp.zeros_like(rewards))
    total = jnp.sum(lengths, axis=1, keepdims=True)
    weighted = _group_sum(rewards * lengths, valid)
    baseline = weighted / jnp.maximum(total, 1.0)
    return _where_informative(rewards - baseline, rewards, valid)


def gpg_advantages(
    rewards: Float[Array, "B G"],
    valid: Bool[Array, "B G"] | None = None,
    *,
    gpg_factor: Literal["informative", "nonzero_rewards"] = "informative",
) -> Float[Array, "B G"]:
    """``A = α (r − mean_g r)``, α making up for the rows that carry no gradient.

    ``informative``: α = (judged rows) / (judged rows in groups whose rewards differ), the paper's
    B/(B − M). ``nonzero_rewards``: α = (judged rows) / (rows with a reward other than 0), as verl
    computes it. α is a statistic of the whole rollout batch.

    Source: GPG, https://arxiv.org/abs/2504.02546 (accurate gradient estimation).
    """
    rewards, valid = widened(rewards), _all_if_none(rewards, valid)
    counted = valid & (_differs(rewards, valid) if gpg_factor == "informative" else rewards != 0.0)
    rows = jnp.sum(valid, dtype=rewards.dtype)
    factor = rows / jnp.maximum(jnp.sum(counted, dtype=rewards.dtype), 1.0)
    return factor * mean_advantages(rewards, valid)


def best_of_group_advantages(
    rewards: Float[Array, "B G"],
    valid: Bool[Array, "B G"] | None = None,
    *,
    normalize_std: bool = False,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Float[Array, "B G"]:
    """``A[b, g] = max_g r − max of the others' r``: only the best row has one, by its lead.

    The leave-one-out gradient of pass@G (the expected maximum). With a tie for the best all are 0.

    Source: https://arxiv.org/abs/2503.19595 (leave-one-out control variate).

    Args:
        normalize_std: divide by the group's standard deviation + eps, as verl does.
    """
    rewards, valid = widened(rewards), _all_if_none(rewards, valid)
    judged = jnp.where(valid, rewards, -jnp.inf)
    best = jnp.max(judged, axis=1, keepdims=True)
    leads = valid & (judged == best)
    alone = jnp.sum(leads, axis=1, keepdims=True) == 1
    second = jnp.max(jnp.where(leads, -jnp.inf, judged), axis=1, keepdims=True)
    lead = jnp.where(leads & alone & jnp.isfinite(second), best - second, jnp.zeros_like(rewards))
    if normalize_std:
        lead = divided(lead, _group_std(rewards, valid, ddof) + eps)
    return lead


def pass_at_k_advantages(
    rewards: Float[Array, "B G"], valid: Bool[Array, "B G"] | None = None, *, pass_k: int = 2
) -> Float[Array, "B G"]:
    """Advantages of pass@k over all subsets of k rows, in closed form.

    With n judged rows, m of them wrong (reward ≤ 0), ``R = 1 − C(m,k)/C(n,k)`` and
    ``σ = √(R(1 − R))``: a right row gets ``(1 − R)/σ``, a wrong one
    ``(1 − R − C(m−1,k−1)/C(n−1,k−1))/σ``. 0 where σ = 0, or where fewer than k rows were judged.

    Source: Pass@k Training, https://arxiv.org/abs/2508.10751 (analytical derivation).
    """
    rewards, valid = widened(rewards), _all_if_none(rewards, valid)
    right = valid & (rewards > 0.0)
    count = _group_count(rewards, valid)
    wrong = _group_count(rewards, valid & ~right)
    missed = _choose_ratio(wrong, count, pass_k)
    sigma = jnp.sqrt(missed * (1.0 - missed))
    with_me = _choose_ratio(wrong - 1.0, count - 1.0, pass_k - 1)
    ready = valid & (sigma > 0.0) & (count >= pass_k)
    raw = jnp.where(right, missed, missed - with_me)
    return jnp.where(ready, raw / jnp.where(sigma > 0.0, sigma, 1.0), jnp.zeros_like(rewards))


def maximum_likelihood_advantages(
    rewards: Float[Array, "B G"], valid: Bool[Array, "B G"] | None = None, *, eps: float = 0.0
) -> Float[Array, "B G"]:
    """``A[b, g] = (r[b, g] − mean_g r) / (mean_g r + eps)`` for rewards ≥ 0; 0 where the mean is.

    The gradient of log pass rate rather than of the pass rate, truncated at G samples.

    Source: MaxRL, https://arxiv.org/abs/2602.02710.
    """
    rewards, valid = widened(rewards), _all_if_none(rewards, valid)
    mean = _group_mean(rewards, valid)
    scale = jnp.where(mean > 0.0, mean + eps, jnp.ones_like(mean))
    centred = mean_advantages(rewards, valid)
    return jnp.where(mean > 0.0, centred / scale, jnp.zeros_like(rewards))


def divided(values: Float[Array, "*S"], spread: Float[Array, "*#S"]) -> Float[Array, "*S"]:
    """``values / spread``, and 0 where the spread is: without an eps equal rewards would be 0/0.

    Source: GRPO, https://arxiv.org/abs/2402.03300, Section 4.1.2.
    """
    return jnp.where(spread > 0.0, values / jnp.where(spread > 0.0, spread, 1.0), 0.0)


def _all_if_none(rewards, valid):
    return jnp.ones(rewards.shape, bool) if valid is None else valid


def _group_sum(values, valid):
    return jnp.sum(jnp.where(valid, values, jnp.zeros_like(values)), axis=1, keepdims=True)


def _group_count(values, valid):
    return jnp.sum(valid, axis=1, keepdims=True, dtype=values.dtype)


def _group_mean(rewards, valid):
    return _group_sum(rewards, valid) / jnp.maximum(_group_count(rewards, valid), 1.0)


def _group_std(rewards, valid, ddof):
    centred = mean_advantages(rewards, valid)
    free = jnp.maximum(_group_count(rewards, valid) - ddof, 1.0)
    return jnp.sqrt(jnp.sum(jnp.square(centred), axis=1, keepdims=True) / free)


def _differs(rewards, valid):
    """[B, 1]: whether the judged rewards of a group differ; a rounded mean could not tell."""
    low = jnp.min(jnp.where(valid, rewards, jnp.inf), axis=1, keepdims=True)
    high = jnp.max(jnp.where(valid, rewards, -jnp.inf), axis=1, keepdims=True)
    return high > low


def _where_informative(advantages, rewards, valid):
    return jnp.where(valid & _differs(rewards, valid), advantages, jnp.zeros_like(advantages))


def _choose_ratio(part, whole, k):
    """C(part, k) / C(whole, k), as a product of k factors, 0 where part < k."""
    ratio = jnp.ones_like(whole)
    for i in range(k):
        ratio = ratio * jnp.maximum(part - i, 0.0) / jnp.maximum(whole - i, 1.0)
    return ratio


# name → (function, the arrays it reads). The function's keyword-only parameters are its settings.
SEQUENCE_ADVANTAGES = {
    "group_std": (group_advantages, ("rewards", "valid")),
    "group_mean": (mean_advantages, ("rewards", "valid")),
    "leave_one_out": (leave_one_out_advantages, ("rewards", "valid")),
    "greedy_baseline": (greedy_baseline_advantages, ("rewards", "valid", "greedy_rewards")),
    "length_weighted": (length_weighted_advantages, ("rewards", "valid", "lengths")),
    "gpg": (gpg_advantages, ("rewards", "valid")),
    "best_of_group": (best_of_group_advantages, ("rewards", "valid")),
    "pass_at_k": (pass_at_k_advantages, ("rewards", "valid")),
    "maximum_likelihood": (maximum_likelihood_advantages, ("rewards", "valid")),
}
