# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Attention on a GPU by Pallas (Triton): decoding over pages as they lie, and over packed rows."""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_TOKENS = 64  # keys that a program reads at a time
_LEAST = 16  # rows of a product on tensor cores
_ROW = 128  # rows are filled up to a multiple


def triton_attention(
    q: Float[Array, "S H hd"],
    k_pages: Float[Array, "P page K hd"],
    v_pages: Float[Array, "P page K hd"],
    tables: Int[Array, "S M"],
    positions: Int[Array, " S"],
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    interpret: bool = False,
) -> Float[Array, "S H hd"]:
    """`paged_attention` of one query per sequence. One program for each sequence and kv head."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    rows, heads, hd = q.shape
    page, kv_heads = k_pages.shape[1:3]
    per_block = max(1, _TOKENS // page)
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % per_block)))
    groups = heads // kv_heads
    filled = max(_LEAST, pl.next_power_of_2(groups))
    q = q.reshape(rows, kv_heads, groups, hd)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, filled - groups), (0, 0)))
    of_head = pl.BlockSpec((None, None, filled, hd), lambda s, h: (s, h, 0, 0))
    pool = pl.BlockSpec((k_pages.shape[0], page, None, hd), lambda s, h: (0, 0, h, 0))
    kernel = functools.partial(
        _kernel,
        per_block=per_block,
        window=window,
        softcap=softcap,
        scale=hd**-0.5 if scale is None else scale,
    )
    out = pl.pallas_call(
        kernel,
        grid=(rows, kv_heads),
        in_specs=[
            of_head,
            pool,
            pool,
            pl.BlockSpec((None, tables.shape[1]), lambda s, h: (s, 0)),
            pl.BlockSpec((1,), lambda s, h: (s,)),
        ],
        out_specs=of_head,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="paged_decode",
    )(q, k_pages, v_pages, tables, positions)
    return out[:, :, :groups].reshape(rows, heads, hd)


def _kernel(
    q_ref,  # [G, hd]
    k_ref,  # [P, page, hd]
    v_ref,
    table_ref,  # [M]
    last_ref,  # [1]
    out_ref,  # [G, hd]
    *,
    per_block: int,
    window: int | None,
    softcap: float | None,
    scale: float,
):
    from jax.experimental import pallas as pl

    count, hd = q_ref.shape
    page = k_ref.shape[1]
    span = per_block * page
    last = last_ref[0]
    q = q_ref[...]
    exact = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    dot = functools.partial(jnp.dot, precision=exact, preferred_element_type=jnp.float32)
    lowest = jnp.float32(jnp.finfo(jnp.float32).min)

    def one_block(block, carry):
        top, total, out = carry
        pages = table_ref[pl.ds(block * per_block, per_block)]
        k, v = (ref[pages].reshape(span, hd) for ref in (k_ref, v_ref))
        scores = dot(q, k.T) * scale
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        at = block * span + jax.lax.broadcasted_iota(jnp.int32, (count, span), 1)
        allowed = at <= last
        if window is not None:
            allowed &= at > last - window
        scores = jnp.where(allowed, scores, lowest)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        weights = jnp.where(allowed, jnp.exp(scores - new_top[:, None]), 0.0)
        keep = jnp.exp(top - new_top)
        out = out * keep[:, None] + dot(weights.astype(v.dtype), v)
        return new_top, total * keep + jnp.sum(weights, axis=1), out

    first = 0 if window is None else jnp.maximum(last - (window - 1), 0) // span
    begin = (
        jnp.full((count,), lowest, jnp.float32),
        jnp.zeros((count,), jnp.float32),
        jnp.zeros((count, hd), jnp.float32),
    )
    _, total, out = jax.lax.fori_loop(first, last // span + 1, one_block, begin)
    out_ref[...] = (out / total[:, None]).astype(out_ref.dtype)


def triton_rows(
    q: Float[Array, "N T H hd"],
    k: Float[Array, "N T K hd"],
    v: Float[Array, "N T K hd"],
    segment_ids: Int[Array, "N T"],
    *,
    scale: float | None = None,
    interpret: bool = False,
) -> Float[Array, "N T H hd"]:
    """`causal_attention` of packed rows by JAX's flash attention for Triton.

    It knows no groups: keys and values are repeated for the queries that share them. Padding
    (segment 0) returns 0.
    """
    with warnings.catch_warnings():
        # From jax 0.12 on it points to tokamax, which Python 3.11 can't have.
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import attention as flash

    length, heads, width = q.shape[1:]
    fill = -length % _ROW
    # Queries are repeated once, which is themselves.
    q, k, v = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (q, k, v))
    q, k, v = (jnp.pad(x, ((0, 0), (0, fill), (0, 0), (0, 0))) for x in (q, k, v))
    out = flash.mha(
        q,
        k,
        v,
        jnp.pad(segment_ids, ((0, 0), (0, fill))),
        sm_scale=width**-0.5 if scale is None else scale,
        causal=True,
        interpret=interpret,
    )[:, :length]
    return jnp.where((segment_ids > 0)[:, :, None, None], out, jnp.zeros((), out.dtype))
