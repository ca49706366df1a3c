# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over rows of tokens, and over pages of a key/value cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.layers import accumulation_dtype


def masked_attention(
    q: Float[Array, "N T H hd"],
    k: Float[Array, "N S K hd"],
    v: Float[Array, "N S K hd"],
    allowed: Bool[Array, "N T S"],
) -> Float[Array, "N T H hd"]:
    """Grouped-query attention ``softmax(q·kᵀ/√hd)·v`` over the allowed keys; softmax in ≥ float32.

    H query heads share K key/value heads in runs of H/K. A query that may see nothing returns 0.
    """
    n, t, h, hd = q.shape
    groups = h // k.shape[2]
    wide = accumulation_dtype(q.dtype)
    q = q.reshape(n, t, k.shape[2], groups, hd)
    scores = jnp.einsum("ntkgd,nskd->nkgts", q, k, preferred_element_type=wide) * hd**-0.5
    allowed = allowed[:, None, None, :, :]
    scores = jnp.where(allowed, scores, jnp.finfo(wide).min)
    weights = jnp.where(allowed, jax.nn.softmax(scores, axis=-1), 0.0).astype(q.dtype)
    out = jnp.einsum("nkgts,nskd->ntkgd", weights, v, preferred_element_type=wide)
    return out.reshape(n, t, h, hd).astype(q.dtype)


def causal_segments(
    positions: Int[Array, "N T"], segment_ids: Int[Array, "N T"]
) -> Bool[Array, "N T T"]:
    """Which tokens see which: same segment, not padding (segment 0), not later in position."""
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    causal = positions[:, :, None] >= positions[:, None, :]
    return same & causal & (segment_ids > 0)[:, None, :]


def paged_attention(
    q: Float[Array, "S T H hd"],
    k_pages: Float[Array, "P page K hd"],
    v_pages: Float[Array, "P page K hd"],
    tables: Int[Array, "S M"],
    positions: Int[Array, "S T"],
) -> Float[Array, "S T H hd"]:
    """Causal grouped-query attention over pages: the query at position t sees positions 0 .. t.

    Position t of sequence s lies at ``[tables[s, t // page], t % page]``. Pages that a query does
    not reach may hold anything finite. For chunks of prompts (T tokens) and for decoding (T = 1).
    """
    rows, count = tables.shape
    gather = lambda pages: pages[tables].reshape(rows, -1, *pages.shape[2:])  # noqa: E731
    span = jnp.arange(count * k_pages.shape[1], dtype=positions.dtype)
    allowed = span[None, None, :] <= positions[:, :, None]
    return masked_attention(q, gather(k_pages), gather(v_pages), allowed)
