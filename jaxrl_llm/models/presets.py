# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Model families as rows, and `config.json` read strictly: what isn't known is refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.errors import ModelError
from jaxrl_llm.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Family:
    """How a family writes its `config.json`.

    Attributes:
        architecture: the one entry of `architectures`.
        fields: attribute → field of `ModelConfig`.
        defaults: attribute → what `transformers` assumes where it is absent.
        only: attribute → the values that mean what we compute; any other value is refused.
            The first one is what we write.
        no_effect: attributes that change nothing in the model's function, beyond `NO_EFFECT`.
    """

    architecture: str
    fields: Mapping[str, str]
    defaults: Mapping[str, Any]
    only: Mapping[str, tuple[Any, ...]]
    no_effect: frozenset[str] = frozenset()


def config_from_hf(attributes: Mapping[str, Any], source: object = "config.json") -> ModelConfig:
    """A model's configuration from the attributes in its `config.json`.

    Args:
        source: what the errors call the file.

    Raises:
        ModelError: an unknown family, an attribute that is missing, unknown, or holds a value that
            asks for what is not supported.
    """
    name = attributes.get("model_type")
    if name not in FAMILIES:
        raise ModelError(
            f"the model family of {source} is not supported",
            got=f"model_type {name!r}",
            expected="one of " + ", ".join(FAMILIES),
        )
    family = FAMILIES[name]
    _refuse(attributes, family, source)
    values = {**family.defaults, **{k: v for k, v in attributes.items() if v is not None}}
    fields = {
        field: _positive(values, attribute, source)
        for attribute, field in family.fields.items()
        if attribute in values or attribute not in _DERIVED
    }
    fields.setdefault("num_kv_heads", fields["num_heads"])
    fields.setdefault("head_dim", fields["hidden_size"] // fields["num_heads"])
    fields["rope_theta"] = _rope_theta(values, source)
    if fields["num_heads"] % fields["num_kv_heads"]:
        raise ModelError(
            f"{source} has query heads that its key heads don't divide",
            got=f"{fields['num_heads']} and {fields['num_kv_heads']}",
        )
    return ModelConfig(**fields, family=name)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The attributes of `config.json` for a model, as `transformers` 4 and 5 read them."""
    family = FAMILIES[config.family]
    return {
        "architectures": [family.architecture],
        "model_type": config.family,
        **{attribute: getattr(config, field) for attribute, field in family.fields.items()},
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        **{
            attribute: values[0]
            for attribute, values in family.only.items()
            if values[0] is not None
        },
    }


def _refuse(attributes: Mapping[str, Any], family: Family, source: object) -> None:
    known = {*family.fields, *family.only, *family.no_effect, *NO_EFFECT, *_ROPE, "model_type"}
    for name, value in attributes.items():
        if name not in known:
            raise ModelError(
                f"{source} has an attribute that is not known: {name}",
                got=repr(value),
                hint="if it changes nothing in the model, delete it from the file",
            )
        if name in family.only and value not in family.only[name]:
            raise ModelError(
                f"{source} asks for what is not supported: {name}",
                got=repr(value),
                expected=" or ".join(repr(v) for v in family.only[name]),
            )
    if attributes.get("architectures") not in (None, [family.architecture]):
        raise ModelError(
            f"{source} is of another architecture than its model_type",
            got=attributes["architectures"],
            expected=[family.architecture],
        )


def _positive(values: Mapping[str, Any], attribute: str, source: object) -> Any:
    if attribute not in values:
        raise ModelError(f"{source} lacks the attribute {attribute}")
    value = values[attribute]
    if isinstance(value, bool) if attribute in _FLAGS else _is_positive(value, attribute in _REALS):
        return value
    raise ModelError(f"{source} has an unusable value of {attribute}", got=repr(value))


def _is_positive(value: Any, real: bool) -> bool:
    kinds = (int, float) if real else int
    return isinstance(value, kinds) and not isinstance(value, bool) and value > 0


def _rope_theta(values: Mapping[str, Any], source: object) -> float:
    """The base of the rotary embedding, from either of the two ways to write it; no scaling."""
    theta = values.get("rope_theta")
    for attribute in ("rope_parameters", "rope_scaling"):
        rope = values.get(attribute) or {}
        if not isinstance(rope, Mapping):
            raise ModelError(f"{source} has an unusable value of {attribute}", got=repr(rope))
        kind = rope.get("rope_type", rope.get("type", "default"))
        extra = sorted(set(rope) - {"rope_type", "type", "rope_theta"})
        if kind != "default" or extra:
            raise ModelError(
                f"{source} asks for what is not supported: {attribute}",
                got=f"{attribute} {dict(rope)}",
                expected="no scaling of the rotary embedding",
            )
        theta = rope.get("rope_theta", theta)
    theta = _DEFAULT_ROPE_THETA if theta is None else theta
    if not _is_positive(theta, real=True):
        raise ModelError(f"{source} has an unusable value of rope_theta", got=repr(theta))
    return float(theta)


_ROPE = {"rope_theta", "rope_parameters", "rope_scaling"}
_DEFAULT_ROPE_THETA = 10000.0
_DERIVED = {"num_key_value_heads", "head_dim"}  # absent: computed from the others
_FLAGS = {"tie_word_embeddings"}
_REALS = {"rms_norm_eps"}

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

_LLAMA_FIELDS = {
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

# model_type → its row. Llama 2 and 3 (without scaled rotary embeddings), SmolLM2.
FAMILIES: dict[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        fields=_LLAMA_FIELDS,
        defaults={
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
        },
        only={
            "hidden_act": ("silu",),
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "rope_interleaved": (None, False),
            "partial_rotary_factor": (None, 1.0),
            "quantization_config": (None,),
            "is_encoder_decoder": (False,),
        },
        no_effect=frozenset({"is_llama_config"}),
    ),
}
