# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The update does not depend on how its batch is cut, padded or poisoned where it is masked."""

import json
import os
import pathlib
import subprocess
import sys

import pytest


@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
def test_same_batch_same_gradient_in_float64(name):
    script = pathlib.Path(__file__).with_name("float64_update.py")
    done = subprocess.run(
        [sys.executable, str(script), name],
        env={**os.environ, "JAX_ENABLE_X64": "1", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    distances = json.loads(done.stdout.splitlines()[-1])
    assert distances.pop("control: other advantages") > 1e-4
    assert max(distances.values()) < 1e-9, distances
