# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over rows of tokens, and over pages of a key/value cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.layers import accumulation_dtype

KEYS_PER_BLOCK = 64  # keys that paged attention reads at a time


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

    Keys are read a block of pages at a time, up to the furthest position of any query, and the
    softmax is carried along (online softmax, https://arxiv.org/abs/1805.02867). So the cost follows
    the tokens that are present and not the width of the tables, the memory is that of one block,
    and a query's result is the same to the last bit however long its neighbours are: a block
    beyond its position changes nothing.
    """
    rows, count, heads, hd = q.shape
    page_size, kv_heads = k_pages.shape[1:3]
    wide = accumulation_dtype(q.dtype)
    per_block = max(1, min(KEYS_PER_BLOCK // page_size, tables.shape[1]))
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % per_block)))
    span = per_block * page_size
    lowest = jnp.finfo(wide).min
    q = q.reshape(rows, count, kv_heads, heads // kv_heads, hd)

    def one_block(index, carry):
        top, total, out = carry
        table = jax.lax.dynamic_slice_in_dim(tables, index * per_block, per_block, axis=1)
        k = k_pages[table].reshape(rows, span, kv_heads, hd)
        v = v_pages[table].reshape(rows, span, kv_heads, hd)
        at = index * span + jnp.arange(span, dtype=positions.dtype)
        allowed = (at[None, None, :] <= positions[:, :, None])[:, None, None, :, :]
        scores = jnp.einsum("stkgd,sukd->skgtu", q, k, preferred_element_type=wide) * hd**-0.5
        scores = jnp.where(allowed, scores, lowest)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights = jnp.where(allowed, jnp.exp(scores - new_top[..., None]), 0.0)
        scale = jnp.exp(top - new_top)
        part = jnp.einsum(
            "skgtu,sukd->skgtd", weights.astype(q.dtype), v, preferred_element_type=wide
        )
        total = total * scale + jnp.sum(weights, axis=-1)
        return new_top, total, out * scale[..., None] + part

    zeros = jnp.zeros((rows, kv_heads, heads // kv_heads, count), wide)
    start = (jnp.full(zeros.shape, lowest, wide), zeros, jnp.zeros((*zeros.shape, hd), wide))
    blocks = jnp.minimum(jnp.max(positions) // span + 1, tables.shape[1] // per_block)
    _, total, out = jax.lax.fori_loop(jnp.zeros_like(blocks), blocks, one_block, start)
    out = (out / total[..., None]).astype(q.dtype)
    return out.transpose(0, 3, 1, 2, 4).reshape(rows, count, heads, hd)
