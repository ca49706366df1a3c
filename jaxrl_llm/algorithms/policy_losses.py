# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Per-token objectives: what each token contributes to the loss (to be minimised) before any reduction.

Every function is elementwise, takes the log-ratio ``log π − log π_old`` at the level that the algorithm chose
(token or sequence), and returns the loss and the indicators that become metrics.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.algorithms.kl import bounded_exp

TokenLoss = tuple[Float[Array, "N T"], dict[str, Array]]


def clipped_surrogate(
    log_ratio: Float[Array, "N T"],
    advantages: Float[Array, "N T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    ratio_cap: float | None = None,
) -> TokenLoss:
    """PPO's clipped surrogate with separate bounds, and optionally a bound for bad tokens.

    ``loss = −min(r A, clip(r, 1 − low, 1 + high) A)``, ``r = exp(log_ratio)``. With `dual_clip` c, tokens of
    negative advantage never cost more than ``−c A``; with `ratio_cap` δ, r is replaced by ``min(r, δ)`` in the
    unclipped term. For δ = c ≥ 1 + high the two are equal.

    Source: PPO, https://arxiv.org/abs/1707.06347, Eq. 7; separate bounds, DAPO, https://arxiv.org/abs/2503.14476,
    Eq. 8; dual clip, https://arxiv.org/abs/1912.09729, Eq. 4; two-sided cap, INTELLECT-2,
    https://arxiv.org/abs/2505.07291.
    """
    ratio = bounded_exp(log_ratio)
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    free = ratio if ratio_cap is None else jnp.minimum(ratio, ratio_cap)
    loss = jnp.maximum(-advantages * free, -advantages * clipped)
    if dual_clip is not None:
        loss = jnp.where(advantages < 0, jnp.minimum(loss, -advantages * dual_clip), loss)
    low = (ratio < 1.0 - clip_low) & (advantages < 0)
    high = (ratio > 1.0 + clip_high) & (advantages > 0)
    return loss, {
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low | high,
    }


# name → (function, the arrays it reads). The function's keyword-only parameters are its settings.
POLICY_LOSSES = {"clip": (clipped_surrogate, ("log_ratio", "advantages"))}
