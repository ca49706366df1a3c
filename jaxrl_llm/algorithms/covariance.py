# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Which tokens drive entropy down, by the covariance of log-probability and advantage.

The selections are made over the whole optimiser batch, in a first pass without gradients, and kept
as cut-offs, so that each micro-batch finds its own share of the chosen tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxrl_llm.algorithms.ratios import bounded_exp
from jaxrl_llm.algorithms.reductions import on_mask


@struct.dataclass
class BatchStats:
    """Statistics of the whole optimiser batch; what an algorithm does not read is 0.

    Source: https://arxiv.org/abs/2505.22617 (covariances); https://arxiv.org/abs/2506.01939
    (entropy).

    Attributes:
        entropy_threshold: from here on a token is among the most uncertain.
        mean_logp, mean_advantage: means over all trained tokens.
        covariance_cutoff: the k-th largest covariance (KL-Cov).
        score_cutoff: the k-th smallest random score among the candidates (Clip-Cov).
    """

    entropy_threshold: Float[Array, ""]
    mean_logp: Float[Array, ""]
    mean_advantage: Float[Array, ""]
    covariance_cutoff: Float[Array, ""]
    score_cutoff: UInt[Array, ""]


def empty_stats(dtype: jnp.dtype = jnp.float32) -> BatchStats:
    """Statistics before anything is filled in.

    Source: https://arxiv.org/abs/2505.22617.
    """
    zero = jnp.zeros((), dtype)
    return BatchStats(zero, zero, zero, zero, jnp.zeros((), jnp.uint32))


def with_means(
    stats: BatchStats,
    logp: Float[Array, "N T"],
    advantages: Float[Array, "N T"],
    mask: Bool[Array, "N T"],
) -> BatchStats:
    """`stats` with the means of log-probability and advantage over the mask.

    Source: https://arxiv.org/abs/2505.22617 (the definition of a token's covariance).
    """
    count = jnp.maximum(jnp.sum(mask, dtype=logp.dtype), 1.0)
    return stats.replace(
        mean_logp=jnp.sum(on_mask(logp, mask)) / count,
        mean_advantage=jnp.sum(on_mask(advantages, mask)) / count,
    )


def token_covariance(
    logp: Float[Array, "N T"], advantages: Float[Array, "N T"], stats: BatchStats
) -> Float[Array, "N T"]:
    """``(log π − mean log π)(A − mean A)``, without gradient.

    Source: https://arxiv.org/abs/2505.22617 (token-wise centred cross-product).
    """
    logp = jax.lax.stop_gradient(logp)
    return (logp - stats.mean_logp) * (advantages - stats.mean_advantage)


def clip_candidates(
    log_ratio: Float[Array, "N T"],
    logp: Float[Array, "N T"],
    advantages: Float[Array, "N T"],
    stats: BatchStats,
    clip_low: float,
    clip_high: float,
    cov_low: float,
    cov_high: float,
) -> Bool[Array, "N T"]:
    """Tokens with a covariance inside (low, high) whose gradient the ratio clip has not taken.

    Source: https://arxiv.org/abs/2505.22617 (Clip-Cov).
    """
    ratio = bounded_exp(jax.lax.stop_gradient(log_ratio))
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    stopped = -advantages * clipped > -advantages * ratio
    covariance = token_covariance(logp, advantages, stats)
    return (covariance > cov_low) & (covariance < cov_high) & ~stopped


def token_scores(
    tokens: Int[Array, "N T"], positions: Int[Array, "N T"], logp_sampler: Float[Array, "N T"]
) -> UInt[Array, "N T"]:
    """A pseudo-random number per token from what it is, not from where it lies in the batch.

    Mixes token id, position and the bits of the sampler's log-probability, so any split, padding
    or packing draws the same tokens, and every rollout others.

    Source: the uniform draw of Clip-Cov, https://arxiv.org/abs/2505.22617.
    """
    bits = jax.lax.bitcast_convert_type(logp_sampler.astype(jnp.float32), jnp.uint32)
    mixed = bits
    for part in (tokens.astype(jnp.uint32), positions.astype(jnp.uint32), jnp.zeros_like(bits)):
        mixed = (mixed ^ part) * jnp.uint32(0x9E3779B1)
        mixed = mixed ^ (mixed >> jnp.uint32(15))
        mixed = mixed * jnp.uint32(0x85EBCA77)
        mixed = mixed ^ (mixed >> jnp.uint32(13))
    return mixed


def chosen_count(mask: Bool[Array, "N T"], fraction: float) -> Int[Array, ""]:
    """``max(⌊fraction · tokens⌋, 1)``.

    Source: https://arxiv.org/abs/2505.22617 (the number of selected tokens).
    """
    tokens = jnp.sum(mask, dtype=jnp.int32).astype(jnp.float32)
    return jnp.maximum(jnp.floor(fraction * tokens).astype(jnp.int32), 1)


def largest_cutoff(
    values: Float[Array, "N T"], mask: Bool[Array, "N T"], count: Int[Array, ""]
) -> Float[Array, ""]:
    """The count-th largest value on the mask (the least one if there are fewer).

    Source: https://arxiv.org/abs/2505.22617 (KL-Cov's Top-K).
    """
    ordered = jnp.sort(jnp.where(mask, values, -jnp.inf).ravel())[::-1]
    last = jnp.minimum(count, jnp.maximum(jnp.sum(mask, dtype=jnp.int32), 1)) - 1
    return ordered[last]


def smallest_cutoff(
    scores: UInt[Array, "N T"], mask: Bool[Array, "N T"], count: Int[Array, ""]
) -> UInt[Array, ""]:
    """The count-th smallest score on the mask (the largest number if there are fewer).

    Source: https://arxiv.org/abs/2505.22617 (Clip-Cov's uniform draw).
    """
    most = jnp.full((), jnp.iinfo(jnp.uint32).max, jnp.uint32)
    ordered = jnp.sort(jnp.where(mask, scores, most).ravel())
    return ordered[jnp.minimum(count, ordered.shape[0]) - 1]
