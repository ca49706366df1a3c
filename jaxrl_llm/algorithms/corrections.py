# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Corrections for tokens that another policy chose: a stale one, or a sampler with other rounding.

Everything speaks of ``w = π_old / μ``: `logp_old`, the trainer's policy at the start of the update,
over `logp_sampler`, the policy that drew the tokens. Weights are detached. A correction
multiplies the policy term; what it drops still counts in the denominator, so no trainer has to
know about it. `rejection_mask` can also be taken out of the mask before counting.
"""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.algorithms.kl import k1, k2, k3
from jaxrl_llm.algorithms.ratios import LOG_RATIO_BOUND, bounded_exp
from jaxrl_llm.algorithms.reductions import (
    on_mask,
    sequence_maximum,
    sequence_mean,
    sequence_total,
)

WeightLevel = Literal["token", "sequence", "geometric"]
WEIGHT_LEVELS: tuple[str, ...] = ("token", "sequence", "geometric")


def importance_weights(
    logp_old: Float[Array, "N T"],
    logp_sampler: Float[Array, "N T"],
    mask: Bool[Array, "N T"],
    segment_ids: Int[Array, "N T"] | None = None,
    *,
    level: WeightLevel = "token",
) -> Float[Array, "N T"]:
    """``w = exp(log π_old − log μ)`` per token; 0 off the mask. Log-ratios are clipped to ±20.

    At level ``sequence`` every token has the product over its sequence (unbiased, of high
    variance), at ``geometric`` its geometric mean.

    Source: https://fengyao.notion.site/off-policy-rl (token); https://richardli.xyz/rl-collapse
    (sequence and geometric).
    """
    assert level in WEIGHT_LEVELS, level
    log_ratio = on_mask(logp_old, mask) - on_mask(logp_sampler, mask)
    if level == "sequence":
        log_ratio = sequence_total(log_ratio, mask, segment_ids)
    elif level == "geometric":
        log_ratio = sequence_mean(log_ratio, mask, segment_ids)
    return jax.lax.stop_gradient(on_mask(bounded_exp(log_ratio), mask))


def plain_weights(weights: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """The weights as they are: the behaviour weight of decoupled PPO, without a cap.

    Source: decoupled PPO, https://arxiv.org/abs/2110.00641; AReaL,
    https://arxiv.org/abs/2505.24298.
    """
    return weights


def truncated_weights(
    weights: Float[Array, "*S"], *, correction_high: float = 2.0
) -> Float[Array, "*S"]:
    """``min(w, C)``: truncated importance sampling (TIS).

    Source: https://fengyao.notion.site/off-policy-rl.
    """
    return jnp.minimum(weights, correction_high)


def masked_weights(
    weights: Float[Array, "*S"], *, correction_high: float = 2.0
) -> Float[Array, "*S"]:
    """``w`` up to C and 0 above: masked importance sampling (MIS).

    Source: https://richardli.xyz/rl-collapse.
    """
    return jnp.where(weights <= correction_high, weights, jnp.zeros_like(weights))


def icepop_weights(
    weights: Float[Array, "*S"], *, correction_low: float = 0.5, correction_high: float = 5.0
) -> Float[Array, "*S"]:
    """``w`` inside [low, high] and 0 outside: IcePop.

    Source: https://ringtech.notion.site/icepop.
    """
    inside = (weights >= correction_low) & (weights <= correction_high)
    return jnp.where(inside, weights, jnp.zeros_like(weights))


def rejection_mask(
    logp_old: Float[Array, "N T"],
    logp_sampler: Float[Array, "N T"],
    mask: Bool[Array, "N T"],
    segment_ids: Int[Array, "N T"] | None = None,
    *,
    rejection: str = "token_k1",
    rejection_low: float | None = None,
    rejection_high: float = 2.0,
) -> Bool[Array, "N T"]:
    """The tokens of `mask` that are kept when a mismatch statistic stays within its bounds.

    The statistics estimate KL(μ ‖ π_old), so they are functions of ``log μ − log π_old``:

    - k1 statistics keep ``low ≤ exp(k1) ≤ high``: the bounds apply to **μ/π_old** (the sampler
      over the trainer), not to the weight π_old/μ; low is 1/high where not set;
    - k2 and k3 statistics, never negative, keep ``k ≤ high`` (in nats) and have no lower bound.

    ``token_*`` looks at each token, ``sequence_sum_*``, ``sequence_mean_*`` and ``sequence_max_*``
    at whole sequences. Log-ratios are clipped to ±20 first.

    Source: https://richardli.xyz/rl-collapse; verl's rejection sampling,
    https://verl.readthedocs.io/en/latest/algo/rollout_corr_math.html.
    """
    assert rejection in REJECTIONS, rejection
    level, _, estimator = rejection.rpartition("_")
    gap = on_mask(logp_sampler, mask) - on_mask(logp_old, mask)
    gap = jnp.clip(gap, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    statistic = {"k1": k1, "k2": k2, "k3": k3}[estimator](gap, jnp.zeros_like(gap))
    over = {
        "sequence_sum": sequence_total,
        "sequence_mean": sequence_mean,
        "sequence_max": sequence_maximum,
    }
    if level != "token":
        statistic = over[level](statistic, mask, segment_ids)
    if estimator != "k1":
        return mask & (statistic <= rejection_high)
    low = 1.0 / rejection_high if rejection_low is None else rejection_low
    return mask & (statistic >= math.log(low)) & (statistic <= math.log(rejection_high))


def off_policy_sequences(
    logp: Float[Array, "N T"],
    logp_sampler: Float[Array, "N T"],
    advantages: Float[Array, "N T"],
    mask: Bool[Array, "N T"],
    segment_ids: Int[Array, "N T"] | None = None,
    *,
    delta: float,
) -> Bool[Array, "N T"]:
    """The tokens that off-policy sequence masking keeps.

    Dropped are tokens with ``A < 0`` in sequences with ``(1/|o|) Σ_t (log μ − log π) > δ``: bad
    answers that the current policy has already moved away from. μ is the policy that sampled, so
    both staleness and rounding count.

    Source: DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, Section 3.1.
    """
    gap = on_mask(logp_sampler, mask) - on_mask(jax.lax.stop_gradient(logp), mask)
    drift = sequence_mean(gap, mask, segment_ids)
    return mask & ~((on_mask(advantages, mask) < 0) & (drift > delta))


# name → function of the weights; its keyword-only parameters are its settings.
CORRECTIONS = {
    "plain": plain_weights,
    "truncate": truncated_weights,
    "mask": masked_weights,
    "icepop": icepop_weights,
}
REJECTIONS: tuple[str, ...] = (
    *(f"token_k{i}" for i in (1, 2, 3)),
    *(f"sequence_sum_k{i}" for i in (1, 2, 3)),
    *(f"sequence_mean_k{i}" for i in (1, 2, 3)),
    *(f"sequence_max_k{i}" for i in (2, 3)),
)
