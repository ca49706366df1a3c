# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Model families as rows. `hf_config.py` reads and writes `config.json` by them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.hf_layers import (
    read_alternating,
    read_nope,
    read_upper_windows,
    read_window,
    read_window_if_used,
    write_layer_types,
    write_nope,
    write_upper_windows,
    write_window,
    write_window_if_used,
)

Reader = Callable[[Mapping[str, Any], int, object], dict[str, Any]]
Writer = Callable[[ModelConfig], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Layers:
    """How a family tells which layers are windowed or unrotated.

    Attributes:
        read: (values, number of layers, source) → fields of `ModelConfig`.
        write: the attributes of a configuration.
        uses: the attributes that `read` looks at.
    """

    read: Reader = lambda values, count, source: {}
    write: Writer = lambda config: {}
    uses: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Family:
    """How a family writes its `config.json`.

    Attributes:
        architecture: the one entry of `architectures`.
        traits: fields of `ModelConfig` that are the same for the whole family.
        fields: attribute → field or fields of `ModelConfig`, beyond `BASE_FIELDS`.
        defaults: attribute → what `transformers` assumes where it is absent.
        only: attribute → the values that mean what we compute; any other value is refused.
            The first one is what we write, unless it is None.
        layers: how single layers differ.
        rope_theta: the base that `transformers` assumes.
        partial_rotary: whether a part of each head may be rotated.
        rope_kinds: other names of kinds of scaling.
        no_effect: attributes that change nothing in the model's function, beyond `NO_EFFECT`.
    """

    architecture: str
    traits: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fields: Mapping[str, str | tuple[str, ...]] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    layers: Layers = Layers()
    rope_theta: float = 10000.0
    partial_rotary: bool = False
    rope_kinds: Mapping[str, str] = dataclasses.field(default_factory=dict)
    no_effect: frozenset[str] = frozenset()


BASE_FIELDS: dict[str, str | tuple[str, ...]] = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
    "tie_word_embeddings": "tie_word_embeddings",
}
ATTENTION_BIAS = {"attention_bias": ("qkv_bias", "o_bias")}
MLP_BIAS = {"mlp_bias": "mlp_bias"}
EXPERTS = {"num_experts_per_tok": "experts_per_token", "router_aux_loss_coef": "router_aux_coef"}

BASE_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_SILU = {"hidden_act": ("silu",)}
_GELU = {"hidden_activation": ("gelu_pytorch_tanh",), "use_bidirectional_attention": (None, False)}
_NOT_QUANTISED = {"quantization_config": (None,), "is_encoder_decoder": (False,)}

# Attributes of any config.json that change nothing in what the model computes from given tokens:
# who wrote it, how it was initialised, what `generate` should do by default, which ids are special
# (the tokenizer reads those).
NO_EFFECT = frozenset(
    {
        "_attn_implementation_autoset",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "do_sample",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "max_length",
        "max_new_tokens",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "temperature",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
    }
)

_WINDOW = Layers(read_window, write_window, ("sliding_window",))
_QWEN_WINDOW = Layers(
    read_upper_windows,
    write_upper_windows,
    ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
)
_ALTERNATING_USES = ("sliding_window", "layer_types")

