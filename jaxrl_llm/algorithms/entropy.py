# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What keeps a policy exploring: entropy thresholds, adaptive coefficients, temperatures."""

from __future__ import annotations

import math
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def masked_quantile(
    values: Float[Array, "N T"], mask: Bool[Array, "N T"], fraction: float
) -> Float[Array, ""]:
    """The quantile of the values on the mask, with linear interpolation; 0 if the mask is empty.

    Source: definition 7 of Hyndman and Fan 1996, https://doi.org/10.2307/2684934.
    """
    ordered = jnp.sort(jnp.where(mask, values, jnp.full((), jnp.inf, values.dtype)).ravel())
    count = jnp.sum(mask, dtype=jnp.int32)
    place = fraction * jnp.maximum(count - 1, 0).astype(values.dtype)
    below = jnp.floor(place).astype(jnp.int32)
    above = jnp.minimum(below + 1, jnp.maximum(count - 1, 0))
    part = place - below.astype(values.dtype)
    quantile = ordered[below] + part * (ordered[above] - ordered[below])
    return jnp.where(count > 0, quantile, jnp.zeros_like(quantile))


def entropy_threshold(
    entropy: Float[Array, "N T"], mask: Bool[Array, "N T"], top_fraction: float
) -> Float[Array, ""]:
    """The entropy from which a token is among the `top_fraction` of the optimiser batch.

    The policy term is then kept on tokens with ``entropy >= threshold``; its count stays that of
    all trained tokens.

    Source: https://arxiv.org/abs/2506.01939 (policy gradients on the top 20 % of tokens).
    """
    return masked_quantile(entropy, mask, 1.0 - top_fraction)


def adaptive_entropy_coef(
    coef: float, entropy: float, *, target: float, step: float, maximum: float
) -> float:
    """The next coefficient: up by `step` while the entropy is below the target, else down.

    Stays within [0, maximum]. The bonus is applied only while the entropy is at or below the
    target: see `active_entropy_coef`.

    Source: Skywork-OR1, https://arxiv.org/abs/2505.22312 (adaptive entropy control).
    """
    moved = coef + step if entropy < target else coef - step
    return min(max(moved, 0.0), maximum)


def active_entropy_coef(coef: float, entropy: float, *, target: float) -> float:
    """The coefficient that the loss uses: `coef` while entropy ≤ target, else 0.

    Source: Skywork-OR1, https://arxiv.org/abs/2505.22312 (adaptive entropy control).
    """
    return coef if entropy <= target else 0.0


def scheduled_temperature(
    step: int,
    *,
    start: float,
    end: float,
    steps: int,
    shape: Literal["linear", "cosine"] = "linear",
) -> float:
    """The sampling temperature at a step: from `start` to `end` over `steps`, then constant.

    The policy that is trained is the one at this temperature, on both sides.

    Source: staged temperatures of POLARIS, https://hkunlp.github.io/blog/2025/Polaris/.
    """
    done = min(max(step / max(steps, 1), 0.0), 1.0)
    if shape == "cosine":
        done = 0.5 * (1.0 - math.cos(math.pi * done))
    return start + (end - start) * done
