# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What HF checkpoints call the parameters: family → leaf → the name of its tensor.

`{}` is the layer's number, `{expert}` the expert's; leaves of one name are fused (`stacking.py`).
"""

from __future__ import annotations

_LAYER = "model.layers.{}."
_ATTN = _LAYER + "self_attn."
_MLP = _LAYER + "mlp."

_BASE = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "layers.attn_norm": _LAYER + "input_layernorm.weight",
    "layers.mlp_norm": _LAYER + "post_attention_layernorm.weight",
    **{f"layers.{name}": _ATTN + f"{name}_proj.weight" for name in "qkvo"},
    **{f"layers.{name}_bias": _ATTN + f"{name}_proj.bias" for name in "qkvo"},
    **{f"layers.{name}_norm": _ATTN + f"{name}_norm.weight" for name in "qk"},
    **{f"layers.{name}": _MLP + f"{name}_proj.weight" for name in ("gate", "up", "down")},
    **{f"layers.{name}_bias": _MLP + f"{name}_proj.bias" for name in ("gate", "up", "down")},
}
_POST_NORMS = {
    "layers.post_attn_norm": _LAYER + "post_attention_layernorm.weight",
    "layers.post_mlp_norm": _LAYER + "post_feedforward_layernorm.weight",
}
_FOUR_NORMS = {**_POST_NORMS, "layers.mlp_norm": _LAYER + "pre_feedforward_layernorm.weight"}
_FUSED = {
    **{f"layers.{name}": _ATTN + "qkv_proj.weight" for name in "qkv"},
    **{f"layers.{name}": _MLP + "gate_up_proj.weight" for name in ("gate", "up")},
}
_MIXTRAL = _LAYER + "block_sparse_moe."

HF_NAMES: dict[str, dict[str, str]] = {
    "llama": _BASE,
    "mistral": _BASE,
    "qwen2": _BASE,
    "qwen3": _BASE,
    "gemma2": {**_BASE, **_FOUR_NORMS},
    "gemma3_text": {**_BASE, **_FOUR_NORMS},
    "olmo2": {**_BASE, **_POST_NORMS},
    "phi3": {**_BASE, **_FUSED},
    "granite": _BASE,
    "smollm3": _BASE,
    "mixtral": {
        **_BASE,
        "layers.router": _MIXTRAL + "gate.weight",
        "layers.gate": _MIXTRAL + "experts.{expert}.w1.weight",
        "layers.down": _MIXTRAL + "experts.{expert}.w2.weight",
        "layers.up": _MIXTRAL + "experts.{expert}.w3.weight",
    },
    "qwen3_moe": {
        **_BASE,
        "layers.router": _MLP + "gate.weight",
        **{
            f"layers.{name}": _MLP + "experts.{expert}." + f"{name}_proj.weight"
            for name in ("gate", "up", "down")
        },
    },
}