# model_type → its row.
FAMILIES: dict[str, Family] = {
    # Llama 2, 3, 3.1, 3.2; SmolLM2.
    "llama": Family(
        architecture="LlamaForCausalLM",
        fields={**ATTENTION_BIAS, **MLP_BIAS},
        only={**_SILU, "rope_interleaved": (None, False), **_NOT_QUANTISED},
        no_effect=frozenset({"is_llama_config"}),
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        only={**_SILU, **_NOT_QUANTISED},
        layers=_WINDOW,
    ),
    # Qwen2, Qwen2.5.
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        traits={"qkv_bias": True},
        defaults={
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
        },
        only={**_SILU, "use_mrope": (None, False), **_NOT_QUANTISED},
        layers=_QWEN_WINDOW,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        traits={"qk_norm": "head"},
        fields=ATTENTION_BIAS,
        defaults={
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
        },
        only={**_SILU, **_NOT_QUANTISED},
        layers=_QWEN_WINDOW,
    ),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM",
        traits={"post_norms": True, "norm_offset": True, "activation": "gelu_tanh"},
        fields={
            **ATTENTION_BIAS,
            "query_pre_attn_scalar": "attention_scale",
            "attn_logit_softcapping": "attention_softcap",
            "final_logit_softcapping": "logit_softcap",
        },
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window": 4096,
        },
        only={**_GELU, **_NOT_QUANTISED},
        layers=Layers(read_alternating(2), write_layer_types, _ALTERNATING_USES),
        no_effect=frozenset({"hidden_act"}),
    ),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        traits={
            "post_norms": True,
            "norm_offset": True,
            "activation": "gelu_tanh",
            "qk_norm": "head",
        },
        fields={
            **ATTENTION_BIAS,
            "query_pre_attn_scalar": "attention_scale",
            "final_logit_softcapping": "logit_softcap",
        },
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
        },
        only={**_GELU, "attn_logit_softcapping": (None,), **_NOT_QUANTISED},
        layers=Layers(
            read_alternating(6),
            write_layer_types,
            (*_ALTERNATING_USES, "sliding_window_pattern", "_sliding_window_pattern"),
        ),
        no_effect=frozenset({"hidden_act"}),
    ),
    "olmo2": Family(
        architecture="Olmo2ForCausalLM",
        traits={"pre_norms": False, "post_norms": True, "qk_norm": "all", "wide_norm": True},
        fields=ATTENTION_BIAS,
        defaults={"rms_norm_eps": 1e-5},
        only={**_SILU, **_NOT_QUANTISED},
    ),
    # Phi-3, Phi-3.5, Phi-4; Phi-4-mini rotates a part of each head.
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        only={
            **_SILU,
            "full_attn_mod": (None, 1),
            "interpolate_factor": (None, 1),
            "lm_head_bias": (None, False),
            **_NOT_QUANTISED,
        },
        layers=_WINDOW,
        partial_rotary=True,
        rope_kinds={"su": "longrope", "yarn": "longrope"},
        no_effect=frozenset({"embd_pdrop", "resid_pdrop", "auto_map", "attention_bias"}),
    ),
    "granite": Family(
        architecture="GraniteForCausalLM",
        fields={
            **ATTENTION_BIAS,
            **MLP_BIAS,
            "embedding_multiplier": "embedding_multiplier",
            "residual_multiplier": "residual_multiplier",
            "attention_multiplier": "attention_scale",
            "logits_scaling": "logit_divisor",
        },
        defaults={
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
        only={**_SILU, **_NOT_QUANTISED},
    ),
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM",
        fields={**ATTENTION_BIAS, **MLP_BIAS},
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
        },
        only={**_SILU, **_NOT_QUANTISED},
        layers=Layers(
            read_nope,
            write_nope,
            (
                "no_rope_layers",
                "no_rope_layer_interval",
                "use_sliding_window",
                "sliding_window",
                "layer_types",
            ),
        ),
        rope_theta=2e6,
        no_effect=frozenset({"max_window_layers"}),
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        fields={**EXPERTS, "num_local_experts": "num_experts"},
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "router_aux_loss_coef": 0.001,
        },
        only={**_SILU, "router_jitter_noise": (0.0, None), **_NOT_QUANTISED},
        layers=_WINDOW,
        rope_theta=1e6,
        no_effect=frozenset({"output_router_logits"}),
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        traits={"qk_norm": "head"},
        fields={
            **ATTENTION_BIAS,
            **EXPERTS,
            "num_experts": "num_experts",
            "moe_intermediate_size": "expert_size",
            "norm_topk_prob": "renormalize_experts",
        },
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "num_experts_per_tok": 8,
            "num_experts": 128,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.001,
        },
        only={
            **_SILU,
            "decoder_sparse_step": (1,),
            "mlp_only_layers": ([], None),
            **_NOT_QUANTISED,
        },
        layers=Layers(
            read_window_if_used, write_window_if_used, ("use_sliding_window", "sliding_window")
        ),
        no_effect=frozenset({"output_router_logits", "max_window_layers"}),
    ),
}
