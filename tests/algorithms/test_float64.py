# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the files float64_*.py, each in a process in which float64 is on."""

import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent


@pytest.mark.parametrize("name", sorted(path.name for path in HERE.glob("float64_*.py")))
def test_in_float64(name):
    flags = "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / name)],
        cwd=HERE.parents[1],
        env={**os.environ, "JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
