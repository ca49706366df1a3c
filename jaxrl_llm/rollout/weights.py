# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The sampler's own copy of the weights, in the form that is fastest where it runs.

On a CPU XLA multiplies a few rows with a matrix almost twice as fast when the matrix is the left
operand, ``(W · xᵀ)ᵀ``; one product for q, k and v, and one for gate and up, is faster again. There
the layers are *packed* so; elsewhere they stay plain arrays. `pack` runs once for new weights;
`view_layer` and `view_head` inside the programs turn the packed arrays into what
`models.layers.linear` multiplies with.

With weights that need more than 1024 columns the sums over them are formed in parts: XLA's code for
longer sums adds in another order when there are few rows, and a sample's numbers should not depend
on how many others are decoded with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers import accumulation_dtype
from jaxrl_llm.models.transformer import Params, output_head

HEAD_ROWS = 32  # beyond which logits cost more to turn round than the product saves
LEFT_ROWS = 64  # beyond which rows · Wᵀ is the faster product
SAME_ORDER = 16  # of whose multiples a matrix must have rows for both products to add alike
MAX_COLUMNS = 1024  # of a product's sum, so that its order is the same for 16 rows and for 64
GROUPS = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up"), "o": ("o",), "down": ("down",)}

Form = Literal["plain", "left", "int8"]


def pack(params: Params, form: Form) -> Params:
    """Parameters in the stacked layout as the sampler keeps them; every layer is copied.

    `form`: "plain" arrays; "left", packed for products from the left; "int8", each row of a matrix
    rounded to 8 bits with a scale of its own (biases, norms, experts and the embedding are not).
    """
    rest = {name: leaf for name, leaf in params.items() if name != "layers"}
    return {**pack_rest(rest, form), "layers": pack_layers(params["layers"], form)}


def pack_rest(rest: Params, form: Form) -> Params:
    """`pack` of what does not belong to a layer."""
    return {**rest, "packed_head": _quantize(output_head(rest))} if form == "int8" else rest


def pack_layers(layers: dict[str, Any], form: Form) -> tuple[dict[str, Any], ...]:
    """`pack` of stacked layers, or of whole groups of their arrays (`together`)."""
    count = jax.tree.leaves(layers)[0].shape[0]
    split = (jax.tree.map(lambda x, i=i: x[i], layers) for i in range(count))
    return tuple(layer if form == "plain" else _pack_layer(layer, form) for layer in split)


def together(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Names of a layer's arrays in the groups that `pack_layers` can take by themselves."""
    names = list(names)
    groups = [tuple(n for n in group if n in names) for group in GROUPS.values()]
    grouped = {name for group in groups for name in group}
    return [group for group in groups if group] + [(n,) for n in names if n not in grouped]


def cast(params: Any, dtype: str | None) -> Any:
    """A copy, in another type unless that is None; inside `jit`."""
    return jax.tree.map(lambda x: x.copy() if dtype is None else x.astype(dtype), params)


def view_head(params: Params, form: Form) -> Params:
    """What `pack` made, as parameters for `models.transformer.logits`."""
    if form == "plain":
        return params
    if form == "int8":
        return {**params, "head": Int8(params["packed_head"])}
    return {**params, "head": Left((output_head(params),), most_rows=HEAD_ROWS)}


def _pack_layer(layer: dict[str, Any], form: Form) -> dict[str, Any]:
    out = dict(layer)
    for group, names in GROUPS.items():
        if any(name not in layer for name in names):
            continue
        matrices = [layer[name] for name in names]
        if any(not isinstance(w, jax.Array) or w.ndim != 2 for w in matrices):
            continue  # experts, adapters: as they are
        for name in names:
            del out[name]
        w = jnp.concatenate(matrices) if len(matrices) > 1 else matrices[0]
        if form == "int8":
            out[group] = _quantize(w)
        else:
            parts = next(n for n in range(1, w.shape[1] + 1) if w.shape[1] <= n * MAX_COLUMNS)
            out[group] = tuple(jnp.array_split(w, parts, axis=1))
    return out


def view_layer(layer: dict[str, Any], config: ModelConfig, form: Form) -> dict[str, Any]:
    """A layer as `pack` made it, as parameters for `models.transformer.block`."""
    if form == "plain":
        return layer
    out = dict(layer)
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for group, names in GROUPS.items():
        if group not in layer or (group in ("o", "down") and not isinstance(layer[group], tuple)):
            continue
        packed = out.pop(group)
        whole = Int8(packed) if isinstance(packed[-1], Scales) else Left(packed)
        if len(names) == 1:
            out[names[0]] = whole
            continue
        sizes = (q, kv, kv) if group == "qkv" else (packed[0].shape[0] // 2,) * 2
        start = 0
        for name, size in zip(names, sizes, strict=True):
            out[name] = Rows(whole, start, start + size)
            start += size
    return out


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scales:
    """What the rows of an int8 matrix are multiplied with."""

    values: Any  # float32 [o]


def _quantize(w: Float[Array, "o i"]) -> tuple[Int[Array, "o i"], Scales]:
    """Rows as round(127 · w / max|w|) and max|w| / 127."""
    wide = w.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(wide), axis=1), 1e-30) / 127.0
    return jnp.round(wide / scale[:, None]).astype(jnp.int8), Scales(scale)


