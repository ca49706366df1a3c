# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The update does not depend on how its batch is cut, padded or poisoned where it is masked."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from jaxrl_llm.algorithms.presets import PRESETS, AlgoConfig, resolve


def critics(name):
    """Rows that need what a batch of rewards alone does not hold."""
    algorithm = resolve(AlgoConfig(name=name), group_size=4, max_tokens=10)
    return (
        algorithm.needs_values
        or algorithm.needs_sum_pi_squared
        or algorithm.needs_tasks
        or algorithm.needs_staleness
    )


QUICK_TO_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
FULL = pytest.mark.full
NAMES = ["grpo"]
NAMES += [pytest.param(n, marks=FULL) for n in PRESETS if n not in NAMES and not critics(n)]


@pytest.mark.parametrize("name", NAMES)
def test_same_batch_same_gradient_in_float64(name):
    script = pathlib.Path(__file__).with_name("float64_update.py")
    done = subprocess.run(
        [sys.executable, str(script), name],
        env={**os.environ, "JAX_ENABLE_X64": "1", "XLA_FLAGS": QUICK_TO_COMPILE},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    distances = json.loads(done.stdout.splitlines()[-1])
    assert distances.pop("control: other advantages") > 1e-4
    assert max(distances.values()) < 1e-9, distances
