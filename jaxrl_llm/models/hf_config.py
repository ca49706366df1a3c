# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""`config.json` read strictly and written: what isn't known is refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.errors import ModelError
from jaxrl_llm.models import hf_rope
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.hf_values import MOST_LAYERS, flag, real, unusable, whole
from jaxrl_llm.models.presets import BASE_DEFAULTS, BASE_FIELDS, FAMILIES, NO_EFFECT, Family


def config_from_hf(attributes: Mapping[str, Any], source: object = "config.json") -> ModelConfig:
    """A model's configuration from the attributes in its `config.json`.

    Args:
        source: what the errors call the file.

    Raises:
        ModelError: an unknown family, an attribute that is missing, unknown, or holds a value that
            asks for what is not supported.
    """
    name = attributes.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ModelError(
            f"the model family of {source} is not supported",
            got=f"model_type {name!r:.100}",
            expected="one of " + ", ".join(FAMILIES),
        )
    family = FAMILIES[name]
    attributes = _one_spelling(attributes, family, source)
    _refuse(attributes, family, source)
    defaults = {**BASE_DEFAULTS, **family.defaults}
    # A null means "absent" for most attributes; where it means "none", a default must not fill it.
    absent = {k: v for k, v in defaults.items() if k not in attributes or k in BASE_DEFAULTS}
    values = {**absent, **{k: v for k, v in attributes.items() if v is not None}}
    fields: dict[str, Any] = dict(family.traits)
    for attribute, targets in {**BASE_FIELDS, **family.fields}.items():
        if attribute in values or attribute not in _NULLABLE:
            value = _usable(values, attribute, source)
            for field in (targets,) if isinstance(targets, str) else targets:
                fields[field] = _read_value(attribute, value)
    _derive(fields, name)
    fields |= _rope(values, family, name, source)
    fields |= family.layers.read(values, fields["num_layers"], source)
    _check(fields, source)
    return ModelConfig(**fields, family=name)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The attributes of `config.json` for a model, as `transformers` 4 and 5 read them."""
    family = FAMILIES[config.family]
    written: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": config.family,
    }
    for attribute, targets in {**BASE_FIELDS, **family.fields}.items():
        value = getattr(config, targets if isinstance(targets, str) else targets[0])
        written[attribute] = _write_value(attribute, value)
    if config.family == "mixtral":  # its one width is that of the experts
        written["intermediate_size"] = config.expert_size
    written |= hf_rope.write_rope(config) | family.layers.write(config)
    if config.family == "phi3":
        if config.rope_scaling:
            original = config.rope_scaling.original_context
            written["original_max_position_embeddings"] = original
        written["partial_rotary_factor"] = config.partial_rotary_factor
    fixed = {a: values[0] for a, values in family.only.items() if values[0] is not None}
    return {**written, **fixed}


def _one_spelling(attributes: Mapping[str, Any], family: Family, source: object) -> dict[str, Any]:
    """`transformers` 5 writes Qwen3-MoE's `num_experts` as `num_local_experts`."""
    attributes = dict(attributes)
    if "num_experts" in family.fields and "num_local_experts" in attributes:
        count = attributes.pop("num_local_experts")
        if attributes.setdefault("num_experts", count) != count:
            raise ModelError(
                f"{source} contradicts itself: num_experts and num_local_experts",
                got=f"{attributes['num_experts']!r:.50} and {count!r:.50}",
            )
    return attributes


def _refuse(attributes: Mapping[str, Any], family: Family, source: object) -> None:
    read = {*BASE_FIELDS, *family.fields, *family.layers.uses, *_ROPE.get(family.architecture, ())}
    checked = {**_HARMLESS, **family.only}
    passed = {*NO_EFFECT, *family.no_effect, *hf_rope.ATTRIBUTES, "model_type"}
    for name, value in attributes.items():
        if name in read or name in passed:
            continue
        if name not in checked:
            raise ModelError(
                f"{source} has an attribute that is not known: {name}",
                got=f"{value!r:.100}",
                hint="if it changes nothing in the model, delete it from the file",
            )
        if value not in checked[name]:
            raise ModelError(
                f"{source} asks for what is not supported: {name}",
                got=f"{value!r:.100}",
                expected=" or ".join(repr(v) for v in checked[name]),
            )
    if attributes.get("architectures") not in (None, [family.architecture]):
        raise ModelError(
            f"{source} is of another architecture than its model_type",
            got=attributes["architectures"],
            expected=[family.architecture],
        )


