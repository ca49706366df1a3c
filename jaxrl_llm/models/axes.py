# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The logical axes of every parameter, by its name; `sharding/rules.py` maps them to a mesh."""

from __future__ import annotations

from typing import Any

import jax

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.shapes import layer_shapes
from jaxrl_llm.sharding.rules import Axes

_TOP: dict[str, Axes] = {
    "embed": ("vocab", "embed"),
    "head": ("vocab", "embed"),
    "final_norm": ("embed",),
}
_SCORE: dict[str, Axes] = {"weight": ("classes", "embed"), "bias": ("classes",)}
_STACKS: dict[int, Axes] = {0: (), 1: ("layers",), 3: ("round", "stage", "run")}


def axis_sizes(config: ModelConfig) -> dict[str, int]:
    """How many units of each logical axis there are for a mesh to divide."""
    return {
        "vocab": config.vocab_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "mlp": config.expert_size if config.num_experts else config.intermediate_size,
        "experts": config.num_experts,
        "embed": config.hidden_size,
        "layers": config.num_layers,
    }


def layer_axes(config: ModelConfig) -> dict[str, Axes]:
    """The logical axes of every parameter of one layer; as many as `layer_shapes` has."""
    experts = ("experts",) if config.num_experts else ()
    # One norm for all heads is as long as their rows; a norm of each head is the same for all.
    by_head = config.qk_norm == "head"
    known: dict[str, Axes] = {
        "q": ("heads", "embed"),
        "k": ("kv_heads", "embed"),
        "v": ("kv_heads", "embed"),
        "o": ("embed", "heads"),
        "q_bias": ("heads",),
        "k_bias": ("kv_heads",),
        "v_bias": ("kv_heads",),
        "o_bias": ("embed",),
        "q_norm": ("head_dim",) if by_head else ("heads",),
        "k_norm": ("head_dim",) if by_head else ("kv_heads",),
        "router": ("experts", "embed"),
        "gate": (*experts, "mlp", "embed"),
        "up": (*experts, "mlp", "embed"),
        "down": (*experts, "embed", "mlp"),
        "gate_bias": ("mlp",),
        "up_bias": ("mlp",),
        "down_bias": ("embed",),
        "attn_norm": ("embed",),
        "mlp_norm": ("embed",),
        "post_attn_norm": ("embed",),
        "post_mlp_norm": ("embed",),
    }
    axes = {name: known[name] for name in layer_shapes(config)}
    assert all(len(axes[name]) == len(shape) for name, shape in layer_shapes(config).items())
    return axes


def tree_axes(tree: Any, config: ModelConfig) -> Any:
    """The logical axes of every leaf of a tree that holds arrays of parameters' names and shapes.

    That is parameters, adapters, a critic's, gradients, an optimiser's state. What has no
    parameter's shape (step counts) is whole everywhere. Layers are stacked [L, …], [rounds, stages,
    layers, …], or not at all.
    """
    return jax.tree_util.tree_map_with_path(lambda path, x: _leaf_axes(path, x, config), tree)


def _leaf_axes(path: tuple[Any, ...], leaf: Any, config: ModelConfig) -> Axes:
    names = [_name(key) for key in path]
    whole: Axes = (None,) * len(leaf.shape)
    matrices, shapes = layer_axes(config), layer_shapes(config)
    if len(names) > 1 and names[-2] == "score":
        axes = _SCORE[names[-1]]
        return axes if len(axes) == len(leaf.shape) else whole
    if names[-1] in _TOP:
        axes = _TOP[names[-1]]
        return axes if len(axes) == len(leaf.shape) else whole
    part = names.pop() if names[-1] in ("a", "b", "magnitude", "base") else "base"
    if not names or names[-1] not in matrices:
        return whole
    axes, shape = matrices[names[-1]], shapes[names[-1]]
    if part != "base":
        out, width = axes
        axes = {"a": ("rank", width), "b": (out, "rank"), "magnitude": (out,)}[part]
    stack = _STACKS.get(len(leaf.shape) - len(axes))
    if stack is None or (part == "base" and leaf.shape[len(stack) :] != shape):
        return whole
    return (*stack, *axes)


def _name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
