# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters as PEFT folders: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxrl_llm.checkpoint.hf_names import HF_NAMES
from jaxrl_llm.checkpoint.output_folder import output_folder
from jaxrl_llm.checkpoint.tensor_files import TensorFiles, save_tensors
from jaxrl_llm.errors import ModelError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.lora import TARGETS, Adapter, LoraConfig, adapter_shapes
from jaxrl_llm.text.files import read_json

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
    """Write an adapter as a folder that `peft` loads over the base model, never half-written, in
    the dtype of `adapter`. An older adapter there is replaced.

    Args:
        base_model: name or path of the base, which PEFT looks up when none is given.

    Raises:
        ModelError: the folder can't be written or holds other files, or the family's projections
            are fused.
    """
    names = _module_names(config, lora)
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
    with output_folder(folder, _FILES, "adapter") as building:
        (building / _CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        save_tensors(building / _WEIGHTS, tensors, "adapter")
        (building / _WEIGHTS).chmod((building / _CONFIG).stat().st_mode)  # as the umask says
    return pathlib.Path(folder)


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
    files = TensorFiles(folder, _WEIGHTS)
    left = set(files.shapes)
    adapter: Adapter = {}
    for target, parts in adapter_shapes(config, lora).items():
        adapter[target] = {}
        for part, shape in parts.items():
            keys = [module + _SUFFIX[part] for module in names[target]]
            for key in keys:
                if files.shapes.get(key) != shape[1:]:
                    raise ModelError(
                        f"tensor {key} of {folder / _WEIGHTS} is missing or of the wrong shape",
                        got=files.shapes.get(key),
                        expected=shape[1:],
                    )
            left -= set(keys)
            adapter[target][part] = jnp.asarray(
                np.stack([files.read(k) for k in keys], dtype=dtype, casting="unsafe")
            )
    if left:
        raise ModelError(
            f"{folder / _WEIGHTS} holds tensors that the adapter has no place for",
            got=sorted(left)[0],
        )
    return adapter, lora


def _read_settings(folder: pathlib.Path, config: ModelConfig) -> LoraConfig:
    path = folder / _CONFIG
    settings = read_json(path)
    if settings.get("peft_type") != "LORA":
        raise ModelError(f"{path} is missing or not of a LoRA", got=settings.get("peft_type"))
    for key, value in settings.items():
        if key not in _READ and not any(_same(value, x) for x in (*_IDLE, *_ALSO.get(key, ()))):
            if key in _WITHOUT_EFFECT:
                continue
            raise ModelError(
                f"{path} asks for what is not supported: {key}",
                got=repr(value)[:80],
                hint="merge the adapter into its base with PEFT",
            )
    wanted = settings.get("target_modules")
    by_module = {_last(HF_NAMES[config.family][f"layers.{t}"]): t for t in TARGETS}
    modules = list(by_module) if wanted == "all-linear" else wanted
    if (
        not isinstance(modules, list)
        or not modules
        or any(m not in list(by_module) for m in modules)
    ):
        raise ModelError(
            f"{path} has target_modules that are not supported",
            got=repr(wanted)[:80],
            expected="some of " + ", ".join(by_module),
        )
    return LoraConfig(
        rank=_typed(settings, "r", _is_rank, "a whole number ≥ 1", path),
        alpha=float(_typed(settings, "lora_alpha", _is_alpha, "a finite number > 0", path)),
        targets=tuple(t for m, t in by_module.items() if m in modules),
        rslora=bool(_typed(settings, "use_rslora", _is_flag, "true or false", path)),
        dora=bool(_typed(settings, "use_dora", _is_flag, "true or false", path)),
    )


def _typed(
    settings: dict[str, Any], key: str, usable: Callable[[Any], bool], expected: str, path: object
) -> Any:
    value = settings.get(key)
    if not usable(value):
        raise ModelError(f"{path} has no usable {key}", got=repr(value)[:80], expected=expected)
    return value


def _is_rank(value: Any) -> bool:
    return type(value) is int and 1 <= value < 1 << 31


def _is_alpha(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < 1e30


def _is_flag(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and value == other


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


_FILES = re.compile(r"adapter_config\.json|adapter_model\.safetensors")
_READ = ("peft_type", "target_modules", "r", "lora_alpha", "use_rslora", "use_dora")
# Values of any setting that ask for nothing.
_IDLE: tuple[Any, ...] = (None, False, [], {})
# Further values that don't change what a trained adapter computes. Some ways to begin change the
# base as well (pissa, olora, corda, loftq): those are refused.
_ALSO: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
    "task_type": ("CAUSAL_LM",),
}
_WITHOUT_EFFECT = (
    "auto_mapping",
    "base_model_name_or_path",
    "eva_config",  # of how it began
    "inference_mode",
    "layers_pattern",  # of layers_to_transform
    "lora_dropout",  # while it is trained
    "megatron_core",  # of megatron_config
    "peft_version",
    "qalora_group_size",  # of use_qalora
    "revision",
    "runtime_config",
)
