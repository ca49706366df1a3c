# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""GGUF files in: metadata, configuration, and weights dequantised tensor by tensor.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
from gguf import GGMLQuantizationType as Kind
from jaxtyping import Float, UInt8

from jaxrl_llm.checkpoint.stacking import build_params
from jaxrl_llm.errors import ModelError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.transformer import Params


class GGUFFile:
    """An open GGUF file: `metadata` as plain values, `tensors` by name; weights are read on demand.

    Raises:
        ModelError: no such file, or not a whole GGUF file.
    """

    def __init__(self, path: str | pathlib.Path):
        self.path = pathlib.Path(path)
        if not self.path.is_file():
            raise ModelError("the GGUF file does not exist", got=self.path)
        try:
            reader = gguf.GGUFReader(self.path)
            self.metadata = {name: field.contents() for name, field in reader.fields.items()}
        except (ValueError, LookupError, TypeError, OverflowError, MemoryError) as error:
            raise ModelError(
                f"{self.path} is not a whole GGUF file: {error}", hint="fetch the file again"
            ) from error
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}

    def read(self, name: str) -> np.ndarray:
        """One tensor, dequantised to float32 (F16 stays float16)."""
        tensor = self.tensors[name]
        dequantise = DEQUANTISERS.get(tensor.tensor_type)
        if dequantise is None:
            raise ModelError(
                f"tensor {name} of {self.path.name} is of a type that is not supported",
                got=tensor.tensor_type.name,
                expected="one of " + ", ".join(kind.name for kind in DEQUANTISERS),
                hint="another quantisation of the model, or its HF folder",
            )
        shape = tuple(int(size) for size in reversed(tensor.shape))
        return dequantise(np.asarray(tensor.data)).reshape(shape)


def load_gguf(
    path: str | pathlib.Path | GGUFFile, dtype: jnp.dtype = jnp.float32, shardings: Any = None
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
        "vocab_size": int(file.tensors["token_embd.weight"].shape[1]),
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


# A row is a run of blocks of 32 values. Q8_0: float16 scale d, 32 × int8 q: x = d·q.
# Q4_0: float16 d, 16 bytes of which the low halves are values 0–15 and the high ones 16–31:
# x = d·(q − 8). Q4_1: float16 d and m, then the same: x = d·q + m.


def _blocks(data: UInt8[np.ndarray, "rows bytes"], size: int) -> UInt8[np.ndarray, "blocks {size}"]:
    return np.ascontiguousarray(data).reshape(-1, size)


def _half(blocks: np.ndarray, start: int) -> Float[np.ndarray, "blocks 1"]:
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: UInt8[np.ndarray, "blocks 16"]) -> Float[np.ndarray, "blocks 32"]:
    return np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)


def _dequantise_q8_0(data: UInt8[np.ndarray, "rows bytes"]) -> Float[np.ndarray, "blocks 32"]:
    blocks = _blocks(data, 34)
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _half(blocks, 0)


def _dequantise_q4_0(data: UInt8[np.ndarray, "rows bytes"]) -> Float[np.ndarray, "blocks 32"]:
    blocks = _blocks(data, 18)
    return (_nibbles(blocks[:, 2:]) - np.float32(8)) * _half(blocks, 0)


def _dequantise_q4_1(data: UInt8[np.ndarray, "rows bytes"]) -> Float[np.ndarray, "blocks 32"]:
    blocks = _blocks(data, 20)
    return _nibbles(blocks[:, 4:]) * _half(blocks, 0) + _half(blocks, 2)


DEQUANTISERS: dict[Kind, Callable[[np.ndarray], np.ndarray]] = {
    Kind.F32: lambda data: data.view(np.float32),
    Kind.F16: lambda data: data.view(np.float16),
    Kind.Q8_0: _dequantise_q8_0,
    Kind.Q4_0: _dequantise_q4_0,
    Kind.Q4_1: _dequantise_q4_1,
}

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
