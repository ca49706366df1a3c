# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""GGUF files in: configuration and parameters of a model from its metadata and tensors."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxrl_llm.checkpoint.gguf_file import GGUFFile
from jaxrl_llm.checkpoint.stacking import build_params
from jaxrl_llm.errors import ModelError
from jaxrl_llm.models.config import ModelConfig, RopeScaling
from jaxrl_llm.models.hf_layers import read_alternating
from jaxrl_llm.models.hf_values import MOST_LAYERS, real, unusable, whole
from jaxrl_llm.models.presets import FAMILIES
from jaxrl_llm.models.rotary import inverse_frequencies
from jaxrl_llm.models.transformer import Params

_NEEDED = object()
# Key → field of ModelConfig, and its value where the key is absent (None: follows from the others).
_FIELDS: dict[str, tuple[str, Any]] = {
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
_REALS = {
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.freq_base_swa",
    "attn_logit_softcapping",
    "final_logit_softcapping",
}
_BASES = ("rope.freq_base", "rope.freq_base_swa")
_ROPE_FREQS = "rope_freqs.weight"


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How GGUF files hold the models of a family.

    Attributes:
        family: the row in `models/presets.py`.
        fields: keys beyond those of all.
        permuted: the rows of q and k lie with the two entries of each rotation side by side.
        plus_one: norms are stored with the 1 that the model adds to them.
        period: of this many layers the last is not windowed; 0: by no pattern.
        largest: number of layers of the one size whose query scale is (D / H)^(−1/2), which no key
            tells.
    """

    family: str
    fields: Mapping[str, tuple[str, Any]] = dataclasses.field(default_factory=dict)
    permuted: bool = False
    plus_one: bool = False
    period: int = 0
    largest: int = 0


def load_gguf(
    path: str | pathlib.Path | GGUFFile, dtype: DTypeLike = jnp.float32, shardings: Any = None
) -> tuple[ModelConfig, Params]:
    """Configuration and parameters of a GGUF file of a Llama, Mistral, Qwen2, Qwen3 or Gemma model.

    Permuted rows of q and k are put back into the half-split order that `rotary.apply_rotary` and
    HF checkpoints use.

    Raises:
        ModelError: the file is missing, damaged, or of an unknown architecture or tensor type.
    """
    file = path if isinstance(path, GGUFFile) else GGUFFile(path)
    config = config_from_gguf(file)
    for name in file.tensors:
        file.check_kind(name)
    how = ARCHITECTURES[file.metadata["general.architecture"]]
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads} if how.permuted else {}

    def read(name: str, rows: slice | None = None) -> np.ndarray:
        part = name.split(".")[-2]
        tensor = file.read(name)
        if part in heads:
            tensor = _unpermute(tensor, heads[part])
        if how.plus_one and part.endswith("norm"):
            tensor = tensor - np.asarray(1, tensor.dtype)
        return tensor if rows is None else tensor[rows]

    shapes = {name: tensor.shape for name, tensor in file.tensors.items() if name != _ROPE_FREQS}
    params = build_params(
        config,
        NAMES,
        shapes,
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
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ModelError(
            f"the architecture of {file.path.name} is not supported",
            got=f"{name!r:.100}",
            expected="one of " + ", ".join(ARCHITECTURES),
        )
    how, prefix, source = ARCHITECTURES[name], f"{name}.", file.path.name
    values = {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{source} lacks tensor token_embd.weight of the model")
    known = {**_FIELDS, **how.fields}
    fields = {
        field: _positive(values, key, default, prefix, source)
        for key, (field, default) in known.items()
    }
    fields["num_kv_heads"] = fields["num_kv_heads"] or fields["num_heads"]
    fields["head_dim"] = fields["head_dim"] or fields["hidden_size"] // fields["num_heads"]
    if fields["num_heads"] % fields["num_kv_heads"]:
        raise ModelError(
            f"{source} has query heads that its key heads don't divide",
            got=f"{fields['num_heads']} and {fields['num_kv_heads']}",
        )
    if fields["head_dim"] % 2:
        raise unusable(fields["head_dim"], f"{prefix}attention.key_length", source, "an even one")
    _refuse_unknown(values, known, fields, prefix, source)
    if "vocab_size" in values:
        whole(values["vocab_size"], f"{prefix}vocab_size", source, most=embedding.shape[0])
    if fields["num_layers"] > len(file.tensors):
        raise ModelError(
            f"{source} holds fewer tensors than its configuration has layers",
            got=f"{len(file.tensors)} tensors, {fields['num_layers']} layers",
        )
    family = "mistral" if name == "llama" and fields.get("sliding_window") else how.family
    config = ModelConfig(
        **{**FAMILIES[family].traits, **fields, **_unsaid(how, fields, source)},
        rope_scaling=_linear_scaling(values, prefix, source),
        vocab_size=embedding.shape[0],
        tie_word_embeddings="output.weight" not in file.tensors,
        family=family,
    )
    return _with_rope_factors(config, file) if _ROPE_FREQS in file.tensors else config


def _unsaid(how: Architecture, fields: dict[str, Any], source: str) -> dict[str, Any]:
    """What no key tells because the programs that read these files know it."""
    unsaid: dict[str, Any] = {}
    if how.plus_one:  # Gemma
        unsaid["embedding_multiplier"] = math.sqrt(fields["hidden_size"])
        large = fields["num_layers"] == how.largest
        width = fields["hidden_size"] // fields["num_heads"] if large else fields["head_dim"]
        unsaid["attention_scale"] = width**-0.5
    if how.period:
        window = {"sliding_window": fields["sliding_window"]}
        unsaid |= read_alternating(how.period)(window, fields["num_layers"], source)
    return unsaid


def _linear_scaling(values: Mapping[str, Any], prefix: str, source: str) -> RopeScaling | None:
    kind = values.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    factor = values.get("rope.scaling.factor")
    if kind != "linear" or not isinstance(factor, float) or not 0 < factor < math.inf:
        raise ModelError(
            f"{prefix}rope.scaling.type of {source} asks for what is not supported",
            got=f"{kind!r:.50} with factor {factor!r:.50}",
            expected="'none' or 'linear'",
            hint="the model's HF folder",
        )
    return RopeScaling("linear", factor=factor)


def _with_rope_factors(config: ModelConfig, file: GGUFFile) -> ModelConfig:
    """Llama 3.1 and later: the file holds a divisor for each frequency instead of the rule."""
    file.check_kind(_ROPE_FREQS)
    divisors = np.asarray(file.read(_ROPE_FREQS), np.float32).reshape(-1)
    half = config.head_dim // 2
    if divisors.shape != (half,) or not np.all(divisors >= 1) or config.rope_scaling:
        raise ModelError(
            f"tensor {_ROPE_FREQS} of {file.path.name} is not a divisor for each frequency",
            got=divisors.shape,
            expected=f"{half} numbers of at least 1",
        )
    if np.all(divisors == 1):
        return config
    rule = RopeScaling(
        "llama3",
        factor=round(float(divisors[-1]), 3),
        original_context=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    ruled = dataclasses.replace(config, rope_scaling=rule)
    plain = inverse_frequencies(config)[0]
    if np.allclose(plain / inverse_frequencies(ruled)[0], divisors, rtol=1e-4):
        return ruled
    factors = tuple(divisors.tolist())
    free = RopeScaling(
        "longrope",
        original_context=config.max_position_embeddings,
        attention_factor=1.0,
        short_factor=factors,
        long_factor=factors,
    )
    return dataclasses.replace(config, rope_scaling=free)


def _positive(values: Mapping[str, Any], key: str, default: Any, prefix: str, source: str) -> Any:
    if key not in values:
        if default is _NEEDED:
            raise ModelError(f"the metadata of {source} has no {prefix}{key}")
        return default
    if key in _REALS:
        return real(values[key], prefix + key, source, above=1.0 if key in _BASES else 0.0)
    return whole(
        values[key],
        prefix + key,
        source,
        most=MOST_LAYERS if key == "block_count" else 2**31 - 1,
    )


def _refuse_unknown(values, known, fields, prefix: str, source: str) -> None:
    """Every key that isn't used must hold the one value that changes nothing."""
    harmless = {
        "attention.value_length": fields["head_dim"],
        "rope.dimension_count": fields["head_dim"],
        "expert_count": 0,
        "expert_used_count": 0,
        "attention.causal": True,
    }
    used = {*known, "vocab_size", "rope.scaling.type", "rope.scaling.factor"}
    for key, value in values.items():
        if key in used:
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


_WINDOW = "attention.sliding_window"
ARCHITECTURES: dict[str, Architecture] = {
    # Llama, SmolLM2, Mistral (which has a window, where its file says so).
    "llama": Architecture("llama", {_WINDOW: ("sliding_window", None)}, permuted=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "gemma2": Architecture(
        "gemma2",
        {
            _WINDOW: ("sliding_window", 4096),
            "attn_logit_softcapping": ("attention_softcap", 50.0),
            "final_logit_softcapping": ("logit_softcap", 30.0),
        },
        plus_one=True,
        period=2,
        largest=46,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        {
            _WINDOW: ("sliding_window", _NEEDED),
            "rope.freq_base": ("rope_theta", 1e6),
            "rope.freq_base_swa": ("local_rope_theta", 1e4),
            "final_logit_softcapping": ("logit_softcap", None),
        },
        plus_one=True,
        period=6,
        largest=62,
    ),
}

_BLOCK = "blk.{}."
# Leaf → the name of its tensor, the same in all architectures.
NAMES: dict[str, str] = {
    "embed": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
    "layers.attn_norm": _BLOCK + "attn_norm.weight",
    **{f"layers.{name}": f"{_BLOCK}attn_{name}.weight" for name in "qkv"},
    **{f"layers.{name}_bias": f"{_BLOCK}attn_{name}.bias" for name in "qkv"},
    **{f"layers.{name}_norm": f"{_BLOCK}attn_{name}_norm.weight" for name in "qk"},
    "layers.o": _BLOCK + "attn_output.weight",
    "layers.post_attn_norm": _BLOCK + "post_attention_norm.weight",
    "layers.mlp_norm": _BLOCK + "ffn_norm.weight",
    **{f"layers.{name}": f"{_BLOCK}ffn_{name}.weight" for name in ("gate", "up", "down")},
    "layers.post_mlp_norm": _BLOCK + "post_ffw_norm.weight",
}
