# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over pages of a key/value cache, and over a dense view of them.

`attend_pages` is what decoding calls: a kernel where one serves (`kernels/choice.py`), else
`paged_attention`, which every kernel is compared with.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.kernels.choice import Case, choose_pages
from jaxrl_llm.models.kernels.mosaic import mosaic_attention
from jaxrl_llm.models.kernels.shards import on_shards
from jaxrl_llm.models.kernels.triton import triton_attention
from jaxrl_llm.models.layers import accumulation_dtype

KEYS_PER_BLOCK = 64  # keys that are read at a time
PAGE_KERNELS = {"mosaic": mosaic_attention, "triton": triton_attention}


def attend_pages(
    q: Float[Array, "S 1 H hd"],
    k_pages: Float[Array, "P page K hd"],
    v_pages: Float[Array, "P page K hd"],
    tables: Int[Array, "S M"],
    positions: Int[Array, "S 1"],
    *,
    backend: str,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> Float[Array, "S 1 H hd"]:
    """`paged_attention` of one query per sequence by a back end.

    Raises:
        ConfigError: the back end that was named can't serve.
    """
    case = Case.here(
        q,
        k_pages,
        window=window is not None,
        softcap=softcap is not None,
        page_size=k_pages.shape[1],
    )
    choice = choose_pages(backend, case)
    traits = {"window": window, "softcap": softcap, "scale": scale}
    if choice.name == "xla":
        return paged_attention(q, k_pages, v_pages, tables, positions, **traits)
    pool = (None, None, "kv_heads", None)
    axes = ((None, "heads", None), pool, pool, (None, None), (None,))
    kernel = on_shards(functools.partial(PAGE_KERNELS[choice.name], **traits), axes, axes[0])
    return kernel(q[:, 0], k_pages, v_pages, tables, positions[:, 0])[:, None]


def paged_attention(
    q: Float[Array, "S T H hd"],
    k_pages: Float[Array, "P page K hd"],
    v_pages: Float[Array, "P page K hd"],
    tables: Int[Array, "S M"],
    positions: Int[Array, "S T"],
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> Float[Array, "S T H hd"]:
    """Causal grouped-query attention over pages: the query at position t sees positions 0 .. t.

    Position t of sequence s lies at ``[tables[s, t // page], t % page]``. Pages that a query does
    not reach may hold anything finite. For chunks of prompts (T tokens) and for decoding (T = 1).

    Keys are read a block of pages at a time, up to the furthest position of any query, and the
    softmax is carried along (online softmax, https://arxiv.org/abs/1805.02867). So the cost follows
    the tokens that are present and not the width of the tables, the memory is that of one block,
    and a query's result is the same to the last bit however long its neighbours are: a block
    beyond its position, or before its window, changes nothing.

    Args:
        window: a query at t sees only positions above t − window (sliding window).
        softcap: scores s become softcap · tanh(s / softcap).
        scale: what q·k is multiplied with; None: hd^(−1/2).
    """
    rows, count, heads, hd = q.shape
    page_size, kv_heads = k_pages.shape[1:3]
    wide = accumulation_dtype(q.dtype)
    per_block = max(1, min(KEYS_PER_BLOCK // page_size, tables.shape[1]))
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % per_block)))
    span = per_block * page_size
    lowest = jnp.finfo(wide).min
    scale = hd**-0.5 if scale is None else scale
    q = q.reshape(rows, count, kv_heads, heads // kv_heads, hd)

    def one_block(index, carry):
        top, total, out = carry
        table = jax.lax.dynamic_slice_in_dim(tables, index * per_block, per_block, axis=1)
        k = k_pages[table].reshape(rows, span, kv_heads, hd)
        v = v_pages[table].reshape(rows, span, kv_heads, hd)
        at = index * span + jnp.arange(span, dtype=positions.dtype)
        allowed = at[None, None, :] <= positions[:, :, None]
        if window is not None:
            allowed &= at[None, None, :] > positions[:, :, None] - window
        allowed = allowed[:, None, None, :, :]
        scores = jnp.einsum("stkgd,sukd->skgtu", q, k, preferred_element_type=wide) * scale
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(allowed, scores, lowest)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights = jnp.where(allowed, jnp.exp(scores - new_top[..., None]), 0.0)
        keep = jnp.exp(top - new_top)
        part = jnp.einsum(
            "skgtu,sukd->skgtd", weights.astype(q.dtype), v, preferred_element_type=wide
        )
        total = total * keep + jnp.sum(weights, axis=-1)
        return new_top, total, out * keep[..., None] + part

    zeros = jnp.zeros((rows, kv_heads, heads // kv_heads, count), wide)
    start = (jnp.full(zeros.shape, lowest, wide), zeros, jnp.zeros((*zeros.shape, hd), wide))
    blocks = jnp.minimum(jnp.max(positions) // span + 1, tables.shape[1] // per_block)
    first = jnp.zeros_like(blocks)
    if window is not None:
        first = jnp.maximum(jnp.min(positions) - window + 1, 0) // span
    _, total, out = jax.lax.fori_loop(first, blocks, one_block, start)
    out = (out / total[..., None]).astype(q.dtype)
    return out.transpose(0, 3, 1, 2, 4).reshape(rows, count, heads, hd)


def view_attention(
    q: Float[Array, "S H hd"],
    k: Float[Array, "S K hd W"],
    v: Float[Array, "S K W hd"],
    positions: Int[Array, " S"],
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> Float[Array, "S H hd"]:
    """`paged_attention` of one query per sequence, over keys and values in a dense view.

    W is a multiple of 64. Columns beyond a query's position may hold anything finite; a query's
    result is the same to the last bit for every W and S (on a CPU, S a multiple of 16).
    """
    rows, heads, hd = q.shape
    kv_heads, width = v.shape[1:3]
    wide = accumulation_dtype(q.dtype)
    q = q.reshape(rows, kv_heads, heads // kv_heads, hd)
    scores = jnp.einsum("skgd,skdw->skgw", q, k, preferred_element_type=wide)
    scores = scores * (hd**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    at = jnp.arange(width, dtype=positions.dtype)[None, :]
    allowed = at <= positions[:, None]
    if window is not None:
        allowed &= at > positions[:, None] - window
    allowed = allowed[:, None, None, :]
    scores = jnp.where(allowed, scores, jnp.finfo(wide).min)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.where(allowed, jnp.exp(scores - top), 0.0)
    # In two steps: XLA sums long rows in an order that depends on their length.
    blocks = weights.reshape(*weights.shape[:-1], -1, KEYS_PER_BLOCK)
    total = jnp.sum(jnp.sum(blocks, axis=-1), axis=-1)
    out = jnp.einsum("skgw,skwd->skgd", weights.astype(q.dtype), v, preferred_element_type=wide)
    return (out / total[..., None]).astype(q.dtype).reshape(rows, heads, hd)
