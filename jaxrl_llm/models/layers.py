# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Small building blocks of the decoder: linear maps, RMS norm, gated MLP."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def accumulation_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """At least float32: promote, never demote (float64 stays float64)."""
    return jnp.dtype(dtype) if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


def linear(
    x: Float[Array, "... i"], w: Float[Array, "o i"], bias: Float[Array, " o"] | None = None
) -> Float[Array, "... o"]:
    """``x @ w.T + bias`` for weights in the HF layout [out, in]; sums are formed in ≥ float32.

    Leading axes are made one: on a CPU a plain matrix product is faster than a batched one.
    """
    rows = x.reshape(-1, x.shape[-1])
    out = jnp.einsum("mi,oi->mo", rows, w, preferred_element_type=accumulation_dtype(x.dtype))
    if bias is not None:
        out = out + bias.astype(out.dtype)[None, :]
    return out.astype(x.dtype).reshape(*x.shape[:-1], w.shape[0])


def rms_norm(
    x: Float[Array, "... d"],
    weight: Float[Array, " d"],
    eps: float,
    *,
    offset: bool = False,
    wide_weight: bool = False,
) -> Float[Array, "... d"]:
    """``x / sqrt(mean(x²) + ε) · weight`` (https://arxiv.org/abs/1910.07467), in ≥ float32.

    Args:
        offset: multiply with 1 + weight, before rounding to the dtype of `x` (Gemma).
        wide_weight: multiply with the weight before rounding (OLMo 2).
    """
    wide = x.astype(accumulation_dtype(x.dtype))
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    weight = weight.reshape((1,) * (x.ndim - 1) + weight.shape)
    if offset:
        return (wide * scale * (1.0 + weight.astype(wide.dtype))).astype(x.dtype)
    if wide_weight:
        return (wide * scale * weight.astype(wide.dtype)).astype(x.dtype)
    return (wide * scale).astype(x.dtype) * weight


def soft_cap(x: Float[Array, "..."], cap: float | None) -> Float[Array, "..."]:
    """``cap · tanh(x / cap)``: keeps x within ±cap; None leaves it as it is."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def gated_mlp(
    x: Float[Array, "... d"], layer: dict[str, Array], activation: str = "silu"
) -> Float[Array, "... d"]:
    """``down(act(gate(x)) · up(x))`` (https://arxiv.org/abs/2002.05202), biases where present."""
    gate = linear(x, layer["gate"], layer.get("gate_bias"))
    up = linear(x, layer["up"], layer.get("up_bias"))
    return linear(ACTIVATIONS[activation](gate) * up, layer["down"], layer.get("down_bias"))


# What the gate of an MLP passes through.
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
}
