# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Parameters from named tensors of a file: one layer's tensors stacked into `[L, …]` leaves.

A name map gives each leaf of `param_shapes` the name of its tensor in the file, with `{}` where the
layer's number goes: ``{"embed": "model.embed_tokens.weight", "layers.q": "model.layers.{}.…", …}``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxrl_llm.errors import ModelError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.transformer import Params, param_shapes

Reader = Callable[[str], np.ndarray]


def leaf_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every leaf under its flat name: ``embed``, ``layers.q``, …"""
    shapes = param_shapes(config)
    layers = {f"layers.{name}": shape for name, shape in shapes["layers"].items()}
    return {**{name: s for name, s in shapes.items() if name != "layers"}, **layers}


def tensor_names(config: ModelConfig, names: Mapping[str, str]) -> dict[str, list[str]]:
    """For every leaf the names of its tensors in the file: one, or one per layer."""
    return {
        leaf: [names[leaf].format(i) for i in range(config.num_layers)]
        if leaf.startswith("layers.")
        else [names[leaf]]
        for leaf in leaf_shapes(config)
    }


def build_params(
    config: ModelConfig,
    names: Mapping[str, str],
    available: Mapping[str, tuple[int, ...]],
    read: Reader,
    *,
    dtype: DTypeLike,
    shardings: Any = None,
    source: object = "the model",
) -> Params:
    """Parameters in `dtype`, leaf by leaf: beyond what is placed already, the host holds one leaf.

    Args:
        names: the name map of the model's family for this kind of file.
        available: name and shape of every tensor in the file; each has to find its leaf.
        read: gives a tensor of floats by its name in the file.
        shardings: a pytree like the parameters with where each leaf goes; None: default device.
        source: what the errors call the file.

    Raises:
        ModelError: a tensor is missing, left over, or of another shape than `config` says.
    """
    _check_tensors(config, names, available, source)
    wanted = tensor_names(config, names)
    placed: Params = {"layers": {}}
    for leaf, shape in leaf_shapes(config).items():
        group, _, key = leaf.rpartition(".")
        stacked = np.empty(shape, jnp.dtype(dtype))
        parts = stacked if group else stacked[None]
        for part, name in zip(parts, wanted[leaf], strict=True):
            part[...] = read(name).astype(dtype, copy=False)
        where = None if shardings is None else (shardings[group] if group else shardings)[key]
        target = placed[group] if group else placed
        target[key] = jnp.asarray(stacked) if where is None else jax.device_put(stacked, where)
    return placed


def _check_tensors(config, names, available: Mapping[str, tuple[int, ...]], source: object) -> None:
    """Before anything is allocated: the configuration may promise more than there is."""
    if config.num_layers > len(available):
        raise ModelError(
            f"{source} holds fewer tensors than its configuration has layers",
            got=f"{len(available)} tensors, {config.num_layers} layers",
        )
    wanted, leaves = tensor_names(config, names), leaf_shapes(config)
    shapes = {
        name: leaves[leaf][1:] if leaf.startswith("layers.") else leaves[leaf]
        for leaf, group in wanted.items()
        for name in group
    }
    missing = sorted(shapes.keys() - available.keys())
    left_over = sorted(available.keys() - shapes.keys())
    if missing:
        raise ModelError(f"{source} lacks {_count(missing)} of the model")
    if left_over:
        raise ModelError(
            f"{source} holds {_count(left_over)} that the model has no place for",
            hint="a model of a supported family; this one has a trait that config.json hides",
        )
    for name, shape in shapes.items():
        if tuple(available[name]) != shape:
            raise ModelError(
                f"tensor {name} of {source} has the wrong shape",
                got=tuple(available[name]),
                expected=f"{shape} by its configuration",
            )


def _count(names: list[str]) -> str:
    rest = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
    return f"tensor {names[0]}{rest}"
