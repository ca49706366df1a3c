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
import safetensors.numpy
from tiny_model import write_tiny_model

from jaxrl_llm.checkpoint import run_export
from jaxrl_llm.checkpoint.base_facts import base_facts, changes
from jaxrl_llm.checkpoint.huggingface import load_config, load_params
from jaxrl_llm.checkpoint.manager import CheckpointManager
from jaxrl_llm.checkpoint.run_export import _cast
from jaxrl_llm.checkpoint.run_params import saved_steps
from jaxrl_llm.cli.export import main
from jaxrl_llm.errors import ConfigError, RunDirectoryError
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


def everything(root):
    return {p: p.read_bytes() if p.is_file() else None for p in root.rglob("*")}


def refused(capsys, arguments, said):
    assert main([str(a) for a in arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("error: ")
    assert re.search(said, error), error


def test_a_run_and_its_base_are_never_replaced(run, tmp_path, capsys, monkeypatch):
    (tmp_path / "link").symlink_to("base")
    monkeypatch.chdir(tmp_path / "base")
    before = everything(tmp_path)
    outs = {
        tmp_path / "base": "began with",
        tmp_path / "link": "began with",
        tmp_path / "run" / ".." / "base": "began with",
        "../link/": "began with",
        run: "place of the run",
        "../run": "place of the run",
        run / "checkpoints": "place of the run",
        run / "checkpoints" / "11": "place of the run",
        run / "checkpoints" / "5" / "new": "place of the run",
        tmp_path: "holds other files",
        tmp_path / "base" / "out": "into a folder of the one",
        tmp_path / "link" / "deep" / "er": "into a folder of the one",
    }
    for out, said in outs.items():
        refused(capsys, [run, out], said)
    assert everything(tmp_path) == before


def test_what_else_a_run_began_with(run, tmp_path, capsys):
    settings = json.loads((run / "config.json").read_text())
    settings |= {
        "critic": {"path": str(tmp_path / "critic")},
        "rewards": {"path": None, "model": [{"path": str(tmp_path / "judge")}, 0.5]},
    }
    (run / "config.json").write_text(json.dumps(settings))
    refused(capsys, [run, tmp_path / "critic"], "began with")
    refused(capsys, [run, tmp_path / "judge"], "began with")


def test_an_adapter_goes_over_the_base_that_it_was_trained_on(run, tmp_path, capsys):
    """The run has a whole model in its checkpoint: what is not refused gets as far as that."""
    settings = json.loads((run / "config.json").read_text()) | {"lora": {"targets": ["q"]}}
    (run / "config.json").write_text(json.dumps(settings))
    base = tmp_path / "base"
    facts = base_facts(str(base))
    (run / "base.json").write_text(json.dumps(facts))
    merged, alone = [run, tmp_path / "out"], [run, tmp_path / "out", "--adapter"]
    (weights,) = base.glob("*.safetensors")
    tensors = safetensors.numpy.load_file(weights)
    right = dict(tensors)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + np.eye(24)[3].astype("f4")
    safetensors.numpy.save_file(tensors, weights)
    for arguments in (merged, alone):
        refused(capsys, arguments, "is not the one that the run began with · got other weights")
    weights.unlink()
    half = sorted(right)[: len(right) // 2]
    files = {key: f"model-{2 - (key in half):05d}-of-00002.safetensors" for key in right}
    for name in set(files.values()):
        part = {key: x for key, x in right.items() if files[key] == name}
        safetensors.numpy.save_file(part, base / name)
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert changes(facts, base_facts(str(base))) == []  # the same model, in other files
    attributes = json.loads((base / "config.json").read_text())
    attributes |= {"rms_norm_eps": 0.1, "transformers_version": "9"}
    (base / "config.json").write_text(json.dumps(attributes))
    refused(capsys, merged, "got rms_norm_eps: [0-9.e-]+ → 0.1 · try")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "settings",
    [
        [],
        {},
        5,
        None,
        {"model": []},
        {"model": {"path": 5, "dtype": "float32"}},
        {"model": {"path": "base"}},
        {"model": {"path": "base", "dtype": "float31"}},
        {"model": {"path": "base", "dtype": ["float32"]}},
        {"model": {"path": "base", "dtype": "float32"}, "rows": [1]},
        {"model": {"path": "base", "dtype": "float32"}, "lora": {}},
        {"model": {"path": "base", "dtype": "float32"}, "lora": [1]},
        {"model": {"path": "base", "dtype": "float32"}, "lora": {"targets": 5}},
        {"model": {"path": "base", "dtype": "float32"}, "lora": {"targets": [], "rank": "x"}},
        {"model": {"path": "base", "dtype": "float32"}, "reward": {}},
    ],
)
def test_a_config_that_training_did_not_write(run, tmp_path, capsys, settings):
    (run / "config.json").write_text(json.dumps(settings))
    refused(capsys, [run, tmp_path / "out"], "the run")
    assert not (tmp_path / "out").exists()


def test_arguments_without_sense(run, tmp_path, capsys):
    out = tmp_path / "out"
    for size in ("0", "-1", "nan", "inf", "x", ""):
        refused(capsys, [run, out, f"--max-shard-gb={size}"], "bad --max-shard-gb")
    for step in ("²", "x", "-1", "5.0", "٥", "9" * 30):
        refused(capsys, [f"{run}@{step}", out], "not a run directory")
    refused(capsys, [run, out, "--adapter"], "trained no adapter")
    settings = json.loads((run / "config.json").read_text())
    settings |= {"lora": {"rank": 2, "targets": ["q"]}}
    (run / "config.json").write_text(json.dumps(settings))
    refused(capsys, [run, out, "--adapter", "--max-shard-gb=1"], "one file")
    (run / "config.json").write_text(json.dumps(settings | {"reward": {}}))
    refused(capsys, [run, out, "--adapter"], "score head")
    assert not out.exists()


def test_other_names_among_the_checkpoints_are_no_steps(run):
    for name in ("²", "007", "٧", "9" * 40, "11"):
        (run / "checkpoints" / name).mkdir()
    (run / "checkpoints" / "11" / "config.json").write_text("{}")
    assert saved_steps(run) == [5, 10]
    before = everything(run)
    with pytest.raises(RunDirectoryError, match="lies what is none"):
        CheckpointManager(run / "checkpoints")
    assert everything(run) == before


def test_a_cast_never_makes_an_infinity():
    tree = {"embed": jnp.asarray([1.0, -70000.0]), "layers": {"q": jnp.asarray([3.4e38])}}
    with pytest.raises(ConfigError, match=r"float16: embed .*7e\+04.*--dtype=bfloat16"):
        _cast(tree, "float16")
    with pytest.raises(ConfigError, match=r"bfloat16: layers\.q .*--dtype=float32"):
        _cast({"layers": {"q": jnp.asarray([3.4e38])}}, "bfloat16")
    same = _cast(tree, None)
    assert same["embed"] is tree["embed"]
    made = _cast({"a": jnp.asarray([65504.0, 1e-9])}, "float16")["a"]
    np.testing.assert_array_equal(made, np.asarray([65504, 0], np.float16))


def test_the_head_of_a_critic_stays_behind(run, tmp_path, monkeypatch):
    decoder = load_params(tmp_path / "base", load_config(tmp_path / "base"))
    trained = {"decoder": decoder, "score": {"weight": jnp.ones((1, 24))}}
    monkeypatch.setattr(run_export, "restore_trained", lambda run, step: trained)
    assert main([str(run), str(tmp_path / "out")]) == 0
    architectures = json.loads((tmp_path / "out" / "config.json").read_text())["architectures"]
    assert architectures == ["LlamaForCausalLM"]
    new = load_params(tmp_path / "out", load_config(tmp_path / "out"))
    jax.tree.map(np.testing.assert_array_equal, new, decoder)
