# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Loss and every gradient on any mesh are those of one device."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from mesh_problems import cache_variables, distances, parse

FULL = pytest.mark.full
DEFAULT = [
    ("rl", "data=2,fsdp=2,tensor=2"),
    ("rl", "pipeline=2,fsdp=2,tensor=2,rounds=2,microbatches=3"),
    ("sft", "pipeline=4,tensor=2"),
    ("preference", "fsdp=4,data=2,zero=2"),
]
MESHES = [
    "data=8",
    "fsdp=8",
    "fsdp=8,zero=1",
    "data=4,tensor=2",
    "data=2,tensor=4",
    "fsdp=2,tensor=4",
    "data=2,fsdp=2,tensor=2",
    "data=2,fsdp=2,tensor=2,zero=1",
    "data=2,fsdp=4,zero=2",
    "data=4,pipeline=2",
    "fsdp=4,pipeline=2,rounds=2",
    "pipeline=2,tensor=4,microbatches=1",
    "data=2,pipeline=2,tensor=2",
    "fsdp=2,pipeline=2,tensor=2",
    "fsdp=2,pipeline=2,tensor=2,rounds=2,microbatches=3",
    "fsdp=2,pipeline=2,tensor=2,zero=2",
    "data=2,fsdp=2,pipeline=2",
    "pipeline=4,tensor=2",
    "fsdp=2,pipeline=4,microbatches=3",
    "data=2,pipeline=4",
]
OTHERS = ["data=2,fsdp=2,tensor=2", "fsdp=2,pipeline=2,tensor=2,rounds=2", "pipeline=4,tensor=2"]
CASES = DEFAULT + [pytest.param("rl", mesh, marks=FULL) for mesh in MESHES]
CASES += [
    pytest.param(name, mesh, marks=FULL)
    for name in ("rl_experts", "sft", "preference", "critic")
    for mesh in OTHERS
]


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_a_mesh_computes_what_one_device_computes(name, mesh):
    found = distances(name, "float32", parse(mesh))
    worst = max(found, key=found.get)
    assert found[worst] < 1e-5, (worst, found[worst])


@pytest.mark.parametrize(
    ("name", "meshes"),
    [
        ("rl", ["fsdp=2,pipeline=2,tensor=2,rounds=2,microbatches=3"]),
        pytest.param("rl", MESHES[:7], marks=FULL),
        pytest.param("rl", MESHES[7:14], marks=FULL),
        pytest.param("rl", MESHES[14:], marks=FULL),
        pytest.param("rl_experts", OTHERS, marks=FULL),
        pytest.param("sft", OTHERS, marks=FULL),
        pytest.param("preference", OTHERS, marks=FULL),
        pytest.param("critic", OTHERS, marks=FULL),
    ],
)
def test_in_float64(name, meshes):
    script = pathlib.Path(__file__).with_name("mesh_problems.py")
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    done = subprocess.run(
        [sys.executable, str(script), name, *meshes],
        env={**os.environ, **cache_variables(), "JAX_ENABLE_X64": "1", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == set(meshes)
    for mesh, (worst, distance) in found.items():
        assert distance < 1e-9, (mesh, worst, distance)
