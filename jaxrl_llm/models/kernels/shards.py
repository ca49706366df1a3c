# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""A kernel on every device's own part of its arguments: the compiler can't split kernels itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jaxrl_llm.sharding.rules import Axes, mesh_axes


def on_shards(function: Callable[..., Array], axes: Sequence[Axes], out: Axes) -> Callable:
    """`function` under `shard_map` over the mesh of `jax.set_mesh`; without one, `function`.

    Args:
        axes: logical axes of each argument (`sharding/rules.py`).
        out: of the result, which is as large as the arguments with these axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function

    def call(*args: Array) -> Array:
        parts = {}
        for x, names in zip(args, axes, strict=True):
            for name, size in zip(names, x.shape, strict=True):
                parts.setdefault(name, mesh_axes(name, size, mesh) or None)
        specs = tuple(PartitionSpec(*(parts[name] for name in names)) for names in axes)
        result = PartitionSpec(*(parts[name] for name in out))
        return jax.shard_map(function, in_specs=specs, out_specs=result, check_vma=False)(*args)

    return call
