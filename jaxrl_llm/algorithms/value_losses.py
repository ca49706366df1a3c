# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Losses of the critic, per token."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def value_loss(values: Float[Array, "*S"], returns: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """``½ (V − R)²`` per token.

    Source: PPO, https://arxiv.org/abs/1707.06347, Eq. 9 (with the factor ½).
    """
    return 0.5 * jnp.square(values - returns)


def clipped_value_loss(
    values: Float[Array, "*S"],
    returns: Float[Array, "*S"],
    old_values: Float[Array, "*S"],
    *,
    value_clip: float = 0.2,
) -> tuple[Float[Array, "*S"], Bool[Array, "*S"]]:
    """``½ max((V − R)², (clip(V, V_old ± c) − R)²)`` per token, and where the clip decides.

    The critic moves no further than c from its old prediction, unless that makes the error larger.

    Source: GAE's companion trick as described in https://arxiv.org/abs/2005.12729.
    """
    clipped = old_values + jnp.clip(values - old_values, -value_clip, value_clip)
    free, bound = jnp.square(values - returns), jnp.square(clipped - returns)
    return 0.5 * jnp.maximum(free, bound), bound > free
