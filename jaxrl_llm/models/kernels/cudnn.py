# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over rows on a GPU: cuDNN's fused attention."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


@functools.cache
def cudnn_found() -> bool:
    """Whether JAX finds cuDNN here; it needs no GPU for that."""
    row = jax.ShapeDtypeStruct((1, 2, 1, 8), jnp.bfloat16)
    attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    try:
        jax.eval_shape(attend, row, row, row)
    except RuntimeError:
        return False
    return True


def cudnn_attention(
    q: Float[Array, "N T H hd"],
    k: Float[Array, "N T K hd"],
    v: Float[Array, "N T K hd"],
    allowed: Bool[Array, "N T T"],
    *,
    scale: float | None = None,
    implementation: str = "cudnn",
) -> Float[Array, "N T H hd"]:
    """`causal_attention`, any mask: it is read as a bias [N, 1, T, T], scores are not kept.

    A query that may see nothing returns 0. Rows are filled up to an even length.

    Args:
        implementation: of `jax.nn.dot_product_attention`; "xla" is for comparisons without a GPU.
    """
    fill = q.shape[1] % 2
    seen = jnp.any(allowed, axis=2)[:, :, None, None]
    mask = jnp.pad(allowed, ((0, 0), (0, fill), (0, fill)))[:, None]
    length = q.shape[1]
    q, k, v = (jnp.pad(x, ((0, 0), (0, fill), (0, 0), (0, 0))) for x in (q, k, v))
    out = jax.nn.dot_product_attention(
        q, k, v, mask=mask, scale=scale, implementation=implementation
    )[:, :length]
    return jnp.where(seen, out, jnp.zeros((), out.dtype))
