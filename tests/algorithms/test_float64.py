# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the files float64_*.py, each in a process in which float64 is on."""

import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).parent


def test_everything_in_float64():
    files = sorted(HERE.glob("float64_*.py"))
    assert len(files) == 4
    env = {
        **os.environ,
        "JAX_ENABLE_X64": "1",
        "JAX_PLATFORMS": "cpu",
        # One device, and little optimisation: these are many small programs, run once.
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    running = [
        subprocess.Popen([*command, str(file)], cwd=HERE.parents[1], env=env, **pipes)
        for file in files
    ]
    told = [process.communicate()[0] for process in running]
    failed = [text[-4000:] for p, text in zip(running, told, strict=True) if p.returncode]
    assert not failed, failed[0]
