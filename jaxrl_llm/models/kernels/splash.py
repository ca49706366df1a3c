# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over packed rows on a TPU: JAX's splash attention (Mosaic)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.layers import PRODUCT

_LANES = 128
_BLOCKS = (512, 256, 128)  # of queries and keys; the largest that divides the row


def splash_attention(
    q: Float[Array, "N T H hd"],
    k: Float[Array, "N T K hd"],
    v: Float[Array, "N T K hd"],
    segment_ids: Int[Array, "N T"],
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    interpret: bool = False,
) -> Float[Array, "N T H hd"]:
    """`causal_attention` of rows in which each segment is a run of consecutive positions.

    Rows are filled up to a multiple of 128 tokens and heads to one of 128 columns, with zeros.
    Padding (segment 0) returns 0.

    Args:
        window: a token sees itself and the ``window − 1`` before it; None: all.
    """
    length, heads, width = q.shape[1:]
    q = (q * (width**-0.5 if scale is None else scale)).astype(q.dtype)
    fill = -length % _LANES
    filling = ((0, 0), (0, fill), (0, 0), (0, -width % _LANES))
    q, k, v = (jnp.pad(x, filling).transpose(0, 2, 1, 3) for x in (q, k, v))
    segments = jnp.pad(segment_ids, ((0, 0), (0, fill)))
    out = _call(q, k, v, segments, window, softcap, heads, interpret)
    out = out.transpose(0, 2, 1, 3)[:, :length, :, :width]
    return jnp.where((segment_ids > 0)[:, :, None, None], out, jnp.zeros((), out.dtype))


def _call(q, k, v, segments, window, softcap, heads: int, interpret: bool):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length = q.shape[2]
    block = next(size for size in _BLOCKS if length % size == 0)
    shape = (length, length)
    if window is None or window >= length:
        mask = masks.CausalMask(shape)
    else:
        mask = masks.LocalMask(shape, window_size=(window - 1, 0), offset=0)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=splash.BlockSizes(**{f"block_{name}": block for name in names}),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=softcap,
        residual_checkpoint_name=PRODUCT,  # kept for the backward pass where products are
        interpret=interpret,
    )
    one_row = functools.partial(_one_row, kernel, splash.SegmentIds)
    return jax.vmap(one_row)(q, k, v, segments)


def _one_row(kernel, pair, q, k, v, segments):
    return kernel(q, k, v, pair(segments, segments))
