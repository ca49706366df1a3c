# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Device meshes, made in one place, with Auto axes: the compiler places what is left open."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How devices are laid out.

    Attributes:
        data: copies of the model, each with its own part of every batch; -1 takes all devices.
    """

    data: int = -1

    def __post_init__(self) -> None:
        if self.data != -1 and self.data < 1:
            raise ConfigError(
                "mesh.data is not a number of devices", got=self.data, expected="-1 or ≥ 1"
            )


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """A mesh with the axis `data` over the given devices (default: all of this process group)."""
    devices = jax.devices() if devices is None else devices
    data = len(devices) if config.data == -1 else config.data
    if data > len(devices):
        raise ConfigError(
            "the mesh needs more devices than there are",
            got=f"mesh.data={data} on {len(devices)} device(s)",
            hint=f"--mesh.data={len(devices)}",
        )
    return Mesh(np.array(devices[:data]), ("data",), axis_types=(AxisType.Auto,))


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def rows(mesh: Mesh) -> NamedSharding:
    """The first axis is split over `data`."""
    return NamedSharding(mesh, PartitionSpec("data"))
