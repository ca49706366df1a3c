# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""LoRA as a transform of parameters.

    adapter = init_adapter(config, lora, key, params)      # the only thing that is trained
    forward(attach(params, adapter, lora), config, …)      # base + adapter, side by side
    engine.set_params(merge(params, adapter, lora), …)     # one matrix again
    forward(params, config, …)                             # adapter off: the reference policy

The base is never written to: its arrays are the same buffers before and after any training, and any
number of adapters go over one base. `checkpoint/adapters.py` writes and reads PEFT folders.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, PRNGKeyArray

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers import (
    LoraWeight,
    accumulation_dtype,
    lora_sum,
    row_lengths,
    stretch,
)
from jaxrl_llm.models.shapes import layer_shapes
from jaxrl_llm.models.transformer import Params

Adapter = dict[str, dict[str, Array]]  # name of a layer's matrix → {"a", "b"[, "magnitude"]}

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Which matrices get a low-rank change, and how large.

    Attributes:
        rank: r.
        alpha: the change is scaled by α/r.
        targets: matrices of every layer.
        rslora: the change is scaled by α/√r instead (https://arxiv.org/abs/2312.03732).
        dora: direction and length of rows are learned apart (https://arxiv.org/abs/2402.09353).
    """

    rank: int = 16
    alpha: int | float = 32.0
    targets: tuple[str, ...] = TARGETS
    rslora: bool = False
    dora: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1 or not 0 < self.alpha < math.inf:
            raise ConfigError(
                "bad LoRA settings",
                got=f"rank {self.rank}, alpha {self.alpha}",
                expected="rank ≥ 1 and a finite alpha > 0",
            )
        unknown = [target for target in self.targets if target not in TARGETS]
        if unknown or not self.targets:
            raise ConfigError(
                "unknown LoRA targets" if unknown else "LoRA has no targets",
                got=", ".join(unknown) or None,
                expected="some of " + ", ".join(TARGETS),
            )

        if len(set(self.targets)) < len(self.targets):
            raise ConfigError("LoRA has a target twice", got=", ".join(self.targets))

    @property
    def scale(self) -> float:
        """What B·A is multiplied with."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


def init_adapter(
    config: ModelConfig,
    lora: LoraConfig,
    key: PRNGKeyArray,
    params: Params | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Adapter:
    """An adapter that changes nothing yet: A uniform within ±1/√in, B zero.

    Args:
        params: the base; DoRA starts from the lengths of its rows, otherwise it isn't needed.
        dtype: of A, B and magnitudes.

    Raises:
        ConfigError: a target is not one matrix per layer (experts).
    """
    shapes = layer_shapes(config)
    adapter: Adapter = {}
    for name, k in zip(lora.targets, jax.random.split(key, len(lora.targets)), strict=True):
        if len(shapes[name]) != 2:
            raise ConfigError(
                "LoRA has no form for the matrices of experts",
                got=f"target {name!r}",
                expected="some of q, k, v, o",
                hint="--lora.targets=q,k,v,o",
            )
        out, width = shapes[name]
        wide = accumulation_dtype(jnp.dtype(dtype))
        bound = width**-0.5
        a = jax.random.uniform(
            k, (config.num_layers, lora.rank, width), wide, minval=-bound, maxval=bound
        )
        adapter[name] = {
            "a": a.astype(dtype),
            "b": jnp.zeros((config.num_layers, out, lora.rank), dtype),
        }
        if lora.dora:
            assert params is not None, "DoRA needs the base"
            base = params["layers"][name]
            lengths = row_lengths(base.astype(accumulation_dtype(base.dtype)))
            adapter[name]["magnitude"] = lengths.astype(dtype)
    return adapter


def attach(params: Params, adapter: Adapter, lora: LoraConfig) -> Params:
    """Parameters whose adapted matrices are `LoraWeight`s; no gradient reaches the base."""
    frozen = jax.lax.stop_gradient(params)
    layers = dict(frozen["layers"])
    for name, parts in adapter.items():
        layers[name] = LoraWeight(base=layers[name], scale=lora.scale, **parts)
    return {**frozen, "layers": layers}


def merge(params: Params, adapter: Adapter, lora: LoraConfig) -> Params:
    """Plain parameters in the base's dtype: every change is added up in ≥ float32, then rounded.

    Always from the base: merging again and again can't drift. An adapter that changes nothing gives
    the base's own values back, to the bit.
    """
    layers = dict(params["layers"])
    for name, parts in adapter.items():
        layers[name] = _merged(LoraWeight(base=layers[name], scale=lora.scale, **parts))
    return {**params, "layers": layers}


def _merged(w: LoraWeight) -> Array:
    whole = lora_sum(w)
    if w.magnitude is not None:
        ratio = stretch(w.magnitude.astype(whole.dtype), row_lengths(whole))
        # Lengths are sums whose last bits depend on how they were compiled.
        same = jnp.abs(ratio - 1.0) <= 16 * jnp.finfo(whole.dtype).eps
        whole = whole * jnp.where(same, 1.0, ratio)[..., None]
    return whole.astype(w.base.dtype)


def count_params(adapter: Adapter) -> int:
    """Number of trained parameters."""
    return sum(x.size for x in jax.tree.leaves(adapter))


def adapter_shapes(config: ModelConfig, lora: LoraConfig) -> dict[str, Any]:
    """The shapes of an adapter, for planning and for restoring checkpoints."""
    shapes, n = layer_shapes(config), config.num_layers
    return {
        name: {
            "a": (n, lora.rank, shapes[name][1]),
            "b": (n, shapes[name][0], lora.rank),
            **({"magnitude": (n, shapes[name][0])} if lora.dora else {}),
        }
        for name in lora.targets
    }
