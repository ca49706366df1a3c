# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_model import write_tiny_model

from jaxrl_llm.checkpoint.huggingface import load_config, load_params
from jaxrl_llm.checkpoint.manager import CheckpointManager
from jaxrl_llm.cli.export import main
from jaxrl_llm.trainers.state import TrainState


@pytest.fixture
def run(tmp_path):
    """A run directory with two checkpoints that eight devices wrote."""
    base = write_tiny_model(tmp_path / "base")
    params = load_params(base, load_config(base))
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("fsdp",))
    split = lambda x: jax.sharding.NamedSharding(  # noqa: E731
        mesh, jax.P(None, "fsdp") if x.ndim == 3 and x.shape[1] % 8 == 0 else jax.P()
    )
    directory = tmp_path / "run"
    directory.mkdir()
    settings = {"model": {"path": str(base), "dtype": "float32"}}
    (directory / "config.json").write_text(json.dumps(settings))
    manager = CheckpointManager(directory / "checkpoints")
    for step in (5, 10):
        params = jax.tree.map(lambda x: jax.device_put(x + 1, split(x)), params)
        state = TrainState(
            updates=jnp.asarray(step), params=params, opt_state=optax.adam(1e-3).init(params)
        )
        manager.save(step, state, {"trainer": {}})
    manager.wait()
    manager.close()
    return directory


def test_the_newest_or_a_named_step(run, tmp_path, capsys):
    base = load_params(tmp_path / "base", load_config(tmp_path / "base"))
    assert main([str(run), str(tmp_path / "new")]) == 0
    assert "at step 10" in capsys.readouterr().out
    assert main([f"{run}@5", str(tmp_path / "old"), "--dtype=bfloat16"]) == 0
    config = load_config(tmp_path / "new")
    new = load_params(tmp_path / "new", config)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b + 1 + 1), new, base)
    old = load_params(tmp_path / "old", config, jnp.bfloat16)
    rounded = jax.tree.map(lambda x: (x + 1).astype(jnp.bfloat16), base)
    jax.tree.map(np.testing.assert_array_equal, old, rounded)


def test_on_one_device_as_a_command(run, tmp_path):
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "jaxrl_llm.cli.export", str(run), str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'out'}: the model of {run} at step 10\n"
    assert load_config(tmp_path / "out") == load_config(tmp_path / "base")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda run: f"{run}@7", "no checkpoint of step 7.*5, 10"),
        (lambda run: f"{run}/nothing", "not a run directory"),
        (lambda run: (run / "checkpoints").rename(run / "moved") and run, "no checkpoint"),
    ],
)
def test_mistakes_are_one_line(run, tmp_path, capsys, change, said):
    assert main([str(change(run)), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("error: ")

    assert re.search(said, error)
    assert not (tmp_path / "out").exists()
