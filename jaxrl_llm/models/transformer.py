# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The decoder: plain parameter pytrees and pure functions.

Parameters are a dict of arrays in the HF layout [out, in]; `shapes.py` lists them all:

    {"embed": [V, D],
     "layers": {"attn_norm": [L, D], "q": [L, H·hd, D], "k": [L, K·hd, D], "v": [L, K·hd, D],
                "o": [L, D, H·hd], "mlp_norm": [L, D], "gate": [L, F, D], "up": [L, F, D],
                "down": [L, D, F], …},   # biases, more norms, experts: by the model's traits
     "final_norm": [D],
     "head": [V, D]}                 # absent when the output head is tied to the embedding

Training scans over the stacked layers, whose traits (window, rotary embedding) ride along as flags,
so the program is as large for one layer as for a hundred. Decoding on a CPU wants one buffer per
layer, which is 2–3 times faster there: `unstack_layers` turns the one into the other. In a pipeline
layers are stacked [rounds, stages, layers, …], see `sharding/pipeline.py`.

Under `jax.set_mesh` activations and weights are split as `sharding/rules.py` says; without a mesh,
or where nothing fits, nothing is done.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxrl_llm.models.attention import (
    attend_rows,
    block_prefixes,
    causal_segments,
    within_window,
)
from jaxrl_llm.models.axes import axis_sizes, tree_axes
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers import PRODUCT, gated_mlp, linear, product, rms_norm, soft_cap
from jaxrl_llm.models.moe import RouterStats, expert_mlp
from jaxrl_llm.models.rotary import apply_rotary, rotary_tables
from jaxrl_llm.models.shapes import param_shapes
from jaxrl_llm.models.weights import Weight
from jaxrl_llm.sharding.pipeline import run_pipeline, stage_layers
from jaxrl_llm.sharding.rules import GATHERED, constrain, gather_weights
from jaxrl_llm.types import Reach

Params = dict[str, Any]


def abstract_params(config: ModelConfig, dtype: DTypeLike = jnp.float32) -> Params:
    """Parameters as `jax.ShapeDtypeStruct`, for planning and for restoring checkpoints."""
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype),
        param_shapes(config),
        is_leaf=lambda x: isinstance(x, tuple),
    )


def init_params(config: ModelConfig, key: PRNGKeyArray, dtype: DTypeLike = jnp.float32) -> Params:
    """Random parameters: matrices normal with deviation 0.02, norms neutral, biases 0."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(
        param_shapes(config), is_leaf=lambda x: isinstance(x, tuple)
    )
    keys = jax.random.split(key, len(paths))

    def draw(path, shape, key):
        name = jax.tree_util.keystr(path)
        if "norm" in name:
            return (jnp.zeros if config.norm_offset else jnp.ones)(shape, dtype)
        if "bias" in name:
            return jnp.zeros(shape, dtype)
        return (0.02 * jax.random.normal(key, shape)).astype(dtype)

    leaves = [draw(path, shape, k) for (path, shape), k in zip(paths, keys, strict=True)]
    return jax.tree.unflatten(treedef, leaves)


def unstack_layers(params: Params) -> Params:
    """The same parameters with `layers` as a tuple of per-layer dicts (a copy of every layer)."""
    layers = params["layers"]
    count = layers["q"].shape[0]
    split = tuple(jax.tree.map(lambda x, i=i: x[i], layers) for i in range(count))
    return {**params, "layers": split}


def output_head(params: Params) -> Float[Array, "V D"] | Weight:
    """The output matrix: `head`, or the embedding when tied."""
    return params["head"] if "head" in params else params["embed"]


def embed_tokens(
    params: Params, config: ModelConfig, tokens: Int[Array, "N T"]
) -> Float[Array, "N T D"]:
    """Rows of the embedding matrix, times the model's multiplier."""
    x = params["embed"]
    if isinstance(x, jax.Array):
        # Said of the table, too, so that its gradient is summed before it is split over `fsdp`.
        x = constrain(for_use(x, "embed", config), "vocab", None)
    # The compiler would rather copy a table split over its rows to every device.
    x = constrain(x[tokens], "rows", None, None)
    if config.embedding_multiplier == 1.0:
        return x
    return x * jnp.asarray(config.embedding_multiplier, x.dtype)


def final_hidden(
    params: Params, config: ModelConfig, x: Float[Array, "N T D"]
) -> Float[Array, "N T D"]:
    """The last norm, before the output head."""
    return _norm(x, for_use(params["final_norm"], "final_norm", config), config)


def for_use(value: Any, name: str, config: ModelConfig) -> Any:
    """A parameter outside the layers, as it is multiplied with: whole over `fsdp`.

    Args:
        name: as in `param_shapes`; a tied head is a "head", too.
    """
    if not isinstance(value, jax.Array):
        return value  # the sampler's own forms
    tree = {name: value}
    return gather_weights(tree, tree_axes(tree, config), axis_sizes(config))[name]


