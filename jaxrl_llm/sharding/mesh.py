# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Device meshes, made in one place, with Auto axes: the compiler places what is left open."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.errors import ConfigError

# Slowest links first: neighbouring devices share a tensor, far ones hand over activations.
AXES = ("pipeline", "data", "fsdp", "tensor")
ROW_AXES = ("data", "fsdp")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How devices are laid out, and what is split over them.

    Attributes:
        data: copies of the model, each with its own part of every batch; -1 takes all devices that
            the other axes leave.
        fsdp: parts of every batch, too, that share one copy of what `zero` names.
        pipeline: stages of the layers, each on its own devices.
        tensor: parts of every matrix: heads, MLP, vocabulary.
        zero: what is split over `fsdp` (ZeRO, https://arxiv.org/abs/1910.02054): 1 optimiser state,
            2 and gradients, 3 and parameters.
        rounds: times that each micro-batch passes through every stage, which then holds as many
            shorter runs of layers: a smaller bubble for more transfers.
        microbatches: pieces of each batch of rows that are on their way through the stages; None
            with a pipeline: twice as many as stages.
        devices: (first, count) of the devices of each process that the mesh lies on, so that roles
            can be apart: "0,4" and "4,4". None: all.
    """

    data: int = -1
    fsdp: int = 1
    pipeline: int = 1
    tensor: int = 1
    zero: Literal[1, 2, 3] = 3
    rounds: int = 1
    microbatches: int | None = None
    devices: tuple[int, int] | None = None

    def check(self, name: str = "mesh") -> None:
        """Refuses settings that contradict each other on whatever devices.

        Args:
            name: of the setting, which a mesh can't know by itself, for the error.

        Raises:
            ConfigError: they do.
        """
        if self.devices is not None and (self.devices[0] < 0 or self.devices[1] < 1):
            raise ConfigError(
                f"{name}.devices is not a range of devices",
                got=self.devices,
                expected="(first, count), from 0 on and at least one",
            )
        for axis in ("data", "fsdp", "pipeline", "tensor", "rounds"):
            size = getattr(self, axis)
            if size < 1 and not (axis == "data" and size == -1):
                raise ConfigError(
                    f"{name}.{axis} is not a number of devices",
                    got=size,
                    expected="-1 or ≥ 1" if axis == "data" else "≥ 1",
                )
        if self.fsdp == 1 and self.zero != 3:
            raise ConfigError(
                f"{name}.zero says what is split over fsdp, which is 1",
                got=f"{name}.zero={self.zero}",
                hint=f"--{name}.fsdp=2",
            )
        if self.pipeline == 1 and (self.rounds > 1 or self.microbatches is not None):
            raise ConfigError(
                f"{name}.rounds and {name}.microbatches are of a pipeline, which is 1",
                got=f"rounds={self.rounds}, microbatches={self.microbatches}",
                hint=f"--{name}.pipeline=2",
            )
        least = self.pipeline if self.rounds > 1 else 1
        if self.in_flight < least:
            raise ConfigError(
                f"{name}.microbatches is too small"
                + (": with rounds, the first must be back when the last has gone in" * (least > 1)),
                got=self.microbatches,
                expected=f"≥ {least}",
            )

    @property
    def in_flight(self) -> int:
        """Micro-batches in the pipeline; 1 without one."""
        if self.microbatches is not None:
            return self.microbatches
        return 1 if self.pipeline == 1 else 2 * self.pipeline

    @property
    def copy_devices(self) -> int:
        """Devices that hold one copy of the model."""
        return self.fsdp * self.pipeline * self.tensor


def make_mesh(
    config: MeshConfig,
    devices: list[jax.Device] | None = None,
    name: str = "mesh",
    allowed: Callable[[str, int], bool] = lambda axis, size: True,
) -> Mesh:
    """A mesh with the axes `AXES` over those of the given devices (default: all of this process
    group) that `config.devices` names.

    Args:
        name: of the setting, for the error.
        allowed: whether an axis may have a size, for what the error says would fit.

    Raises:
        ConfigError: as `MeshConfig.check`; or there are not so many devices, or they don't divide;
            names what would fit.
    """
    config.check(name)
    devices = usable(config, devices, name)
    _check_devices(config, len(devices), name, allowed)
    data = len(devices) // config.copy_devices if config.data == -1 else config.data
    shape = (config.pipeline, data, config.fsdp, config.tensor)
    count = math.prod(shape)
    left = {d.process_index for d in devices} - {d.process_index for d in devices[:count]}
    if left:
        raise ConfigError(
            f"{name} has no device of process {min(left)}, which would have nothing to do",
            got=f"{count} of {len(devices)} devices",
            hint=f"--{name}.data=-1",
        )
    auto = (AxisType.Auto,) * len(AXES)
    if count == len(devices) > 1 and config.devices is None and devices[0].platform == "tpu":
        # Follows the torus, where neighbours are not those of the list.
        return jax.make_mesh(shape, AXES, axis_types=auto, devices=devices)
    return Mesh(np.array(devices[:count]).reshape(shape), AXES, axis_types=auto)


def usable(
    config: MeshConfig, devices: list[jax.Device] | None = None, name: str = "mesh"
) -> list[jax.Device]:
    """Those of the given devices (default: all) that a mesh may use: a part of each process's.

    Raises:
        ConfigError: a process has not so many.
    """
    devices = jax.devices() if devices is None else devices
    if config.devices is None:
        return devices
    first, count = config.devices
    chosen = []
    for process in sorted({device.process_index for device in devices}):
        own = [device for device in devices if device.process_index == process]
        if first + count > len(own):
            raise ConfigError(
                f"{name}.devices goes beyond the devices"
                + (f" of process {process}" if jax.process_count() > 1 else ""),
                got=f"{count} from device {first} on, of {len(own)}",
                hint=f"--{name}.devices={first},{len(own) - first}"
                if first < len(own)
                else f"a first one below {len(own)}",
            )
        chosen += own[first : first + count]
    return chosen


def _check_devices(
    config: MeshConfig, count: int, name: str, allowed: Callable[[str, int], bool]
) -> None:
    sizes = {axis: getattr(config, axis) for axis in ("data", "fsdp", "pipeline", "tensor")}
    asked = " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size != 1)
    needed = config.copy_devices * max(config.data, 1)
    fits = count % config.copy_devices == 0 if config.data == -1 else needed <= count
    if fits:
        return
    tries = []
    for axis, size in sizes.items():
        others = needed // max(size, 1)
        if size > 1 and others <= count:
            whole = config.data == -1
            good = [
                n
                for n in range(1, count // others + 1)
                if (not whole or count % (others * n) == 0) and allowed(axis, n)
            ]
            near = nearest(size, good)
            tries += [f"--{name}.{axis}={' or '.join(str(n) for n in near)}"] * bool(near)
    raise ConfigError(
        f"{name} does not fit the devices",
        got=f"{asked or 'data 1'} on {count} device(s)",
        expected=f"a product that divides {count}" if config.data == -1 else f"at most {count}",
        hint="; ".join(tries) or f"--{name}.data={count}",
    )


def nearest(value: int, good: list[int]) -> list[int]:
    """The largest good value up to `value` and the smallest above it, as far as there are any."""
    below = [n for n in good if n <= value]
    above = [n for n in good if n > value]
    return ([max(below)] if below else []) + ([min(above)] if above else [])


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def rows(mesh: Mesh) -> NamedSharding:
    """The first axis is split over `data` and `fsdp`."""
    return NamedSharding(mesh, PartitionSpec(ROW_AXES))


def row_parts(mesh: Mesh) -> int:
    """In how many parts `rows` are split."""
    return math.prod(mesh.shape[axis] for axis in ROW_AXES)
