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
LIMITS = {"float64": 1e-9, "float32": 1e-5}  # of the largest entry of each gradient
DEFAULT = [
    ("rl", "data=2,fsdp=2,tensor=2"),
    ("rl", "pipeline=2,fsdp=2,tensor=2,rounds=2,microbatches=3"),
    ("sft", "pipeline=4,tensor=2"),
    ("preference", "fsdp=4,data=2,zero=2"),
]
MESHES = [
    "data=8",
    "fsdp=8",
    "data=4,tensor=2",
    "fsdp=2,tensor=4",
    "data=2,fsdp=2,tensor=2",
    "data=2,fsdp=2,tensor=2,zero=1",
    "data=2,fsdp=4,zero=2",
    "data=4,pipeline=2",
    "fsdp=4,pipeline=2,rounds=2",
    "pipeline=2,tensor=4,microbatches=1",
    "data=2,pipeline=2,tensor=2",
    "fsdp=2,pipeline=2,tensor=2,zero=2",
    "fsdp=2,pipeline=2,tensor=2,rounds=2,microbatches=3",
    "data=2,fsdp=2,pipeline=2",
    "pipeline=4,tensor=2",
    "fsdp=2,pipeline=4,microbatches=3",
]
OTHERS = ["data=2,fsdp=2,tensor=2", "fsdp=2,pipeline=2,tensor=2,rounds=2", "pipeline=4,tensor=2"]
ALL = [("rl", MESHES[i : i + 4]) for i in range(0, len(MESHES), 4)]
ALL += [(name, OTHERS) for name in ("rl_experts", "sft", "preference", "critic")]


@pytest.mark.parametrize(("name", "mesh"), DEFAULT)
def test_a_mesh_computes_what_one_device_computes(name, mesh):
    found = distances(name, "float32", parse(mesh))
    worst = max(found, key=found.get)
    assert found[worst] < LIMITS["float32"], (worst, found[worst])


@pytest.mark.parametrize(
    ("name", "meshes", "dtypes"),
    [("rl", DEFAULT[1][1:], "float64")]
    + [pytest.param(*case, dtypes, marks=FULL) for case in ALL for dtypes in LIMITS],
)
def test_in_a_child(name, meshes, dtypes):
    """With float64, and compiled quickly."""
    script = pathlib.Path(__file__).with_name("mesh_problems.py")
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    done = subprocess.run(
        [sys.executable, str(script), name, dtypes, *meshes],
        env={**os.environ, **cache_variables(), "JAX_ENABLE_X64": "1", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == len(meshes)
    for mesh, (worst, distance) in found.items():
        assert distance < LIMITS[dtypes], (mesh, worst, distance)
