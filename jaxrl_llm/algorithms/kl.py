# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Estimators of the KL divergence from a reference, per token at a fixed prefix."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

LOG_RATIO_BOUND = 20.0


def bounded_exp(
    log_ratio: Float[Array, "*S"], bound: float = LOG_RATIO_BOUND
) -> Float[Array, "*S"]:
    """``exp(clip(x, −bound, bound))``: never overflows; the gradient is 0 outside the bounds.

    Source: the ratio of PPO, https://arxiv.org/abs/1707.06347, Eq. 6, with a numerical guard of our own.
    """
    return jnp.exp(jnp.clip(log_ratio, -bound, bound))


def k1(logp: Float[Array, "*S"], logp_ref: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """``log π − log π_ref``: unbiased for the KL's value, of either sign.

    As a loss its gradient is ∇log π, whose expectation under π is 0: it descends nothing (use `k2` or a
    straight-through form). In the reward it is exact.

    Source: Schulman, http://joschu.net/blog/kl-approx.html.
    """
    return logp - logp_ref


def k2(logp: Float[Array, "*S"], logp_ref: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """``½ (log π − log π_ref)²``: a biased value; on-policy its gradient descends the reverse KL(π‖π_ref).

    Source: Schulman, http://joschu.net/blog/kl-approx.html; the gradient, https://arxiv.org/abs/2510.01555.
    """
    return 0.5 * jnp.square(logp - logp_ref)


def k3(logp: Float[Array, "*S"], logp_ref: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """``exp(−x) − 1 + x`` with ``x = log π − log π_ref``: unbiased and never negative; GRPO's estimator.

    As a loss, on-policy, its gradient (1 − π_ref/π)∇log π descends the forward KL(π_ref‖π), not the reverse one.
    The exponent is bounded at ±20.

    Source: Schulman, http://joschu.net/blog/kl-approx.html; GRPO, https://arxiv.org/abs/2402.03300, Eq. 4.
    """
    x = logp - logp_ref
    return bounded_exp(-x) - 1.0 + x


KL_ESTIMATORS: dict[str, Callable] = {"k1": k1, "k2": k2, "k3": k3}
