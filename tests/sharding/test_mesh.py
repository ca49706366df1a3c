# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Meshes from settings; what does not fit is one line with the nearest values that do."""

import jax
import pytest
from jax.sharding import AxisType

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.sharding.mesh import MeshConfig, make_mesh, nearest, row_parts


def test_data_takes_what_the_other_axes_leave():
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2))
    assert dict(mesh.shape) == {"pipeline": 1, "data": 2, "fsdp": 2, "tensor": 2}
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert row_parts(mesh) == 4
    # A tensor is split over neighbours.
    assert [d.id for d in mesh.devices[0, 0, 0]] == [0, 1]


def test_a_mesh_may_leave_devices_out():
    mesh = make_mesh(MeshConfig(data=1, pipeline=3))
    assert [d.id for d in mesh.devices.flat] == [0, 1, 2]
    last = make_mesh(MeshConfig(data=1, tensor=2), jax.devices()[6:])
    assert [d.id for d in last.devices.flat] == [6, 7]


def test_a_mesh_lies_on_the_devices_that_it_names():
    mesh = make_mesh(MeshConfig(tensor=2, devices=(3, 4)))
    assert dict(mesh.shape) == {"pipeline": 1, "data": 2, "fsdp": 1, "tensor": 2}
    assert [d.id for d in mesh.devices.flat] == [3, 4, 5, 6]
    part = make_mesh(MeshConfig(data=1, fsdp=2, devices=(5, 3)))
    assert [d.id for d in part.devices.flat] == [5, 6]


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (
            {"tensor": 3},
            ["tensor 3 on 8", "product that divides 8", "--mesh.tensor=2 or 4"],
        ),
        ({"data": 16}, ["data 16 on 8", "at most 8", "--mesh.data=8"]),
        (
            {"data": 2, "fsdp": 4, "tensor": 2},
            ["--mesh.data=1", "--mesh.fsdp=2", "--mesh.tensor=1"],
        ),
        ({"devices": (6, 4)}, ["4 from device 6 on, of 8", "--mesh.devices=6,2"]),
        ({"devices": (8, 1)}, ["1 from device 8 on, of 8", "a first one below 8"]),
        ({"devices": (-1, 2)}, ["mesh.devices", "(-1, 2)", "from 0 on"]),
        ({"devices": (0, 4), "fsdp": 8}, ["fsdp 8 on 4", "--mesh.fsdp=4"]),
        ({"pipeline": 0}, ["mesh.pipeline", "≥ 1"]),
        ({"data": -2}, ["mesh.data", "-1 or ≥ 1"]),
        ({"zero": 1}, ["mesh.zero", "fsdp"]),
        ({"rounds": 2}, ["mesh.rounds", "--mesh.pipeline=2"]),
        ({"pipeline": 4, "rounds": 2, "microbatches": 3}, ["microbatches", "≥ 4"]),
        ({"pipeline": 2, "microbatches": 0}, ["microbatches", "≥ 1"]),
    ],
)
def test_misfits_are_one_line(layout, words):
    with pytest.raises(ConfigError) as caught:
        make_mesh(MeshConfig(**layout))
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_what_is_named_as_nearest_works():
    assert nearest(3, [1, 2, 4, 8]) == [2, 4]
    assert nearest(16, [1, 2]) == [2]
    make_mesh(MeshConfig(tensor=2))
    make_mesh(MeshConfig(tensor=4))
    make_mesh(MeshConfig(data=1, fsdp=4, tensor=2))
