# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""From logical axes to mesh axes: the only map.

Every dimension of a parameter and of an activation has a logical name (`models/axes.py` names those
of parameters); `TABLE` says over which mesh axes it is split. What holds for all three kinds of
arrays of a parameter's shape — parameters, gradients, optimiser state — but for the split over
`fsdp`, which `ZERO` gives by kind.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec
from jaxtyping import Array, Shaped

Axes = tuple[str | None, ...]
Kind = Literal["parameters", "gradients", "optimizer"]

TABLE: dict[str | None, tuple[str, ...]] = {
    # activations
    "rows": ("data", "fsdp"),
    "head_rows": ("data", "fsdp", "pipeline"),  # the output head has no stages: all devices help
    "stage": ("pipeline",),
    # activations and parameters
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "experts": ("expert",),
    # parameters
    "embed": ("fsdp",),
    "layers": ("pipeline",),  # stacked [L, …], as in a checkpoint of a pipeline
    "round": (),
    "run": (),
    "head_dim": (),
    "rank": (),
    "classes": (),
    None: (),
}

# What is split over `fsdp`, by the row of `MeshConfig.zero`.
ZERO: dict[int, frozenset[Kind]] = {
    1: frozenset({"optimizer"}),
    2: frozenset({"optimizer", "gradients"}),
    3: frozenset({"optimizer", "gradients", "parameters"}),
}

# Dimensions that stay whole where the mesh does not divide them; the others must fit (`misfits` in
# `models/placement.py`). Few key/value heads are the same on several devices.
MAY_STAY_WHOLE = frozenset({"rows", "head_rows", "layers", "kv_heads", "vocab", "experts"})

GATHERED = "gathered weight"


def open_axes(mesh: Mesh | AbstractMesh) -> set[str]:
    """The axes that split something and are the compiler's to use."""
    return {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Auto and mesh.shape[name] > 1
    }


def mesh_axes(
    axis: str | None, size: int, mesh: Mesh | AbstractMesh, *, split_fsdp: bool = True
) -> tuple[str, ...]:
    """The mesh axes over which a dimension of so many units is split; () keeps it whole.

    Args:
        size: what the mesh has to divide; of heads how many there are, not their columns.
        split_fsdp: whether `embed` is split.
    """
    if axis == "embed" and not split_fsdp:
        return ()
    names = tuple(name for name in TABLE[axis] if name in open_axes(mesh))
    return names if size % math.prod(mesh.shape[name] for name in names) == 0 else ()


def spec(
    axes: Axes,
    sizes: Mapping[str, int],
    mesh: Mesh | AbstractMesh,
    *,
    split_fsdp: bool = True,
) -> PartitionSpec:
    """How an array with these logical axes is split, given how many units each of them has."""
    parts = [mesh_axes(a, sizes.get(a, 0), mesh, split_fsdp=split_fsdp) for a in axes]
    return PartitionSpec(*(names if names else None for names in parts))


def constrain(x: Shaped[Array, "..."], *axes: str | None) -> Shaped[Array, "..."]:
    """`x` split as its logical axes say, under the mesh of `jax.set_mesh`; without one, `x`."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not open_axes(mesh):
        return x
    assert len(axes) == x.ndim, (axes, x.shape)
    names = [mesh_axes(a, n, mesh) for a, n in zip(axes, x.shape, strict=True)]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*(n if n else None for n in names)))


def gather_weights(tree: Any, axes: Any, sizes: Mapping[str, int]) -> Any:
    """Parameters as they are multiplied with: whole over `fsdp`, split over the other axes.

    On the way back their gradients are summed and split over `fsdp` at once. Where parameters are
    split over it, the whole ones carry the name `GATHERED`, so that a policy of `jax.checkpoint`
    can let go of them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not open_axes(mesh):
        return tree

    def gather(x, names):
        whole = spec(names, sizes, mesh, split_fsdp=False)
        split = spec(names, sizes, mesh)
        return checkpoint_name(_gather(whole, split, x), GATHERED)

    return jax.tree.map(gather, tree, axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(whole, split, x):
    return jax.lax.with_sharding_constraint(x, whole)


def _gather_fwd(whole, split, x):
    return _gather(whole, split, x), None


def _gather_bwd(whole, split, _, d):
    return (jax.lax.with_sharding_constraint(d, split),)


_gather.defvjp(_gather_fwd, _gather_bwd)


def splits(axis: str) -> int:
    """In how many parts the mesh of `jax.set_mesh` splits a logical axis, if its size allows."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else math.prod(mesh.shape[name] for name in mesh_axes(axis, 0, mesh))
