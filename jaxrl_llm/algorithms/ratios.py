# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Ratios between two policies, kept in logarithms until the last moment, and their levels.

A log-ratio is clipped to ±20 before the exponential (e²⁰ ≈ 4.9·10⁸), so nothing overflows; outside
these bounds a ratio has no gradient.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.algorithms.reductions import on_mask, sequence_mean

LOG_RATIO_BOUND = 20.0


def bounded_exp(
    log_ratio: Float[Array, "*S"], bound: float = LOG_RATIO_BOUND
) -> Float[Array, "*S"]:
    """``exp(clip(x, −bound, bound))``: never overflows; the gradient is 0 outside the bounds.

    Source: the ratio of PPO, https://arxiv.org/abs/1707.06347, Eq. 6, with a guard of our own.
    """
    return jnp.exp(jnp.clip(log_ratio, -bound, bound))


def token_level(
    log_ratio: Float[Array, "N T"],
    logp: Float[Array, "N T"],
    mask: Bool[Array, "N T"],
    segment_ids: Int[Array, "N T"] | None = None,
) -> Float[Array, "N T"]:
    """Every token keeps its own log-ratio.

    Source: PPO, https://arxiv.org/abs/1707.06347, Eq. 6; GRPO, https://arxiv.org/abs/2402.03300.
    """
    return on_mask(log_ratio, mask)


def sequence_level(
    log_ratio: Float[Array, "N T"],
    logp: Float[Array, "N T"],
    mask: Bool[Array, "N T"],
    segment_ids: Int[Array, "N T"] | None = None,
) -> Float[Array, "N T"]:
    """Every token has the mean log-ratio of its sequence: ``log s_i = (1/|y_i|) Σ_t log r_it``.

    Source: GSPO, https://arxiv.org/abs/2507.18071 (the definition of s_i).
    """
    return sequence_mean(log_ratio, mask, segment_ids)


def sequence_token_level(
    log_ratio: Float[Array, "N T"],
    logp: Float[Array, "N T"],
    mask: Bool[Array, "N T"],
    segment_ids: Int[Array, "N T"] | None = None,
) -> Float[Array, "N T"]:
    """The sequence's value with the token's own gradient: ``sg(log s_i) + log π − sg(log π)``.

    With an advantage that is constant over the sequence, and a reduction to sequence means, value
    and gradient equal those of `sequence_level`.

    Source: GSPO-token, https://arxiv.org/abs/2507.18071.
    """
    level = jax.lax.stop_gradient(sequence_mean(log_ratio, mask, segment_ids))
    logp = on_mask(logp, mask)
    return level + logp - jax.lax.stop_gradient(logp)


def loglinear_proximal(
    logp: Float[Array, "N T"],
    logp_sampler: Float[Array, "N T"],
    staleness: Int[Array, "N T"],
) -> Float[Array, "N T"]:
    """The proximal policy guessed without a forward pass, between the sampler and the current one.

    ``log π_prox ≈ log μ + α (sg(log π) − log μ)``, ``α = (v_prox − v_μ)/(v_π − v_μ) = (d − 1)/d``
    for a token whose weights are d updates old, and α = 0 for d = 0 and 1. Carries no gradient.

    Source: A-3PO, https://arxiv.org/abs/2512.06547, and
    https://inclusionai.github.io/AReaL/algorithms/prox_approx.html.

    Args:
        staleness: d, current version minus the version that chose the token, ≥ 0.
    """
    age = jnp.maximum(staleness, 1).astype(logp.dtype)
    alpha = (age - 1.0) / age
    return jax.lax.stop_gradient(logp_sampler + alpha * (logp - logp_sampler))


RATIO_LEVELS = {
    "token": token_level,
    "sequence": sequence_level,
    "sequence_token": sequence_token_level,
}
