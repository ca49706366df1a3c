# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over rows of tokens. Over pages of a key/value cache: `paged_attention.py`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.layers import accumulation_dtype, soft_cap

QUERIES = 64  # of a block, the fastest of 64, 128 and all on a CPU
_MOST_BLOCKS = 16  # each is compiled


def masked_attention(
    q: Float[Array, "N T H hd"],
    k: Float[Array, "N S K hd"],
    v: Float[Array, "N S K hd"],
    allowed: Bool[Array, "N T S"],
    *,
    scale: float | None = None,
    softcap: float | None = None,
) -> Float[Array, "N T H hd"]:
    """Grouped-query attention ``softmax(cap(s·q·kᵀ))·v`` over the allowed keys, in ≥ float32.

    H query heads share K key/value heads in runs of H/K. A query that may see nothing returns 0.

    Args:
        scale: s; None: hd^(−1/2).
        softcap: scores are kept within ± it by ``softcap · tanh(score / softcap)``.
    """
    n, t, h, hd = q.shape
    heads = k.shape[2]
    groups = h // heads
    wide = accumulation_dtype(q.dtype)
    scale = hd**-0.5 if scale is None else scale
    # Heads before tokens: on a CPU other products of batches take three times as long.
    q = q.reshape(n, t, heads, groups, hd).transpose(0, 2, 3, 1, 4).reshape(n, heads, -1, hd)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    scores = jnp.einsum("nkqd,nksd->nkqs", q, k, preferred_element_type=wide) * scale
    scores = soft_cap(scores, softcap).reshape(n, heads, groups, t, -1)
    allowed = allowed[:, None, None, :, :]
    scores = jnp.where(allowed, scores, jnp.finfo(wide).min)
    weights = jnp.where(allowed, jax.nn.softmax(scores, axis=-1), 0.0).astype(q.dtype)
    weights = weights.reshape(n, heads, groups * t, -1)
    out = jnp.einsum("nkqs,nksd->nkqd", weights, v, preferred_element_type=wide)
    out = out.reshape(n, heads, groups, t, hd).transpose(0, 3, 1, 2, 4)
    return out.reshape(n, t, h, hd).astype(q.dtype)


def causal_attention(
    q: Float[Array, "N T H hd"],
    k: Float[Array, "N T K hd"],
    v: Float[Array, "N T K hd"],
    allowed: Bool[Array, "N T T"],
    *,
    scale: float | None = None,
    softcap: float | None = None,
) -> Float[Array, "N T H hd"]:
    """`masked_attention` for rows in which no token sees one that stands to its right.

    Queries go a block at a time over the keys up to the block's end, and scores are computed again
    in the backward pass: half the work, and no array of T × T is kept.

    Args:
        allowed: as from `causal_segments`, where positions rise from left to right within each
            segment and a prefix stands to the left of what follows it.
    """
    part = functools.partial(masked_attention, scale=scale, softcap=softcap)
    length = q.shape[1]
    if length <= QUERIES:
        return part(q, k, v, allowed)
    block = _block(length)

    def of_block(start: int) -> Array:
        end = min(start + block, length)

        # Keys and values are cut inside, so that all blocks keep the same two arrays. Within a scan
        # over layers the two passes are separate programs: nothing to be merged.
        @functools.partial(jax.checkpoint, prevent_cse=False)
        def attend(q, k, v, allowed):
            return part(q, k[:, :end], v[:, :end], allowed[:, start:end, :end])

        return attend(q[:, start:end], k, v, allowed)

    return jnp.concatenate([of_block(start) for start in range(0, length, block)], axis=1)


def _block(length: int) -> int:
    return -(-length // (_MOST_BLOCKS * QUERIES)) * QUERIES


def keys_read(length: int | float) -> float:
    """How many keys `causal_attention` reads for a query, on average over a row."""
    if length <= QUERIES:
        return float(length)
    length = int(length)
    block = _block(length)
    starts = range(0, length, block)
    ends = [min(start + block, length) for start in starts]
    return sum((end - start) * end for start, end in zip(starts, ends, strict=True)) / length


def causal_segments(
    positions: Int[Array, "N T"],
    segment_ids: Int[Array, "N T"],
    prefix_ids: Int[Array, "N T"] | None = None,
) -> Bool[Array, "N T T"]:
    """Which tokens see which: same segment, not padding (segment 0), not later in position.

    Args:
        prefix_ids: a second segment that a token sees, earlier positions only, or 0: the prompt
            that several completions of a row share.
    """
    visible = segment_ids[:, :, None] == segment_ids[:, None, :]
    if prefix_ids is not None:
        visible |= prefix_ids[:, :, None] == segment_ids[:, None, :]
    causal = positions[:, :, None] >= positions[:, None, :]
    return visible & causal & (segment_ids > 0)[:, None, :]


def within_window(
    positions: Int[Array, "N T"], window: Int[Array, ""] | int
) -> Bool[Array, "N T T"]:
    """Which tokens are at most ``window − 1`` positions before which (the token itself counts)."""
    return positions[:, :, None] - positions[:, None, :] < window
