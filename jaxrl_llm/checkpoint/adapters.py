# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters as PEFT folders: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from jax.typing import DTypeLike

from jaxrl_llm.checkpoint.hf_names import HF_NAMES
from jaxrl_llm.errors import ModelError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.lora import TARGETS, Adapter, LoraConfig, adapter_shapes
from jaxrl_llm.text.tokenizer import read_json

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_SUFFIX = {"a": ".lora_A.weight", "b": ".lora_B.weight", "magnitude": ".lora_magnitude_vector"}


def save_adapter(
    folder: str | pathlib.Path,
    adapter: Adapter,
    lora: LoraConfig,
    config: ModelConfig,
    *,
    base_model: str = "",
) -> pathlib.Path:
    """Write an adapter as a folder that `peft` loads over the base model.

    Args:
        base_model: name or path of the base, which PEFT looks up when none is given.

    Raises:
        ModelError: the folder can't be written, or the family's projections are fused.
    """
    names = _module_names(config, lora)
    folder = pathlib.Path(folder)
    tensors = {
        modules[layer] + _SUFFIX[part]: np.ascontiguousarray(np.asarray(values)[layer])
        for target, modules in names.items()
        for part, values in adapter[target].items()
        for layer in range(config.num_layers)
    }
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "target_modules": sorted({modules[0].rpartition(".")[2] for modules in names.values()}),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        safetensors.numpy.save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
        (folder / _CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ModelError(
            f"the adapter can't be written to {folder}: {error.strerror or error}"
        ) from error
    return folder


def load_adapter(
    folder: str | pathlib.Path, config: ModelConfig, dtype: DTypeLike = jnp.float32
) -> tuple[Adapter, LoraConfig]:
    """An adapter and its settings from a PEFT folder.

    Raises:
        ModelError: not a LoRA folder, one with a trait that we don't compute, or of another model.
    """
    folder = pathlib.Path(folder)
    lora = _read_settings(folder, config)
    names = _module_names(config, lora)
    try:
        held = safetensors.numpy.load_file(folder / _WEIGHTS)
    except (safetensors.SafetensorError, OSError) as error:
        raise ModelError(f"{folder / _WEIGHTS} can't be read: {error}") from error
    adapter: Adapter = {}
    for target, parts in adapter_shapes(config, lora).items():
        adapter[target] = {}
        for part, shape in parts.items():
            keys = [module + _SUFFIX[part] for module in names[target]]
            layers = [held.pop(key, None) for key in keys]
            for key, value in zip(keys, layers, strict=True):
                if value is None or value.shape != shape[1:]:
                    raise ModelError(
                        f"tensor {key} of {folder / _WEIGHTS} is missing or of the wrong shape",
                        got=None if value is None else value.shape,
                        expected=shape[1:],
                    )
            adapter[target][part] = jnp.asarray(np.stack(layers).astype(dtype))
    if held:
        raise ModelError(
            f"{folder / _WEIGHTS} holds tensors that the adapter has no place for",
            got=sorted(held)[0],
        )
    return adapter, lora


def _read_settings(folder: pathlib.Path, config: ModelConfig) -> LoraConfig:
    path = folder / _CONFIG
    settings = read_json(path)
    if settings.get("peft_type") != "LORA":
        raise ModelError(f"{path} is missing or not of a LoRA", got=settings.get("peft_type"))
    for key, harmless in _ONLY.items():
        if settings.get(key) not in (None, {}, [], *harmless):
            raise ModelError(
                f"{path} asks for what is not supported: {key}", got=repr(settings[key])
            )
    wanted = settings.get("target_modules")
    by_module = {_last(HF_NAMES[config.family][f"layers.{t}"]): t for t in TARGETS}
    modules = list(by_module) if wanted == "all-linear" else wanted
    if not isinstance(modules, list) or not set(modules) <= set(by_module):
        raise ModelError(
            f"{path} has target_modules that are not supported",
            got=repr(wanted),
            expected="some of " + ", ".join(by_module),
        )
    return LoraConfig(
        rank=settings["r"],
        alpha=float(settings["lora_alpha"]),
        targets=tuple(t for m, t in by_module.items() if m in modules),
        rslora=bool(settings.get("use_rslora")),
        dora=bool(settings.get("use_dora")),
    )


def _module_names(config: ModelConfig, lora: LoraConfig) -> dict[str, list[str]]:
    """Target → PEFT's name of the module in every layer."""
    patterns = {t: HF_NAMES[config.family][f"layers.{t}"] for t in TARGETS}
    for target in lora.targets:
        if list(patterns.values()).count(patterns[target]) > 1 or "{expert}" in patterns[target]:
            raise ModelError(
                f"an adapter of a {config.family} model has no PEFT form for target {target!r}",
                hint="export the merged model instead",
            )
    return {
        target: [
            "base_model.model." + patterns[target].removesuffix(".weight").format(layer)
            for layer in range(config.num_layers)
        ]
        for target in lora.targets
    }


def _last(pattern: str) -> str:
    return pattern.removesuffix(".weight").rpartition(".")[2]


# Settings that would change what the adapter computes, and their values that don't.
_ONLY: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "layers_to_transform": (),
    "rank_pattern": (),
    "alpha_pattern": (),
    "modules_to_save": (),
    "exclude_modules": (),
    "layer_replication": (),
    "lora_bias": (False,),
    "trainable_token_indices": (),
}
