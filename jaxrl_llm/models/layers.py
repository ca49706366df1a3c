# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Small building blocks of the decoder: linear, RMS norm, rotary embedding, gated MLP."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def accumulation_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """At least float32: promote, never demote (float64 stays float64)."""
    return jnp.dtype(dtype) if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


def linear(x: Float[Array, "... i"], w: Float[Array, "o i"]) -> Float[Array, "... o"]:
    """``x @ w.T`` for weights in the HF layout [out, in]; products are summed in ≥ float32.

    Leading axes are made one: on a CPU a plain matrix product is faster than a batched one.
    """
    rows = x.reshape(-1, x.shape[-1])
    out = jnp.einsum("mi,oi->mo", rows, w, preferred_element_type=accumulation_dtype(x.dtype))
    return out.astype(x.dtype).reshape(*x.shape[:-1], w.shape[0])


def rms_norm(
    x: Float[Array, "... d"], weight: Float[Array, " d"], eps: float
) -> Float[Array, "... d"]:
    """``x / sqrt(mean(x²) + ε) · weight`` (https://arxiv.org/abs/1910.07467), in ≥ float32."""
    wide = x.astype(accumulation_dtype(x.dtype))
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    normed = (wide * scale).astype(x.dtype)
    return normed * weight.reshape((1,) * (x.ndim - 1) + weight.shape)


def rotary_tables(
    positions: Int[Array, "..."], head_dim: int, theta: float, dtype: jnp.dtype = jnp.float32
) -> tuple[Float[Array, "... half"], Float[Array, "... half"]]:
    """cos and sin of ``position · θ^(−2i/head_dim)`` (RoPE, https://arxiv.org/abs/2104.09864)."""
    wide = accumulation_dtype(dtype)
    inv_freq = theta ** (-jnp.arange(0, head_dim, 2, dtype=wide) / head_dim)
    angles = positions.astype(wide)[..., None] * inv_freq.reshape((1,) * positions.ndim + (-1,))
    return jnp.cos(angles), jnp.sin(angles)


def apply_rotary(
    x: Float[Array, "... h d"], cos: Float[Array, "... half"], sin: Float[Array, "... half"]
) -> Float[Array, "... h d"]:
    """Rotate the pairs (x_i, x_{i+d/2}) of every head, the half-split layout of HF Llama."""
    wide = x.astype(cos.dtype)
    first, second = jnp.split(wide, 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def gated_mlp(x: Float[Array, "... d"], layer: dict[str, Array]) -> Float[Array, "... d"]:
    """``down(silu(gate(x)) · up(x))`` (SwiGLU, https://arxiv.org/abs/2002.05202)."""
    return linear(jax.nn.silu(linear(x, layer["gate"])) * linear(x, layer["up"]), layer["down"])