def block(
    layer: dict[str, Any],
    config: ModelConfig,
    x: Float[Array, "N T D"],
    cos: Float[Array, "N T half"],
    sin: Float[Array, "N T half"],
    attend: Callable[[Array, Array, Array], Array],
) -> Float[Array, "N T D"]:
    """One layer. `attend(q, k, v)` gets rotated [N, T, heads, hd] arrays and returns [N, T, H, hd]:
    rows of a batch in training, pages of a cache in the sampler. Its window, scale and soft cap are
    the caller's to apply (`config.layers[i].window`, `attention_scale`, `attention_softcap`)."""
    return routed_block(layer, config, x, cos, sin, attend)[0]


def routed_block(
    layer: dict[str, Any],
    config: ModelConfig,
    x: Float[Array, "N T D"],
    cos: Float[Array, "N T half"],
    sin: Float[Array, "N T half"],
    attend: Callable[[Array, Array, Array], Array],
    counted: Bool[Array, "N T"] | None = None,
) -> tuple[Float[Array, "N T D"], RouterStats | None]:
    """`block`, and what its router did with the `counted` tokens; None for a dense MLP."""
    with jax.named_scope("attention"):
        h = _norm(x, layer["attn_norm"], config) if config.pre_norms else x
        out = _attention(layer, config, h, cos, sin, attend)
        x = _add(x, out, layer.get("post_attn_norm"), config)
    with jax.named_scope("mlp"):
        h = _norm(x, layer["mlp_norm"], config) if config.pre_norms else x
        if config.num_experts:
            out, stats = expert_mlp(h, layer, config, counted)
        else:
            out, stats = gated_mlp(h, layer, config.activation), None
        return _add(x, out, layer.get("post_mlp_norm"), config), stats


def _attention(layer, config: ModelConfig, h, cos, sin, attend) -> Float[Array, "N T D"]:
    n, t, _ = h.shape
    heads = lambda y: y.reshape(n, t, -1, config.head_dim)  # noqa: E731 - local shorthand
    q, k, v = (
        checkpoint_name(linear(h, layer[name], layer.get(f"{name}_bias")), PRODUCT)
        for name in ("q", "k", "v")
    )
    if config.qk_norm == "all":
        q, k = _norm(q, layer["q_norm"], config), _norm(k, layer["k_norm"], config)
    q = constrain(heads(q), "rows", None, "heads", None)
    k = constrain(heads(k), "rows", None, "kv_heads", None)
    v = constrain(heads(v), "rows", None, "kv_heads", None)
    if config.qk_norm == "head":
        q, k = _norm(q, layer["q_norm"], config), _norm(k, layer["k_norm"], config)
    out = attend(apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v)
    out = checkpoint_name(constrain(out, "rows", None, "heads", None), PRODUCT)
    return checkpoint_name(linear(out.reshape(n, t, -1), layer["o"], layer.get("o_bias")), PRODUCT)


def _norm(x, weight, config: ModelConfig):
    return rms_norm(
        x, weight, config.rms_norm_eps, offset=config.norm_offset, wide_weight=config.wide_norm
    )


def _add(x, out, post_norm, config: ModelConfig):
    """The residual stream and what a half layer adds to it."""
    if config.post_norms:
        out = _norm(out, post_norm, config)
    if config.residual_multiplier != 1.0:
        out = out * jnp.asarray(config.residual_multiplier, out.dtype)
    return constrain(x + out, "rows", None, None)


def layer_flags(config: ModelConfig) -> dict[str, np.ndarray]:
    """What differs between layers, as arrays [L] that are scanned (and cut) with the layers.

    ``windowed`` (bool) where some layers see a window and some all; ``rope`` (index into the kinds
    of rotary embedding that occur, in order of appearance). Empty where all layers are alike.
    """
    windowed = np.asarray([traits.window is not None for traits in config.layers])
    kinds = _rope_kinds(config)
    flags = {}
    if windowed.any() and not windowed.all():
        flags["windowed"] = windowed
    if len(kinds) > 1:
        flags["rope"] = np.asarray([kinds.index(t.rope) for t in config.layers], np.int32)
    return flags


def _rope_kinds(config: ModelConfig) -> list[str]:
    return list(dict.fromkeys(traits.rope for traits in config.layers))


def layer_inputs(
    config: ModelConfig,
    positions: Int[Array, "N T"],
    segment_ids: Int[Array, "N T"],
    prefix_ids: Int[Array, "N T"] | None,
    dtype: jnp.dtype,
) -> Callable[[dict[str, Any]], tuple[Array, Array, Array]]:
    """A function from one layer's flags to its cos, sin [N, T, half] and allowed [N, T, T]."""
    length = positions.shape[1]
    tables = [rotary_tables(positions, config, dtype, kind, length) for kind in _rope_kinds(config)]
    allowed = causal_segments(positions, segment_ids, prefix_ids)
    window = config.sliding_window
    near = None if window is None else allowed & within_window(positions, window)

    def inputs(flags: dict[str, Any]) -> tuple[Array, Array, Array]:
        if "rope" in flags:
            cos, sin = (jnp.stack(table)[flags["rope"]] for table in zip(*tables, strict=True))
        else:
            cos, sin = tables[0]
        if "windowed" in flags:
            return cos, sin, jnp.where(flags["windowed"], near, allowed)
        return cos, sin, near if config.layers[0].window is not None else allowed

    return inputs


