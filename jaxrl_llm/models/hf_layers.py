# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Which layers are windowed or unrotated, as each family's `config.json` tells it.

Readers take the attributes, the number of layers and what errors call the file, and give fields of
`ModelConfig`; writers go the other way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.errors import ModelError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.hf_values import flag, unusable, whole

_WINDOWED, _FULL = "sliding_attention", "full_attention"
Values = Mapping[str, Any]


def read_window(values: Values, count: int, source: object) -> dict[str, Any]:
    """One window for all layers, or none."""
    return {"sliding_window": _window(values, source)}


def write_window(config: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": config.sliding_window}


def read_window_if_used(values: Values, count: int, source: object) -> dict[str, Any]:
    """One window for all layers, switched by `use_sliding_window`."""
    return {"sliding_window": _window_if_used(values, source)}


def write_window_if_used(config: ModelConfig) -> dict[str, Any]:
    used = config.sliding_window is not None
    return {"use_sliding_window": used, "sliding_window": config.sliding_window}


def read_upper_windows(values: Values, count: int, source: object) -> dict[str, Any]:
    """Qwen2 and Qwen3: layers from `max_window_layers` on are windowed, or by `layer_types`."""
    first = whole(values.get("max_window_layers", 28), "max_window_layers", source, least=0)
    rule = [index >= first for index in range(count)]
    window = _window_if_used(values, source)
    return _windowed(window, _types(values, rule if window else [False] * count, source), source)


def write_upper_windows(config: ModelConfig) -> dict[str, Any]:
    types = write_layer_types(config)["layer_types"]
    first = types.index(_WINDOWED) if _WINDOWED in types else config.num_layers
    used = config.sliding_window is not None
    return {
        "use_sliding_window": used,
        "sliding_window": config.sliding_window,
        "max_window_layers": first,
        "layer_types": types,
    }


def read_alternating(every: int):
    """Gemma: of each `every` layers the last is full, the others are windowed; or `layer_types`."""

    def read(values: Values, count: int, source: object) -> dict[str, Any]:
        period = values.get("sliding_window_pattern", values.get("_sliding_window_pattern", every))
        whole(period, "sliding_window_pattern", source)
        rule = [(index + 1) % period != 0 for index in range(count)]
        return _windowed(_window(values, source), _types(values, rule, source), source)

    return read


def write_layer_types(config: ModelConfig) -> dict[str, Any]:
    types = [_WINDOWED if traits.window is not None else _FULL for traits in config.layers]
    return {"sliding_window": config.sliding_window, "layer_types": types}


def read_nope(values: Values, count: int, source: object) -> dict[str, Any]:
    """SmolLM3: some layers don't rotate; a window, if used, is theirs."""
    name = "no_rope_layer_interval"
    every = whole(values.get(name, 4), name, source)
    rotated = values.get("no_rope_layers")  # 1 means rotated
    if rotated is None:
        rotated = [int((index + 1) % every != 0) for index in range(count)]
    good = isinstance(rotated, list) and len(rotated) == count
    if not good or not all(isinstance(entry, int) and entry in (0, 1) for entry in rotated):
        raise unusable(rotated, "no_rope_layers", source, f"{count} of 0 or 1")
    window = _window_if_used(values, source)
    rule = [window is not None and not entry for entry in rotated]
    fields = _windowed(window, _types(values, rule, source), source)
    fields["rope_layers"] = () if all(rotated) else tuple(bool(entry) for entry in rotated)
    return fields


def write_nope(config: ModelConfig) -> dict[str, Any]:
    rotated = config.rope_layers or (True,) * config.num_layers
    return {
        **write_layer_types(config),
        "use_sliding_window": config.sliding_window is not None,
        "no_rope_layers": [int(entry) for entry in rotated],
    }


def _windowed(window: int | None, layers: list[bool], source: object) -> dict[str, Any]:
    if window is None and any(layers):
        raise ModelError(f"{source} has windowed layers but no sliding_window in use")
    if window is None or not any(layers):
        return {"sliding_window": None}
    return {"sliding_window": window, "window_layers": () if all(layers) else tuple(layers)}


def _types(values: Values, rule: list[bool], source: object) -> list[bool]:
    types = values.get("layer_types")
    if types is None:
        return rule
    good = isinstance(types, list) and len(types) == len(rule)
    if not good or not all(kind in (_WINDOWED, _FULL) for kind in types):
        raise unusable(types, "layer_types", source, f"{len(rule)} of {_WINDOWED} or {_FULL}")
    return [kind == _WINDOWED for kind in types]


def _window(values: Values, source: object) -> int | None:
    window = values.get("sliding_window")
    return None if window is None else whole(window, "sliding_window", source)


def _window_if_used(values: Values, source: object) -> int | None:
    if not flag(values.get("use_sliding_window", False), "use_sliding_window", source):
        return None
    window = _window(values, source)
    if window is None:
        raise ModelError(
            f"{source} contradicts itself: use_sliding_window without a sliding_window",
            expected="a number of tokens, or use_sliding_window false",
        )
    return window
