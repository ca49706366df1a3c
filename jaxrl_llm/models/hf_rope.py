# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The rotary embedding as `config.json` writes it, in its old and its new spelling.

Old: `rope_theta`, `rope_scaling`, `rope_local_base_freq` (Gemma 3). New: `rope_parameters`, one
object, or one for each kind of layer. Where both are there the old scaling decides, as in
`transformers`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.errors import ModelError
from jaxrl_llm.models.config import ModelConfig, RopeScaling
from jaxrl_llm.models.hf_values import flag, object_or_empty, real, unusable, whole

BETA_FAST, BETA_SLOW = 32.0, 1.0  # of YaRN, where the file says nothing
ATTRIBUTES = ("rope_theta", "rope_parameters", "rope_scaling")


def read_rope(
    values: Mapping[str, Any],
    default_theta: float,
    source: object,
    *,
    partial: bool = False,
    kinds: Mapping[str, str] | None = None,
    original_context: int | None = None,
) -> dict[str, Any]:
    """The fields of `ModelConfig` that tell the rotary embedding.

    Args:
        values: attributes of config.json.
        default_theta: what the family assumes.
        partial: whether the family may rotate a part of each head only.
        kinds: other names of kinds of scaling in this family.
        original_context: decides before what the object says (Phi-3).
    """
    rope = _one_object(values, source)
    theta = rope.pop("rope_theta", None)
    theta = values.get("rope_theta") if theta is None else theta
    theta = real(default_theta if theta is None else theta, "rope_theta", source, above=1.0)
    part = rope.pop("partial_rotary_factor", values.get("partial_rotary_factor"))
    part = 1.0 if part is None else real(part, "partial_rotary_factor", source)
    if not 0 < part <= 1 or (part != 1 and not partial):
        raise ModelError(
            f"{source} asks for what is not supported: partial_rotary_factor", got=part
        )
    if "type" in rope:
        rope.setdefault("rope_type", rope["type"])
        del rope["type"]
    kind = rope.pop("rope_type", "default")
    if not isinstance(kind, str):
        raise unusable(kind, "rope_type", source, "one of " + ", ".join(_ALLOWED))
    kind = (kinds or {}).get(kind, kind)
    if kind == "default" and partial:
        rope.pop("original_max_position_embeddings", None)
    scaling = _scaling(kind, rope, original_context, source)
    return {"rope_theta": theta, "rope_scaling": scaling, "partial_rotary_factor": part}


def read_two_ropes(values: Mapping[str, Any], source: object) -> dict[str, Any]:
    """Gemma 3's two: unscaled with a base of its own in windowed layers, the other elsewhere."""
    nested = object_or_empty(values.get("rope_parameters"), "rope_parameters", source)
    if set(nested) - {"full_attention", "sliding_attention"}:
        raise unusable(nested, "rope_parameters", source, "full_attention and sliding_attention")
    near = {"rope_theta": values.get("rope_local_base_freq"), "rope_scaling": None}
    local = read_rope({**near, "rope_parameters": nested.get("sliding_attention")}, 1e4, source)
    if local["rope_scaling"] is not None:
        raise ModelError(
            f"{source} asks for what is not supported: a scaled rope in windowed layers",
            got=nested.get("sliding_attention"),
        )
    far = {
        **object_or_empty(nested.get("full_attention"), "full_attention", source),
        **object_or_empty(values.get("rope_scaling"), "rope_scaling", source),
    }
    fields = read_rope({**values, "rope_scaling": None, "rope_parameters": far}, 1e6, source)
    return {**fields, "local_rope_theta": local["rope_theta"]}


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """Both spellings of a model's rotary embedding."""
    rope: dict[str, Any] = {"rope_type": "default"}
    scaling = config.rope_scaling
    if scaling is not None:
        rope["rope_type"] = scaling.kind
        for name, field in _FIELDS.items():
            value = getattr(scaling, field)
            told = value is not None and (name != "truncate" or value is False)
            if told and name in _ALLOWED[scaling.kind]:
                rope[name] = list(value) if isinstance(value, tuple) else value
    if config.partial_rotary_factor != 1.0:
        rope["partial_rotary_factor"] = config.partial_rotary_factor
    old = {"rope_theta": config.rope_theta}
    if scaling is not None:
        old["rope_scaling"] = dict(rope)
    full = {**rope, "rope_theta": config.rope_theta}
    if config.local_rope_theta is None:
        return {**old, "rope_parameters": full}
    near = {"rope_type": "default", "rope_theta": config.local_rope_theta}
    return {
        **old,
        "rope_local_base_freq": config.local_rope_theta,
        "rope_parameters": {"full_attention": full, "sliding_attention": near},
    }


def _one_object(values: Mapping[str, Any], source: object) -> dict[str, Any]:
    for attribute in ("rope_scaling", "rope_parameters"):
        rope = object_or_empty(values.get(attribute), attribute, source)
        if rope:
            return dict(rope)
    return {}


def _scaling(kind: str, rope: dict, original: int | None, source: object) -> RopeScaling | None:
    if kind not in _ALLOWED:
        raise ModelError(
            f"{source} asks for what is not supported: rope_scaling",
            got=f"type {kind!r}",
            expected="one of " + ", ".join(_ALLOWED),
        )
    rope = {name: value for name, value in rope.items() if value is not None}
    unknown = sorted(set(rope) - set(_ALLOWED[kind]))
    missing = sorted(set(_NEEDED.get(kind, ())) - set(rope))
    if unknown or missing:
        raise ModelError(
            f"the rope_scaling / rope_parameters of {source} of type {kind!r} "
            + ("lacks " + missing[0] if missing else "has an unknown key: " + unknown[0]),
            got=rope,
        )
    if kind == "default":
        return None
    fields: dict[str, Any] = {"kind": kind}
    for name, value in rope.items():
        fields[_FIELDS[name]] = _value(name, value, source)
    if original is not None:
        fields["original_context"] = original
    scaling = RopeScaling(**fields)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if kind == "llama3" and not low < high:
        raise unusable(high, "high_freq_factor", source, f"more than low_freq_factor {low}")
    fast, slow = scaling.beta_fast or BETA_FAST, scaling.beta_slow or BETA_SLOW
    if kind == "yarn" and not slow < fast:
        raise unusable(fast, "beta_fast", source, f"more than beta_slow {slow}")
    return scaling


def _value(name: str, value: Any, source: object) -> Any:
    if name == "truncate":
        return flag(value, name, source)
    if name in ("short_factor", "long_factor"):
        if not isinstance(value, list):
            raise unusable(value, name, source, "a list of numbers")
        return tuple(real(entry, name, source) for entry in value)
    return whole(value, name, source) if name == _ORIGINAL else real(value, name, source)


# Key of the object → field of RopeScaling.
_FIELDS = {
    "original_max_position_embeddings": "original_context",
    **{
        field.name: field.name
        for field in dataclasses.fields(RopeScaling)
        if field.name not in ("kind", "original_context")
    },
}
_ORIGINAL = "original_max_position_embeddings"
_ALLOWED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor",
        _ORIGINAL,
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "longrope": ("factor", _ORIGINAL, "attention_factor", "short_factor", "long_factor"),
}
_NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
