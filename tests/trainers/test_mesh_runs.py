# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Runs from the command line, every role on its own mesh, against the same run on one device."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_llm.checkpoint.pretrained import TINY_CONFIG
from jaxrl_llm.checkpoint.run_params import restore_trained
from jaxrl_llm.cli.export import main as export
from jaxrl_llm.models.transformer import forward, init_params, logits
from jaxrl_llm.text.tokenizer import bytes_tokenizer
from jaxrl_llm.train import main

CONFIG = pathlib.Path(__file__).with_name("ppo_digits.py")
CHECK = pathlib.Path(__file__).parents[2] / "scripts" / "check_exports.py"
BASE = [f"--config={CONFIG}", "--train.seed=3", "--train.eval_every=0"]
BASE += ["--algo.kl_coef=0.05", "--train.steps=3", "--train.checkpoint_every=1"]
BASE += ["--optimizer.learning_rate=1e-2", "--monitor.tensorboard=False"]
ALONE = ["--mesh.data=1"]
APART = ["--mesh.data=1", "--mesh.fsdp=2", "--mesh.pipeline=2", "--mesh.tensor=2"]
APART += ["--ref_mesh.fsdp=8", "--critic.mesh.data=2", "--critic.mesh.tensor=4"]
APART += ["--sampler.mesh.data=2", "--sampler.mesh.tensor=2"]
OTHER = ["--mesh.data=2", "--mesh.tensor=4", "--critic.mesh.data=2", "--critic.mesh.fsdp=4"]
COMPARED = ("loss", "kl", "entropy", "grad_norm", "value/loss", "value/grad_norm", "value/mean")


def steps(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in lines if "loss" in row}


def assert_same(row, other):
    for name in COMPARED:
        assert row[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name


def train_until_killed(args, checkpoint):
    """The command line in a process of its own, with kill -9 once a checkpoint is there."""
    command = [sys.executable, "-m", "jaxrl_llm.train", "--devices=cpu:8", *args]
    env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        while not checkpoint.exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        process.kill()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    args = [f"--rollouts.write={folder / 'store'}", f"--run-dir={folder / 'run'}"]
    assert main([*BASE, *ALONE, *args]) == 0
    return folder


@pytest.fixture(scope="module")
def apart(alone):
    """A run with every role on its own mesh, killed after its first step and started again."""
    run = alone / "apart"
    args = [*BASE, *APART, f"--rollouts.read={alone / 'store'}", f"--run-dir={run}"]
    train_until_killed(args, run / "checkpoints" / "1")
    assert main(args) == 0
    return run


@pytest.mark.full
def test_the_checkpoint_of_a_mesh_run_is_the_same_model_in_transformers(apart, tmp_path):
    """Needs JAXRL_LLM_PARITY_PYTHON: an interpreter with torch and transformers."""
    python = os.environ.get("JAXRL_LLM_PARITY_PYTHON")
    if not python:
        pytest.skip("JAXRL_LLM_PARITY_PYTHON names no interpreter with torch and transformers")
    folder, text, tokenizer = tmp_path / "out", "ab naïve", bytes_tokenizer()
    assert export([f"{apart}@3", str(folder)]) == 0
    params = restore_trained(apart, 3)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, TINY_CONFIG.vocab_size, (4, 40), np.int32)
    positions = jnp.broadcast_to(jnp.arange(40)[None, :], tokens.shape)
    hidden = forward(
        params, TINY_CONFIG, jnp.asarray(tokens), positions, jnp.ones(tokens.shape, jnp.int32)
    )
    computed = np.asarray(logits(params, hidden, TINY_CONFIG))
    np.savez(f"{folder}.npz", tokens=tokens, logits=computed, ids=tokenizer.encode(text))
    pathlib.Path(f"{folder}.json").write_text(json.dumps({"config": {}, "text": text}))
    # It has learnt: the random model that it began with is another.
    first = init_params(TINY_CONFIG, jax.random.key(0), jnp.float32)
    assert np.abs(first["embed"] - params["embed"]).max() > 1e-3
    command = [python, str(CHECK), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert json.loads(done.stdout)["gap"] < 1e-4


@pytest.mark.full
def test_every_role_on_its_own_mesh(alone, apart, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(apart, run)
    args = [f"--rollouts.read={alone / 'store'}", f"--run-dir={run}"]
    # The run of many meshes, and one that goes on from its second step on others.
    expected, found = steps(alone / "run"), steps(run)
    assert_same(found[1], expected[1])
    (run / "DONE").unlink()
    (run / "checkpoints" / "3").rename(tmp_path / "third")
    assert main([*BASE, *OTHER, *args]) == 0
    assert_same(steps(run)[3], found[3])

    # Exports of the run and of its checkpoint, on one device, are one model.
    assert export([str(run), str(tmp_path / "out")]) == 0
    told = [
        load_file(folder / "model.safetensors") for folder in (run / "export", tmp_path / "out")
    ]
    jax.tree.map(np.testing.assert_array_equal, *told)
    one = load_file(alone / "run" / "export" / "model.safetensors")
    assert {k: v.shape for k, v in one.items()} == {k: v.shape for k, v in told[0].items()}
    # Adam's first steps are as long for a gradient that is rounding as for any other.
    apart = np.concatenate([np.abs(one[k] - told[0][k]).ravel() for k in one])
    assert np.mean(apart > 1e-3) < 0.02


@pytest.mark.parametrize(
    ("wrong", "way"),
    [
        (["--mesh.tensor=8"], "--mesh.tensor=4"),
        (["--mesh.data=1", "--mesh.pipeline=3"], "--mesh.pipeline=2"),
        (["--mesh.pipeline=16"], "--mesh.pipeline=2"),
        (["--mesh.pipeline=2", "--mesh.microbatches=1000000"], "at most 16"),
        (["--mesh.devices=4,5"], "--mesh.devices=4,4"),
        (["--sampler.mesh.devices=8,1"], "a first one below 8"),
        (["--critic.mesh.tensor=8"], "--critic.mesh.tensor=4"),
        (["--ref_mesh.fsdp=3"], "--ref_mesh.fsdp=2 or 4"),
        (["--sampler.mesh.tensor=8"], "--sampler.mesh.tensor=4"),
        (["--sampler.mesh.zero=1"], "--sampler.mesh.data and --sampler.mesh.tensor alone"),
        (["--sampler.mesh.rounds=2"], "--sampler.mesh.data and --sampler.mesh.tensor alone"),
        (["--ref_mesh.zero=1"], "--ref_mesh.fsdp=2"),
        (["--critic.mesh.rounds=2"], "--critic.mesh.pipeline=2"),
        (["--algo.kl_coef=0", "--ref_mesh.tensor=2"], "leave out --ref_mesh.*"),
        (["--train.offload=True"], "leave out --train.offload"),
    ],
)
@pytest.mark.parametrize("how", [[], ["--dry-run"]], ids=["run", "dry"])
def test_a_mesh_that_does_not_fit_is_one_line(wrong, way, how, tmp_path, capsys):
    assert main([*BASE, *wrong, *how, f"--run-dir={tmp_path / 'run'}"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and f"try: {way}" in lines[0], lines
