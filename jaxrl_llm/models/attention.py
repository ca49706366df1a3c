# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over rows of tokens. Over pages of a key/value cache: `paged_attention.py`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.layers import accumulation_dtype, soft_cap


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
    groups = h // k.shape[2]
    wide = accumulation_dtype(q.dtype)
    scale = hd**-0.5 if scale is None else scale
    q = q.reshape(n, t, k.shape[2], groups, hd)
    scores = jnp.einsum("ntkgd,nskd->nkgts", q, k, preferred_element_type=wide) * scale
    scores = soft_cap(scores, softcap)
    allowed = allowed[:, None, None, :, :]
    scores = jnp.where(allowed, scores, jnp.finfo(wide).min)
    weights = jnp.where(allowed, jax.nn.softmax(scores, axis=-1), 0.0).astype(q.dtype)
    out = jnp.einsum("nkgts,nskd->ntkgd", weights, v, preferred_element_type=wide)
    return out.reshape(n, t, h, hd).astype(q.dtype)


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