@dataclasses.dataclass(frozen=True)
class Left:
    """A matrix, in parts by columns, as the left operand of at most `most_rows` rows."""

    parts: tuple[Float[Array, "o _"], ...]
    most_rows: int = LEFT_ROWS

    def _sum(self, rows: Float[Array, "m i"], formula: str) -> Float[Array, "..."]:
        start, total = 0, None
        for part in self.parts:
            columns = rows[:, start : start + part.shape[1]]
            start += part.shape[1]
            # The order of the operands is the order of the axes that come out.
            pair = (part, columns) if formula == "oi,mi->om" else (columns, part)
            wide = accumulation_dtype(rows.dtype)
            one = jnp.einsum(formula, *pair, preferred_element_type=wide)
            total = one if total is None else total + one
        return total

    def some(self, rows: Float[Array, "m i"], start: int, stop: int | None) -> Float[Array, "m _"]:
        """The product's columns from `start` to `stop`."""
        if rows.shape[0] > self.most_rows and self.parts[0].shape[0] % SAME_ORDER == 0:
            return self._sum(rows, "mi,oi->mo")[:, start:stop]
        out = self._sum(rows, "oi,mi->om")
        # Without the barrier XLA turns a whole transposed product back into rows · Wᵀ.
        return (jax.lax.optimization_barrier(out) if stop is None else out[start:stop]).T

    def product(self, rows: Float[Array, "m i"]) -> Float[Array, "m o"]:
        return self.some(rows, 0, None)


@dataclasses.dataclass(frozen=True)
class Int8:
    """An int8 matrix; the rows that it is multiplied with are rounded to int8 as well."""

    packed: tuple[Int[Array, "o i"], Scales]

    def product(self, rows: Float[Array, "m i"]) -> Float[Array, "m o"]:
        matrix, scales = self.packed
        wide = rows.astype(jnp.float32)
        scale = jnp.maximum(jnp.max(jnp.abs(wide), axis=1), 1e-30) / 127.0
        whole = jnp.round(wide / scale[:, None]).astype(jnp.int8)
        sums = jnp.einsum("mi,oi->mo", whole, matrix, preferred_element_type=jnp.int32)
        return sums.astype(jnp.float32) * scale[:, None] * scales.values[None, :]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Some rows of a matrix whose other rows multiply the same: XLA forms the product once."""

    whole: Left | Int8
    start: int
    stop: int

    def product(self, rows: Float[Array, "m i"]) -> Float[Array, "m o"]:
        if isinstance(self.whole, Left):
            return self.whole.some(rows, self.start, self.stop)
        return self.whole.product(rows)[:, self.start : self.stop]
