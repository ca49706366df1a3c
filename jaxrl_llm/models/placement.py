# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Where a model lives: its mesh, and how its parameters, gradients and optimiser state lie on it.

place = Placement.make(config.mesh, model_config)
params = place.put(params)                 # stacked [L, …] → the mesh's own form
step = place.jit(step)                     # runs with activations split over the mesh
grads = place.split(grads, "gradients")    # inside such a function
place.take(params)                         # back: stacked [L, …]
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NoReturn

import jax
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models.axes import axis_sizes, tree_axes
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.sharding.mesh import MeshConfig, make_mesh, nearest, row_parts, rows, usable
from jaxrl_llm.sharding.pipeline import stage_layers, unstage_layers
from jaxrl_llm.sharding.reshard import Later, now, reshard, same
from jaxrl_llm.sharding.rules import MAY_STAY_WHOLE, TABLE, ZERO, Kind, spec


@dataclasses.dataclass(frozen=True)
class Placement:
    """A model on a mesh.

    Attributes:
        mesh: of the axes `sharding.mesh.AXES`.
        layout: what is split over it.
        model: the model's traits, with the micro-batches of its pipeline.
    """

    mesh: Mesh
    layout: MeshConfig
    model: ModelConfig

    @classmethod
    def make(
        cls,
        layout: MeshConfig,
        model: ModelConfig,
        devices: list[jax.Device] | None = None,
        name: str = "mesh",
    ) -> Placement:
        """A placement over the given devices (default: all).

        Args:
            name: of the setting, for errors.

        Raises:
            ConfigError: the mesh does not fit the devices or the model; names the nearest that do.
        """
        mesh = make_mesh(layout, devices, name, functools.partial(_divides, model))
        check_fit(layout, model, len(usable(layout, devices, name)), name)
        model = dataclasses.replace(model, microbatches=layout.in_flight)
        return cls(mesh, layout, model)

    @property
    def row_multiple(self) -> int:
        """Rows of a batch are a multiple of this, so that no device computes on padding."""
        return row_parts(self.mesh) * self.layout.in_flight

    @property
    def row_sharding(self) -> NamedSharding:
        """Rows [N, …] split over the mesh."""
        return rows(self.mesh)

    def shardings(self, tree: Any, kind: Kind) -> Any:
        """The sharding of every leaf of a tree of parameters, gradients or optimiser state."""
        sizes, split_fsdp = axis_sizes(self.model), kind in ZERO[self.layout.zero]
        return jax.tree.map(
            lambda x, axes: NamedSharding(
                self.mesh, spec(axes, sizes, self.mesh, split_fsdp=split_fsdp)
            ),
            tree,
            tree_axes(tree, self.model),
        )

    def device_bytes(self, tree: Any, kind: Kind) -> int:
        """What each device holds of a tree of shapes with stacked layers [L, …]."""
        staged = self._staged_shapes(tree)
        placed = jax.tree.leaves(self.shardings(staged, kind)), jax.tree.leaves(staged)
        return sum(
            math.prod(where.shard_shape(x.shape)) * x.dtype.itemsize
            for where, x in zip(*placed, strict=True)
        )

    def split(self, tree: Any, kind: Kind) -> Any:
        """The tree, placed; for use inside `jit`."""
        return jax.tree.map(jax.lax.with_sharding_constraint, tree, self.shardings(tree, kind))

    def jit(self, function: Callable, **how: Any) -> Callable:
        """`jax.jit` of a function of this model: activations and weights are split as they should
        be, and what is not placed goes to all devices of the mesh."""
        compiled = jax.jit(function, **how)

        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            with jax.set_mesh(self.mesh):
                return compiled(*args, **named)

        def lower(*args: Any, **named: Any) -> Any:
            with jax.set_mesh(self.mesh):
                return compiled.lower(*args, **named)

        call.lower = lower
        return call

    def put(self, tree: Any, kind: Kind = "parameters") -> Any:
        """A tree with stacked layers [L, …], from host or any device, on this mesh.

        Leaf by leaf: beside what comes in and what goes out no more than one leaf is held.
        """
        return self._move(tree, self.shardings(self._staged_shapes(tree), kind), "layers")

    def take(self, tree: Any, kind: Kind = "parameters", onto: Any = None) -> Any:
        """What `put` made, with stacked layers [L, …] again: for a checkpoint, or the sampler.

        Args:
            onto: shardings of the result, of any mesh; None: as this mesh splits it, with layers
                over the pipeline if it divides them.
        """
        if onto is None:
            onto = self.shardings(jax.eval_shape(self.unstage, tree), kind)
        return self._move(tree, onto, "round")

    def take_later(self, tree: Any) -> Any:
        """As `take`, each array when it is asked for (`sharding.reshard.now`)."""

        def later(path: tuple[Any, ...], x: Any) -> Later:
            def make() -> jax.Array:
                one = functools.reduce(lambda inside, key: {key.key: inside}, path[::-1], now(x))
                return jax.tree.leaves(self.take(one))[0]

            return Later(make)

        return jax.tree_util.tree_map_with_path(later, tree)

    def put_rows(self, tree: Any) -> Any:
        """Arrays [N, …] with their rows split over the mesh: of several processes each hands the
        rows of its own devices over."""
        return jax.tree.map(lambda x: reshard(x, rows(self.mesh)), tree)

    def stage(self, tree: Any) -> Any:
        """Stacked layers [L, …] in the form of this mesh: [v, S, k, …] for a pipeline."""
        return self._change(tree, "layers")

    def unstage(self, tree: Any) -> Any:
        """The inverse of `stage`."""
        return self._change(tree, "round")

    def abstract(self, tree: Any, kind: Kind) -> Any:
        """What `take` gives, as `jax.ShapeDtypeStruct`: for restoring checkpoints.

        Args:
            tree: with stacked layers [L, …], arrays or shapes.
        """
        return jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            tree,
            self.shardings(tree, kind),
        )

    def _staged_shapes(self, tree: Any) -> Any:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
        return jax.eval_shape(self.stage, shapes)

    def _changes(self, first: str) -> Callable:
        """What happens to leaves whose first axis is `first`."""
        layout = self.layout
        if layout.pipeline == 1:
            return same
        if first == "layers":
            return functools.partial(stage_layers, stages=layout.pipeline, rounds=layout.rounds)
        return functools.partial(unstage_layers, layers=self.model.num_layers)

    def _change(self, tree: Any, first: str) -> Any:
        axes, change = tree_axes(tree, self.model), self._changes(first)
        return jax.tree.map(lambda x, names: change(x) if first in names[:1] else x, tree, axes)

    def _move(self, tree: Any, shardings: Any, first: str) -> Any:
        axes, change = tree_axes(tree, self.model), self._changes(first)
        return jax.tree.map(
            lambda x, where, names: reshard(x, where, change if first in names[:1] else same),
            tree,
            shardings,
            axes,
        )


