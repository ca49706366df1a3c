# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Losses of reward models: Bradley–Terry on pairs of scores, cross-entropy at step marks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.algorithms.reductions import widened


def bradley_terry_loss(
    chosen: Float[Array, " P"],
    rejected: Float[Array, " P"],
    margin: Float[Array, " P"] | None = None,
    *,
    center_coef: float = 0.0,
) -> Float[Array, " P"]:
    """``−log σ(r_c − r_r − m) + c (r_c + r_r)²`` for each pair of scores.

    Source: Bradley–Terry in InstructGPT, https://arxiv.org/abs/2203.02155, Eq. 1; margins:
    https://arxiv.org/abs/2307.09288, Eq. 2; centring: https://arxiv.org/abs/2312.09244, Eq. 2.

    Args:
        margin: by how much the chosen reply is better, in units of the score.
        center_coef: c, draws the scores of a pair towards a sum of 0.
    """
    chosen, rejected = widened(chosen), widened(rejected)
    difference = chosen - rejected
    if margin is not None:
        difference = difference - margin.astype(difference.dtype)
    loss = -jax.nn.log_sigmoid(difference)
    return loss + center_coef * jnp.square(chosen + rejected) if center_coef else loss


def step_loss(
    logits: Float[Array, "N T 2"], labels: Int[Array, "N T"], marks: Bool[Array, "N T"]
) -> Float[Array, "N T"]:
    """``−log softmax(logits)[label]`` at step marks, 0 elsewhere: what stands there is not read.

    Source: process supervision, https://arxiv.org/abs/2305.20050, Section 2.6.

    Args:
        logits: of "the step is wrong" and "the step is right" at every token.
        labels: 1 where the step that ends here is right, 0 where it is wrong.
        marks: the last token of each step.
    """
    wide = widened(jnp.where(marks[:, :, None], logits, jnp.zeros((), logits.dtype)))
    chosen = jnp.take_along_axis(
        jax.nn.log_softmax(wide, axis=-1), jnp.where(marks, labels, 0)[:, :, None], axis=-1
    )
    return jnp.where(marks, -chosen[:, :, 0], 0.0)


def calibration_error(
    probability: Float[Array, " P"], valid: Bool[Array, " P"], bins: int = 10
) -> Float[Array, ""]:
    """Expected calibration error of "the chosen reply is better" claims, in [0, 1].

    Of each pair the more likely verdict is taken: its confidence ``max(p, 1 − p)`` against whether
    it is right (``p > ½``), over `bins` equal bins from ½ to 1, weighted by their sizes.

    Source: https://arxiv.org/abs/1706.04599, Eq. 3.
    """
    wide = widened(probability)
    confidence, right = jnp.maximum(wide, 1.0 - wide), (wide > 0.5) & valid
    place = jnp.clip(jnp.floor((confidence - 0.5) * (2 * bins)), 0, bins - 1).astype(jnp.int32)
    member = (place[:, None] == jnp.arange(bins, dtype=jnp.int32)[None, :]) & valid[:, None]
    surplus = confidence - right.astype(wide.dtype)
    gaps = jnp.abs(jnp.sum(jnp.where(member, surplus[:, None], 0.0), axis=0))
    return jnp.sum(gaps) / jnp.maximum(jnp.sum(valid), 1).astype(wide.dtype)
