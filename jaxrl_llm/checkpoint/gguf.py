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
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}

    def read(name: str) -> np.ndarray:
        part = name.split(".")[-2]
        tensor = file.read(name)
        return _unpermute(tensor, heads[part]) if part in heads else tensor

    params = build_params(
        config,
        NAMES[config.family],
        file.tensors,
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
    prefix = f"{architecture}."
    values = {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}
    need = _Needed(values, prefix, file.path.name)
    heads, width = need("attention.head_count"), need("embedding_length")
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path.name} lacks tensor token_embd.weight of the model")
    fields = {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": width,
        "intermediate_size": need("feed_forward_length"),
        "num_layers": need("block_count"),
        "num_heads": heads,
        "num_kv_heads": values.get("attention.head_count_kv", heads),
        "head_dim": values.get("attention.key_length", width // max(heads, 1)),
        "max_position_embeddings": need("context_length"),
        "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
        "rope_theta": values.get("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    for name in ("num_heads", "num_kv_heads", "head_dim"):
        if not isinstance(fields[name], int) or fields[name] < 1:
            raise ModelError(f"{file.path.name} has an unusable {name}", got=fields[name])
    if fields["num_heads"] % fields["num_kv_heads"]:
        raise ModelError(
            f"{file.path.name} has query heads that its key heads don't divide",
            got=f"{heads} and {fields['num_kv_heads']}",
        )
    _refuse_unknown(values, fields, prefix, file.path.name)
    return ModelConfig(**fields, family=architecture)


class _Needed:
    """Looks a key up, or says which one is missing."""

    def __init__(self, values: Mapping[str, Any], prefix: str, source: str):
        self.values, self.prefix, self.source = values, prefix, source

    def __call__(self, key: str) -> Any:
        if key not in self.values:
            raise ModelError(f"the metadata of {self.source} has no {self.prefix}{key}")
        return self.values[key]


_USED = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.freq_base",
    "vocab_size",
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
        if key in _USED:
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
