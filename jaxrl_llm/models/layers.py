# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Small building blocks of the decoder: linear maps (plain or adapted), RMS norm, gated MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxrl_llm.models.weights import Weight
from jaxrl_llm.sharding.rules import constrain

# What a layer computes by products bears this name: its backward pass keeps that and computes what
# lies between again (`transformer.forward`).
PRODUCT = "product"


def accumulation_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """At least float32: promote, never demote (float64 stays float64)."""
    return jnp.dtype(dtype) if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


@struct.dataclass
class LoraWeight:
    """A matrix with a low-rank change (LoRA, https://arxiv.org/abs/2106.09685).

    ``W + scale·B·A``; with a magnitude m (DoRA, https://arxiv.org/abs/2402.09353) each of its rows
    is brought to the length m, and the length that is divided by counts as a constant.
    """

    base: Any  # float [..., o, i]
    a: Any  # float [..., r, i]
    b: Any  # float [..., o, r]
    magnitude: Any = None  # float [..., o]
    scale: float = struct.field(pytree_node=False, default=1.0)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape


def lora_sum(w: LoraWeight) -> Float[Array, "... o i"]:
    """``W + scale·B·A`` in ≥ float32; W itself, to the bit, where B·A is 0."""
    wide = accumulation_dtype(w.base.dtype)
    delta = w.scale * jnp.einsum("...or,...ri->...oi", w.b.astype(wide), w.a.astype(wide))
    return _add(w.base.astype(wide), delta)


@jax.custom_jvp
def _add(base: Array, delta: Array) -> Array:
    """A plain sum would turn −0 into 0."""
    return jnp.where(delta == 0, base, base + delta)


@_add.defjvp
def _add_jvp(primals, tangents):
    return _add(*primals), tangents[0] + tangents[1]


def row_lengths(w: Float[Array, "... o i"]) -> Float[Array, "... o"]:
    """Euclidean length of every row."""
    return jnp.sqrt(jnp.sum(jnp.square(w), axis=-1))


def stretch(
    magnitude: Float[Array, "... o"], length: Float[Array, "... o"]
) -> Float[Array, "... o"]:
    """What brings rows to a magnitude: ``m / length``. A row of zeros has no direction and stays
    one, as those of a missing layer in a pipeline."""
    return magnitude / jnp.where(length == 0, 1.0, length)


def product(rows: Float[Array, "m i"], w: Float[Array, "o i"] | Weight) -> Float[Array, "m o"]:
    """``rows @ w.T`` in ≥ float32, for an array [out, in] or a `Weight` of another form."""
    if isinstance(w, Weight):
        return w.product(rows)
    return jnp.einsum("mi,oi->mo", rows, w, preferred_element_type=accumulation_dtype(rows.dtype))


def linear(
    x: Float[Array, "... i"],
    w: Float[Array, "o i"] | LoraWeight | Weight,
    bias: Float[Array, " o"] | None = None,
) -> Float[Array, "... o"]:
    """``x @ w.T + bias`` for weights in the HF layout [out, in]; sums are formed in ≥ float32.

    Leading axes are made one: on a CPU a plain matrix product is faster than a batched one.
    """
    rows = x.reshape(-1, x.shape[-1])
    wide = accumulation_dtype(x.dtype)
    base = w.base if isinstance(w, LoraWeight) else w
    out = product(rows, base)
    if isinstance(w, LoraWeight):
        low = jnp.einsum("mi,ri->mr", rows.astype(wide), w.a.astype(wide))
        out = out + w.scale * jnp.einsum("mr,or->mo", low, w.b.astype(wide))
        if w.magnitude is not None:
            length = row_lengths(lora_sum(jax.lax.stop_gradient(w))).astype(wide)
            out = out * stretch(w.magnitude.astype(wide), length)[None, :]
    if bias is not None:
        out = out + bias.astype(out.dtype)[None, :]
    return out.astype(x.dtype).reshape(*x.shape[:-1], out.shape[-1])


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
    x: Float[Array, "... d"], layer: dict[str, Any], activation: str = "silu"
) -> Float[Array, "... d"]:
    """``down(act(gate(x)) · up(x))`` (https://arxiv.org/abs/2002.05202), biases where present."""
    gate = checkpoint_name(linear(x, layer["gate"], layer.get("gate_bias")), PRODUCT)
    up = checkpoint_name(linear(x, layer["up"], layer.get("up_bias")), PRODUCT)
    hidden = ACTIVATIONS[activation](gate) * up
    hidden = constrain(hidden, "rows", *(None,) * (hidden.ndim - 2), "mlp")
    return checkpoint_name(linear(hidden, layer["down"], layer.get("down_bias")), PRODUCT)


# What the gate of an MLP passes through.
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
}
