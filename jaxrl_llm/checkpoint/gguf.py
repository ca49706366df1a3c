# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""GGUF files in: configuration and parameters of a model from its metadata and tensors."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxrl_llm.checkpoint.gguf_file import GGUFFile
from jaxrl_llm.checkpoint.stacking import build_params
from jaxrl_llm.errors import ModelError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.transformer import Params


def load_gguf(
    path: str | pathlib.Path | GGUFFile, dtype: DTypeLike = jnp.float32, shardings: Any = None
) -> tuple[ModelConfig, Params]:
    """Configuration and parameters of a GGUF file of a Llama model.

    The rows of q and k lie permuted in the file (pairs of a rotation side by side) and are put back
    into the half-split order that `layers.apply_rotary` and HF checkpoints use.

    Raises:
        ModelError: the file is missing, damaged, or of an unknown architecture or tensor type.
    """
    file = path if isinstance(path, GGUFFile) else GGUFFile(path)
    config = config_from_gguf(file)
    for name in file.tensors:
        file.check_kind(name)
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}

    def read(name: str) -> np.ndarray:
        part = name.split(".")[-2]
        tensor = file.read(name)
        return _unpermute(tensor, heads[part]) if part in heads else tensor

    params = build_params(
        config,
        NAMES[config.family],
        {name: tensor.shape for name, tensor in file.tensors.items()},
        read,
        dtype=dtype,
        shardings=shardings,
        source=file.path.name,
    )
    return config, params


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """The configuration in a GGUF file's metadata, read strictly: each key is used or refused.

    Raises:
        ModelError: an unknown architecture, or a key is missing, unknown or not supported.
    """
    architecture = file.metadata.get("general.architecture")
    if architecture not in NAMES:
        raise ModelError(
            f"the architecture of {file.path.name} is not supported",
            got=repr(architecture),
            expected="one of " + ", ".join(NAMES),
        )
    prefix, source = f"{architecture}.", file.path.name
    values = {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{source} lacks tensor token_embd.weight of the model")
    fields = {
        field: _positive(values, key, default, prefix, source)
        for key, (field, default) in _FIELDS.items()
    }
    fields["num_kv_heads"] = fields["num_kv_heads"] or fields["num_heads"]
    fields["head_dim"] = fields["head_dim"] or fields["hidden_size"] // fields["num_heads"]
    if fields["num_heads"] % fields["num_kv_heads"]:
        raise ModelError(
            f"{source} has query heads that its key heads don't divide",
            got=f"{fields['num_heads']} and {fields['num_kv_heads']}",
        )
    _refuse_unknown(values, fields, prefix, source)
    return ModelConfig(
        **fields,
        vocab_size=embedding.shape[0],
        tie_word_embeddings="output.weight" not in file.tensors,
        family=architecture,
    )


def _positive(values: Mapping[str, Any], key: str, default: Any, prefix: str, source: str) -> Any:
    if key not in values:
        if default is _NEEDED:
            raise ModelError(f"the metadata of {source} has no {prefix}{key}")
        return default
    value = values[key]
    kinds = float if key in _REALS else int
    if not isinstance(value, kinds) or isinstance(value, bool) or not value > 0:
        raise ModelError(f"{prefix}{key} of {source} is unusable", got=repr(value))
    return value


_NEEDED = object()
_REALS = {"attention.layer_norm_rms_epsilon", "rope.freq_base"}
# Key → field of ModelConfig, and its value where the key is absent (None: follows from the others).
_FIELDS = {
    "embedding_length": ("hidden_size", _NEEDED),
    "feed_forward_length": ("intermediate_size", _NEEDED),
    "block_count": ("num_layers", _NEEDED),
    "attention.head_count": ("num_heads", _NEEDED),
    "attention.head_count_kv": ("num_kv_heads", None),
    "attention.key_length": ("head_dim", None),
    "context_length": ("max_position_embeddings", _NEEDED),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", _NEEDED),
    "rope.freq_base": ("rope_theta", 10000.0),
}


def _refuse_unknown(values, fields, prefix: str, source: str) -> None:
    """Every key that isn't used must hold the one value that changes nothing."""
    harmless = {
        "attention.value_length": fields["head_dim"],
        "rope.dimension_count": fields["head_dim"],
        "rope.scaling.type": "none",
        "expert_count": 0,
        "expert_used_count": 0,
        "attention.causal": True,
    }
    for key, value in values.items():
        if key in _FIELDS or key == "vocab_size":
            continue
        if key not in harmless:
            raise ModelError(
                f"the metadata of {source} has a key that is not known", got=prefix + key
            )
        if value != harmless[key]:
            raise ModelError(
                f"{prefix}{key} of {source} asks for what is not supported",
                got=repr(value),
                expected=repr(harmless[key]),
            )


def _unpermute(w: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from (0, half, 1, half + 1, …) back to (0, 1, …, half, half + 1, …)."""
    rows, columns = w.shape
    pairs = w.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


# Architecture → leaf → the name of its tensor.
NAMES: dict[str, dict[str, str]] = {
    "llama": {
        "embed": "token_embd.weight",
        "final_norm": "output_norm.weight",
        "head": "output.weight",
        "layers.attn_norm": "blk.{}.attn_norm.weight",
        "layers.q": "blk.{}.attn_q.weight",
        "layers.k": "blk.{}.attn_k.weight",
        "layers.v": "blk.{}.attn_v.weight",
        "layers.o": "blk.{}.attn_output.weight",
        "layers.mlp_norm": "blk.{}.ffn_norm.weight",
        "layers.gate": "blk.{}.ffn_gate.weight",
        "layers.up": "blk.{}.ffn_up.weight",
        "layers.down": "blk.{}.ffn_down.weight",
    },
}