def forward(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "N T"],
    positions: Int[Array, "N T"],
    segment_ids: Int[Array, "N T"],
    prefix_ids: Int[Array, "N T"] | None = None,
    *,
    reach: Reach | None = None,
    remat: bool = False,
) -> Float[Array, "N T D"]:
    """Final hidden states (after the last norm) of rows of tokens.

    Args:
        positions: position of each token within its own sequence, rising from left to right.
        segment_ids: tokens see only their own segment; 0 is padding and is seen by no one.
        prefix_ids: a second segment that a token sees, its shared prompt to the left; 0: none.
        reach: bounds on segments and prompts, where they are known: less to look over.
        remat: recompute each layer in the backward pass instead of keeping its activations.
    """
    rows = tokens, positions, segment_ids, prefix_ids
    return routed_forward(params, config, *rows, reach=reach, remat=remat)[0]


def routed_forward(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "N T"],
    positions: Int[Array, "N T"],
    segment_ids: Int[Array, "N T"],
    prefix_ids: Int[Array, "N T"] | None = None,
    *,
    counted: Bool[Array, "N T"] | None = None,
    reach: Reach | None = None,
    remat: bool = False,
) -> tuple[Float[Array, "N T D"], RouterStats | None]:
    """`forward`, and what the routers did, stacked over layers; None without experts.

    Args:
        counted: tokens that enter the routers' statistics; None: all but padding.
    """
    x = embed_tokens(params, config, tokens)
    counted = segment_ids > 0 if counted is None else counted
    rows = (positions, segment_ids, prefix_ids, counted)
    layers, flags = params["layers"], layer_flags(config)

    def run(layers, flags, x, rows):
        return _run_layers(layers, flags, x, rows, config, reach, remat)

    stacks = len(layers["q"].shape) - 2
    if stacks == 1:
        x, stats = run(layers, flags, x, rows)
        return final_hidden(params, config, x), stats
    rounds, stages, each = layers["q"].shape[:stacks]
    flags = {name: stage_layers(flag, stages, rounds) for name, flag in flags.items()}
    if rounds * stages * each > config.num_layers:
        there = np.ones(config.num_layers, bool)
        flags["there"] = stage_layers(there, stages, rounds)
    x, stats = run_pipeline(run, layers, flags, x, rows, microbatches=config.microbatches)
    stats = jax.tree.map(lambda s: s[: config.num_layers], stats)
    return final_hidden(params, config, constrain(x, "rows", None, None)), stats


def _run_layers(layers, flags, x, rows, config: ModelConfig, reach: Reach | None, remat: bool):
    """A scan over stacked layers [k, …] and their flags; the last layers may not be there."""
    positions, segment_ids, prefix_ids, counted = rows
    inputs = layer_inputs(config, positions, segment_ids, prefix_ids, x.dtype)
    shared = prefix_ids is not None
    prefixes = block_prefixes(segment_ids, prefix_ids) if shared else None
    spans = {"reach": reach, "prefixes": prefixes}

    def layer_step(x, scanned):
        layer, flags = scanned
        layer = gather_weights(layer, tree_axes(layer, config), axis_sizes(config))
        cos, sin, allowed = inputs(flags)
        windowed = flags.get("windowed", config.layers[0].window is not None)
        of_row = {"allowed": allowed, "segment_ids": segment_ids, "config": config, **spans}
        attend = functools.partial(attend_rows, **of_row, windowed=windowed, shared=shared)
        out, stats = routed_block(layer, config, x, cos, sin, attend, counted)
        if "there" in flags:
            out = jnp.where(flags["there"], out, x)
        return out, stats

    # Of each layer its products are kept for the backward pass, or all that experts compute. Whole
    # weights are gathered anew: kept, they would be a full copy.
    policy = jax.checkpoint_policies.save_only_these_names(PRODUCT)
    if config.num_experts:
        policy = jax.checkpoint_policies.save_anything_except_these_names(GATHERED)
    policy = None if remat else policy
    layer_step = jax.checkpoint(layer_step, policy=policy, prevent_cse=False)
    return jax.lax.scan(layer_step, x, (layers, flags))


def logits(
    params: Params, hidden: Float[Array, "... D"], config: ModelConfig
) -> Float[Array, "... V"]:
    """Next-token logits, in at least float32. For whole batches use `heads.token_logprobs`.

    Args:
        config: of the model, whose divisor and soft cap are applied.
    """
    rows = hidden.reshape(-1, hidden.shape[-1])
    out = product(rows, output_head(params)).reshape(*hidden.shape[:-1], -1)
    if config.logit_divisor != 1.0:
        out = out / config.logit_divisor
    return soft_cap(out, config.logit_softcap)
