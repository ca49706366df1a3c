# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Between the named tensors of a file and the stacked `[L, …]` leaves of the parameters.

A name map gives each leaf of `param_shapes` the name of its tensor in the file, with `{}` where the
layer's number goes and `{expert}` where the expert's: ``{"embed": "model.embed_tokens.weight",
"layers.q": "model.layers.{}.…", …}``. Leaves that share a name lie in one tensor, one below the
other, in the order of `param_shapes`: fused projections.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxrl_llm.errors import ModelError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.shapes import param_shapes
from jaxrl_llm.models.transformer import Params

LARGE_PART = 1 << 28  # bytes; a larger part of a leaf is not assembled on the host

# (name, first row, row after the last) → those rows of a tensor of floats; None: all.
Reader = Callable[[str, slice | None], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a leaf, and the rows of a tensor that hold it.

    Attributes:
        leaf: flat name of the leaf.
        index: layer, and expert, that the part stands for; empty for a leaf without layers.
        tensor: name in the file.
        start, rows: which rows of the tensor; a vector's entries are its rows.
    """

    leaf: str
    index: tuple[int, ...]
    tensor: str
    start: int
    rows: int


def leaf_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every leaf under its flat name: ``embed``, ``layers.q``, …"""
    shapes = param_shapes(config)
    layers = {f"layers.{name}": shape for name, shape in shapes["layers"].items()}
    return {**{name: s for name, s in shapes.items() if name != "layers"}, **layers}


def pieces(config: ModelConfig, names: Mapping[str, str]) -> list[Piece]:
    """Every part of every leaf with its place in the file."""
    filled: dict[str, int] = {}  # rows of a tensor that earlier leaves take
    found = []
    for leaf, shape in leaf_shapes(config).items():
        pattern = names[leaf]
        stacked = 1 if leaf.startswith("layers.") else 0
        stacked += "{expert}" in pattern
        for index in np.ndindex(*shape[:stacked]):
            tensor = _format(pattern, index)
            rows, start = shape[stacked], filled.get(tensor, 0)
            filled[tensor] = start + rows
            found.append(Piece(leaf, index, tensor, start, rows))
    return found


def _format(pattern: str, index: tuple[int, ...]) -> str:
    if not index:
        return pattern
    return pattern.format(index[0], expert=index[1] if len(index) > 1 else None)


def tensor_shapes(config: ModelConfig, names: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the file has to hold."""
    leaves, shapes = leaf_shapes(config), {}
    for piece in pieces(config, names):
        rest = leaves[piece.leaf][len(piece.index) + 1 :]
        shapes[piece.tensor] = (piece.start + piece.rows, *rest)
    return shapes


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
    """Parameters in `dtype`. A device gets the part of each leaf that it holds and nothing else is
    read: beyond what is placed, the host holds a part of one leaf, of one layer if that is large.

    Args:
        names: the name map of the model's family for this kind of file.
        available: name and shape of every tensor in the file; each has to find its leaf.
        read: gives rows of a tensor by its name in the file.
        shardings: a pytree like the parameters with where each leaf goes; None: default device.
        source: what the errors call the file.

    Raises:
        ModelError: a tensor is missing, left over, or of another shape than `config` says.
    """
    _check_tensors(config, names, available, source)
    by_leaf: dict[str, dict[tuple[int, ...], Piece]] = {}
    for piece in pieces(config, names):
        by_leaf.setdefault(piece.leaf, {})[piece.index] = piece
    placed: Params = {"layers": {}}
    for leaf, shape in leaf_shapes(config).items():
        group, _, key = leaf.rpartition(".")
        where = None if shardings is None else (shardings[group] if group else shardings)[key]
        target = placed[group] if group else placed
        target[key] = _place(shape, by_leaf[leaf], read, jnp.dtype(dtype), where)
    return placed


def _place(shape, parts: Mapping[tuple, Piece], read: Reader, dtype, where) -> jax.Array:
    if where is None:
        return _part(shape, parts, read, dtype, (slice(None),) * len(shape), None)
    made: dict[str, jax.Array] = {}  # devices that hold the same part: it is read once
    arrays = []
    for device, index in where.addressable_devices_indices_map(shape).items():
        key = str(index)
        if key not in made:
            made[key] = _part(shape, parts, read, dtype, index, device)
        arrays.append(jax.device_put(made[key], device))
    return jax.make_array_from_single_device_arrays(shape, where, arrays)


def _part(shape, parts, read: Reader, dtype, index, device) -> jax.Array:
    """One part of a leaf on a device; a large one is filled there layer by layer."""
    counts = [len(range(*s.indices(n))) for s, n in zip(index, shape, strict=True)]
    put = jnp.asarray if device is None else lambda x: jax.device_put(x, device)
    if math.prod(counts) * dtype.itemsize <= LARGE_PART or not next(iter(parts)):
        return put(_assemble(shape, parts, read, dtype, index))
    whole = jnp.zeros(counts, dtype, device=device)
    for at, layer in enumerate(range(*index[0].indices(shape[0]))):
        one = _assemble(shape, parts, read, dtype, (slice(layer, layer + 1), *index[1:]))
        whole = _fill(whole, put(one), at)
    return whole


@functools.partial(jax.jit, donate_argnums=0)
def _fill(whole: jax.Array, part: jax.Array, at: int | jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, part, at, 0)


def _assemble(shape, parts, read: Reader, dtype, index: tuple[slice, ...]) -> np.ndarray:
    """The slice of a leaf that `index` names, from the tensors that it touches."""
    ranges = [range(*s.indices(n)) for s, n in zip(index, shape, strict=True)]
    out = np.empty([len(r) for r in ranges], dtype)
    stacked = len(next(iter(parts)))
    rows = ranges[stacked]
    rest = tuple(slice(r.start, r.stop) for r in ranges[stacked + 1 :])
    for at in np.ndindex(*[len(r) for r in ranges[:stacked]]):
        piece = parts[tuple(r[i] for r, i in zip(ranges, at, strict=False))]
        wanted = slice(piece.start + rows.start, piece.start + rows.stop)
        out[at] = read(piece.tensor, wanted)[(slice(None), *rest)].astype(dtype, copy=False)
    return out


def _check_tensors(config, names, available: Mapping[str, tuple[int, ...]], source: object) -> None:
    """Before anything is allocated: the configuration may promise more than there is."""
    if config.num_layers > len(available) or config.num_experts > len(available):
        raise ModelError(
            f"{source} holds fewer tensors than its configuration has layers or experts",
            got=f"{len(available)} tensors, {config.num_layers} layers",
        )
    shapes = tensor_shapes(config, names)
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


def leaf_of(params: Params, leaf: str) -> Any:
    """A leaf by its flat name."""
    group, _, key = leaf.rpartition(".")
    return (params[group] if group else params)[key]


def split_params(
    params: Params, config: ModelConfig, names: Mapping[str, str]
) -> dict[str, Callable[[], np.ndarray]]:
    """For every tensor of the file a function that fetches it to the host.

    Consecutive tensors of one leaf, or of fused leaves, share one fetch of it.
    """
    by_tensor: dict[str, list[Piece]] = {}
    for piece in pieces(config, names):
        by_tensor.setdefault(piece.tensor, []).append(piece)
    held: dict[str, np.ndarray] = {}

    def fetch(parts: list[Piece]) -> np.ndarray:
        wanted = [piece.leaf for piece in parts]
        for leaf in [leaf for leaf in held if leaf not in wanted]:
            del held[leaf]
        for leaf in wanted:
            if leaf not in held:
                held[leaf] = np.asarray(jax.device_get(leaf_of(params, leaf)))
        arrays = [held[piece.leaf][piece.index] for piece in parts]
        whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        return np.ascontiguousarray(whole)

    return {name: (lambda parts=parts: fetch(parts)) for name, parts in by_tensor.items()}
