# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Which parameters a decoder has, and their shapes: the one place that knows. Counts follow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl_llm.models.config import ModelConfig

Shape = tuple[int, ...]


def param_shapes(config: ModelConfig) -> dict[str, Any]:
    """The shape of every parameter, as a pytree of tuples; layers are stacked on a first axis L."""
    n = config.num_layers
    shapes: dict[str, Any] = {
        "embed": (config.vocab_size, config.hidden_size),
        "layers": {name: (n, *shape) for name, shape in layer_shapes(config).items()},
        "final_norm": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes["head"] = (config.vocab_size, config.hidden_size)
    return shapes


def layer_shapes(config: ModelConfig) -> dict[str, Shape]:
    """The shape of every parameter of one layer, in the order in which they are used."""
    return {**_attention_shapes(config), **_mlp_shapes(config)}


def _attention_shapes(config: ModelConfig) -> dict[str, Shape]:
    d, q = config.hidden_size, config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    shapes: dict[str, Shape] = {"attn_norm": (d,)} if config.pre_norms else {}
    shapes |= {"q": (q, d), "k": (kv, d), "v": (kv, d)}
    if config.qkv_bias:
        shapes |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
    if config.qk_norm == "head":
        shapes |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    if config.qk_norm == "all":
        shapes |= {"q_norm": (q,), "k_norm": (kv,)}
    shapes["o"] = (d, q)
    if config.o_bias:
        shapes["o_bias"] = (d,)
    if config.post_norms:
        shapes["post_attn_norm"] = (d,)
    return shapes


def _mlp_shapes(config: ModelConfig) -> dict[str, Shape]:
    d, f = config.hidden_size, config.intermediate_size
    shapes: dict[str, Shape] = {"mlp_norm": (d,)} if config.pre_norms else {}
    if config.num_experts:
        e, f = config.num_experts, config.expert_size
        shapes |= {"router": (e, d), "gate": (e, f, d), "up": (e, f, d), "down": (e, d, f)}
    else:
        shapes |= {"gate": (f, d), "up": (f, d), "down": (d, f)}
    if config.mlp_bias:
        shapes |= {"gate_bias": (f,), "up_bias": (f,), "down_bias": (d,)}
    if config.post_norms:
        shapes["post_mlp_norm"] = (d,)
    return shapes
