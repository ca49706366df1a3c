# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The decoder: plain parameter pytrees and pure functions.

Parameters are a dict of arrays in the HF layout [out, in]:

    {"embed": [V, D],
     "layers": {"attn_norm": [L, D], "q": [L, H·hd, D], "k": [L, K·hd, D], "v": [L, K·hd, D],
                "o": [L, D, H·hd], "mlp_norm": [L, D], "gate": [L, F, D], "up": [L, F, D],
                "down": [L, D, F]},
     "final_norm": [D],
     "head": [V, D]}                 # absent when the output head is tied to the embedding

Training scans over the stacked layers; decoding on a CPU wants one buffer per layer, which is
2–3 times faster there: `unstack_layers` turns the one into the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxrl_llm.models.attention import causal_segments, masked_attention
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers import (
    accumulation_dtype,
    apply_rotary,
    gated_mlp,
    linear,
    rms_norm,
    rotary_tables,
)

Params = dict[str, Any]


def param_shapes(config: ModelConfig) -> Params:
    """The shape of every parameter, as a pytree of tuples."""
    d, f, n = config.hidden_size, config.intermediate_size, config.num_layers
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: Params = {
        "embed": (config.vocab_size, d),
        "layers": {
            "attn_norm": (n, d),
            "q": (n, q, d),
            "k": (n, kv, d),
            "v": (n, kv, d),
            "o": (n, d, q),
            "mlp_norm": (n, d),
            "gate": (n, f, d),
            "up": (n, f, d),
            "down": (n, d, f),
        },
        "final_norm": (d,),
    }
    if not config.tie_word_embeddings:
        shapes["head"] = (config.vocab_size, d)
    return shapes


def abstract_params(config: ModelConfig, dtype: jnp.dtype = jnp.float32) -> Params:
    """Parameters as `jax.ShapeDtypeStruct`, for planning and for restoring checkpoints."""
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype),
        param_shapes(config),
        is_leaf=lambda x: isinstance(x, tuple),
    )


def init_params(config: ModelConfig, key: PRNGKeyArray, dtype: jnp.dtype = jnp.float32) -> Params:
    """Random parameters: norms 1, matrices normal with deviation 0.02."""
    shapes, treedef = jax.tree.flatten(param_shapes(config), is_leaf=lambda x: isinstance(x, tuple))
    paths = jax.tree_util.tree_flatten_with_path(
        param_shapes(config), is_leaf=lambda x: isinstance(x, tuple)
    )[0]
    keys = jax.random.split(key, len(shapes))
    leaves = [
        jnp.ones(shape, dtype)
        if "norm" in jax.tree_util.keystr(path)
        else (0.02 * jax.random.normal(k, shape)).astype(dtype)
        for (path, shape), k in zip(paths, keys, strict=True)
    ]
    return jax.tree.unflatten(treedef, leaves)


def unstack_layers(params: Params) -> Params:
    """The same parameters with `layers` as a tuple of per-layer dicts (a copy of every layer)."""
    layers = params["layers"]
    count = layers["q"].shape[0]
    split = tuple(jax.tree.map(lambda x, i=i: x[i], layers) for i in range(count))
    return {**params, "layers": split}


def output_head(params: Params) -> Float[Array, "V D"]:
    """The output matrix: `head`, or the embedding when tied."""
    return params["head"] if "head" in params else params["embed"]


def block(
    layer: dict[str, Array],
    config: ModelConfig,
    x: Float[Array, "N T D"],
    cos: Float[Array, "N T half"],
    sin: Float[Array, "N T half"],
    attend: Callable[[Array, Array, Array], Array],
) -> Float[Array, "N T D"]:
    """One layer. `attend(q, k, v)` gets rotated [N, T, heads, hd] arrays and returns [N, T, H, hd]:
    rows of a batch in training, pages of a cache in the sampler."""
    n, t, _ = x.shape
    heads = lambda y: y.reshape(n, t, -1, config.head_dim)  # noqa: E731 - local shorthand
    with jax.named_scope("attention"):
        h = rms_norm(x, layer["attn_norm"], config.rms_norm_eps)
        q, k, v = (heads(linear(h, layer[name])) for name in ("q", "k", "v"))
        out = attend(apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v)
        x = x + linear(out.reshape(n, t, -1), layer["o"])
    with jax.named_scope("mlp"):
        h = rms_norm(x, layer["mlp_norm"], config.rms_norm_eps)
        return x + gated_mlp(h, layer)


def forward(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "N T"],
    positions: Int[Array, "N T"],
    segment_ids: Int[Array, "N T"],
    prefix_ids: Int[Array, "N T"] | None = None,
    *,
    remat: bool = False,
) -> Float[Array, "N T D"]:
    """Final hidden states (after the last norm) of rows of tokens.

    Args:
        positions: position of each token within its own sequence.
        segment_ids: tokens see only their own segment; 0 is padding and is seen by no one.
        prefix_ids: a second segment that a token sees, its shared prompt; 0: none.
        remat: recompute each layer in the backward pass instead of keeping its activations.
    """
    x = params["embed"][tokens]
    cos, sin = rotary_tables(positions, config.head_dim, config.rope_theta, x.dtype)
    allowed = causal_segments(positions, segment_ids, prefix_ids)

    def layer_step(x, layer):
        attend = lambda q, k, v: masked_attention(q, k, v, allowed)  # noqa: E731
        return block(layer, config, x, cos, sin, attend), None

    body = jax.checkpoint(layer_step) if remat else layer_step
    x, _ = jax.lax.scan(body, x, params["layers"])
    return rms_norm(x, params["final_norm"], config.rms_norm_eps)


def logits(params: Params, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
    """Next-token logits, in at least float32. For whole batches use `heads.token_logprobs`."""
    wide = accumulation_dtype(hidden.dtype)
    return jnp.einsum("...d,vd->...v", hidden, output_head(params), preferred_element_type=wide)