def _usable(values: Mapping[str, Any], attribute: str, source: object) -> Any:
    if attribute not in values:
        raise ModelError(f"{source} lacks the attribute {attribute}")
    value = values[attribute]
    if attribute in _FLAGS:
        return flag(value, attribute, source)
    if attribute == "router_aux_loss_coef" and value == 0:
        return 0.0
    if attribute in _REALS:
        return real(value, attribute, source)
    if attribute == "num_hidden_layers":
        return whole(value, attribute, source, most=MOST_LAYERS)
    return whole(value, attribute, source)


def _read_value(attribute: str, value: Any) -> Any:
    return value**-0.5 if attribute == "query_pre_attn_scalar" else value


def _write_value(attribute: str, value: Any) -> Any:
    if attribute == "query_pre_attn_scalar":
        scalar = value**-2
        whole = round(scalar)
        return whole if whole and whole**-0.5 == value else scalar
    return value


def _derive(fields: dict[str, Any], family: str) -> None:
    """What follows from the other fields."""
    if "num_kv_heads" not in fields:
        fields["num_kv_heads"] = fields["num_heads"]
    if "head_dim" not in fields:
        fields["head_dim"] = fields["hidden_size"] // fields["num_heads"]
    if family.startswith("gemma"):
        fields["embedding_multiplier"] = math.sqrt(fields["hidden_size"])
    if family == "mixtral":
        fields["expert_size"] = fields["intermediate_size"]


def _rope(values, family: Family, name: str, source: object) -> dict[str, Any]:
    if name == "gemma3_text":
        return hf_rope.read_two_ropes(values, source)
    original = None
    if name == "phi3":
        attribute = "original_max_position_embeddings"
        original = whole(values.get(attribute, 4096), attribute, source)
    return hf_rope.read_rope(
        values,
        family.rope_theta,
        source,
        partial=family.partial_rotary,
        kinds=family.rope_kinds,
        original_context=original,
    )


def _check(fields: dict[str, Any], source: object) -> None:
    heads, kv_heads = fields["num_heads"], fields["num_kv_heads"]
    if heads % kv_heads:
        raise ModelError(
            f"{source} has query heads that its key heads don't divide",
            got=f"{heads} and {kv_heads}",
        )
    rotated = int(fields["head_dim"] * fields["partial_rotary_factor"])
    if rotated % 2 or not rotated:
        raise ModelError(f"{source} rotates an odd part of each head", got=rotated)
    scaling = fields["rope_scaling"]
    if scaling and scaling.kind == "dynamic" and rotated == 2:
        raise ModelError(
            f"{source} asks for what is not supported: dynamic rope_scaling of one pair",
            got=f"{rotated} rotated entries of each head",
        )
    original = scaling and (scaling.original_context or fields["max_position_embeddings"])
    if scaling and scaling.kind == "longrope" and original < 2:
        raise unusable(original, "original_max_position_embeddings", source, "at least 2")
    for name in ("short_factor", "long_factor"):
        factors = getattr(scaling, name) if scaling else None
        if factors is not None and len(factors) != rotated // 2:
            raise ModelError(
                f"{source} has an unusable value of {name}",
                got=f"{len(factors)} numbers",
                expected=rotated // 2,
            )
    experts = fields.get("num_experts", 0)
    if fields.get("experts_per_token", 0) > experts:
        raise ModelError(
            f"{source} has an unusable value of num_experts_per_tok",
            got=fields["experts_per_token"],
            expected=f"at most {experts}",
        )


# Attributes of the rotary embedding that some families have beside those of all.
_ROPE = {
    "Gemma3ForCausalLM": ("rope_local_base_freq",),
    "Phi3ForCausalLM": ("original_max_position_embeddings", "partial_rotary_factor"),
}
# In a family that does not know the attribute, the values that change nothing.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (None, 1.0),
    "sliding_window": (None,),
    "use_sliding_window": (False, None),
}
# Absent or null: follows from the others, or off.
_NULLABLE = {
    "num_key_value_heads",
    "head_dim",
    "attn_logit_softcapping",
    "final_logit_softcapping",
}
_FLAGS = {"tie_word_embeddings", "attention_bias", "mlp_bias", "norm_topk_prob"}
_REALS = {
    "rms_norm_eps",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
    "router_aux_loss_coef",
}