class Free:
    """No placement: functions run where their arguments are."""

    def jit(self, function: Callable, **how: Any) -> Callable:
        return jax.jit(function, **how)

    def split(self, tree: Any, kind: Kind) -> Any:
        return tree

    def put(self, tree: Any, kind: Kind = "parameters") -> Any:
        return tree

    def take(self, tree: Any, kind: Kind = "parameters") -> Any:
        return tree

    def take_later(self, tree: Any) -> Any:
        return tree


FREE = Free()
Place = Placement | Free


def check_fit(layout: MeshConfig, model: ModelConfig, devices: int, name: str = "mesh") -> None:
    """That a mesh divides a model.

    Raises:
        ConfigError: one line with the nearest values that do, on so many devices.
    """
    names = {
        "heads": "attention heads",
        "mlp": "columns of the MLP",
        "embed": "numbers of a hidden state",
    }
    for mesh_axis in ("tensor", "fsdp"):
        sizes = _divided(model, mesh_axis)
        parts = getattr(layout, mesh_axis)
        for axis, size in sizes.items():
            if size % parts:
                divides = math.gcd(*sizes.values())
                good = [n for n in range(1, divides + 1) if divides % n == 0]
                _refuse(layout, (name, mesh_axis), f"{size} {names[axis]}", good, devices)
    most = model.num_layers
    if layout.pipeline > most:
        _refuse(layout, (name, "pipeline"), f"{most} layers", list(range(1, most + 1)), devices)
    if layout.pipeline * layout.rounds > most:
        good = list(range(1, most // layout.pipeline + 1))
        what = f"{most} layers in {layout.pipeline} stages"
        raise _misfit(f"{name}.rounds", layout.rounds, what, nearest(layout.rounds, good))


def _divided(model: ModelConfig, mesh_axis: str) -> dict[str, int]:
    """The logical axes that a mesh axis must divide."""
    return {
        axis: size
        for axis, size in axis_sizes(model).items()
        if mesh_axis in TABLE[axis] and axis not in MAY_STAY_WHOLE
    }


def _divides(model: ModelConfig, mesh_axis: str, parts: int) -> bool:
    """Whether a mesh axis of so many parts fits a model."""
    if mesh_axis == "pipeline":
        return parts <= model.num_layers
    return all(size % parts == 0 for size in _divided(model, mesh_axis).values())


def _refuse(
    layout: MeshConfig, setting: tuple[str, str], what: str, good: list[int], devices: int
) -> NoReturn:
    parts = getattr(layout, setting[1])
    others = layout.copy_devices // parts

    def fits(n: int) -> bool:
        if layout.data == -1:
            return devices % (others * n) == 0
        return others * n * layout.data <= devices

    near = nearest(parts, [n for n in good if fits(n)])
    raise _misfit(".".join(setting), parts, what, near)


def _misfit(name: str, got: int, what: str, near: list[int]) -> ConfigError:
    return ConfigError(
        f"{name} does not fit the model",
        got=f"{got} for {what}",
        hint=f"--{name}={' or '.join(str(n) for n in near)}",
    )
