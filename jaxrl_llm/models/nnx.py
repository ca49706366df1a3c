# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Any model as a Flax NNX module, and back.

    module = to_module(params, config)       # its arrays are nnx.Param
    logits = module(tokens)                  # the same logits
    nnx.display(module)                      # looks inside
    module.layers[3] = MyLayer(…)            # anything that is called like `Layer`
    params = from_module(module)             # bitwise the parameters that it holds

Training, sampling and export take parameters, not modules: those are faster to call. The module is
for looking, for experiments with layers of one's own, and for code that expects one.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.attention import masked_attention
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.shapes import layer_shapes
from jaxrl_llm.models.transformer import (
    Params,
    block,
    embed_tokens,
    final_hidden,
    layer_flags,
    layer_inputs,
    logits,
    unstack_layers,
)


class Layer(nnx.Module):
    """One layer; its parameters are attributes under their names in `models/shapes.py`."""

    def __init__(self, params: dict[str, Array], config: ModelConfig):
        self.config = config
        for name, value in params.items():
            setattr(self, name, nnx.Param(value))

    def __call__(
        self,
        x: Float[Array, "N T D"],
        cos: Float[Array, "N T half"],
        sin: Float[Array, "N T half"],
        attend: Callable[[Array, Array, Array], Array],
    ) -> Float[Array, "N T D"]:
        """As `transformer.block`: `attend` gets rotated queries, keys, and values."""
        return block(self.values(), self.config, x, cos, sin, attend)

    def values(self) -> dict[str, Array]:
        """The layer's arrays by name."""
        return {name: getattr(self, name)[...] for name in layer_shapes(self.config)}


class Decoder(nnx.Module):
    """A decoder-only transformer as a module; made by `to_module`."""

    def __init__(self, params: Params, config: ModelConfig):
        self.config = config
        self.embed = nnx.Param(params["embed"])
        self.layers = nnx.List([Layer(layer, config) for layer in unstack_layers(params)["layers"]])
        self.final_norm = nnx.Param(params["final_norm"])
        if "head" in params:
            self.head = nnx.Param(params["head"])

    def __call__(
        self,
        tokens: Int[Array, "N T"],
        positions: Int[Array, "N T"] | None = None,
        segment_ids: Int[Array, "N T"] | None = None,
    ) -> Float[Array, "N T V"]:
        """Logits of rows of tokens; without positions and segments each row is one sequence."""
        config = self.config
        if positions is None:
            count = jnp.arange(tokens.shape[1], dtype=tokens.dtype)
            positions = jnp.broadcast_to(count[None, :], tokens.shape)
        segment_ids = jnp.ones_like(tokens) if segment_ids is None else segment_ids
        outer = self._outer()
        x = embed_tokens(outer, config, tokens)
        inputs = layer_inputs(config, positions, segment_ids, None, x.dtype)
        flags = layer_flags(config)
        for index, layer in enumerate(self.layers):
            cos, sin, allowed = inputs({name: flag[index] for name, flag in flags.items()})

            def attend(q, k, v, allowed=allowed):
                return masked_attention(
                    q,
                    k,
                    v,
                    allowed,
                    scale=config.attention_scale,
                    softcap=config.attention_softcap,
                )

            x = layer(x, cos, sin, attend)
        return logits(outer, final_hidden(outer, config, x), config)

    def _outer(self) -> Params:
        """The parameters outside of the layers."""
        names = ("embed", "final_norm", "head")
        return {name: getattr(self, name)[...] for name in names if hasattr(self, name)}


def to_module(params: Params, config: ModelConfig) -> Decoder:
    """The module of a model; stacked layers become one `Layer` each."""
    return Decoder(params, config)


def from_module(module: Decoder) -> Params:
    """Stacked parameters from a module's current values."""
    layers = [layer.values() for layer in module.layers]
    stacked = {name: jnp.stack([layer[name] for layer in layers]) for name in layers[0]}
    return {**module._outer(), "layers": stacked}
