# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Every family out again: bitwise, under the names it came with, and as transformers loads it."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_models import CASES, family_model, golden, write_checkpoint
from safetensors.numpy import load_file

from jaxrl_llm.checkpoint.huggingface import load_config, load_params, save_folder
from jaxrl_llm.models.transformer import forward, init_params, logits
from jaxrl_llm.text.tokenizer import bytes_tokenizer

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "check_exports.py"


def as_imported(name):
    config, params = family_model(name)
    return dataclasses.replace(config, context=None), params


@pytest.mark.parametrize("name", CASES)
def test_import_export_import_is_bitwise_under_the_same_names(name, tmp_path):
    config, params = as_imported(name)
    folder = save_folder(tmp_path / "out", params, config, bytes_tokenizer())
    assert load_config(folder) == config
    jax.tree.map(np.testing.assert_array_equal, load_params(folder, config), params)
    (tmp_path / "original").mkdir()
    original = load_file(write_checkpoint(tmp_path / "original", name) / "model.safetensors")
    exported = load_file(folder / "model.safetensors")
    assert set(exported) == set(original)
    for key, value in original.items():
        np.testing.assert_array_equal(exported[key], value)


@pytest.mark.parametrize("name", ["phi3", "mixtral"])
def test_shards_of_fused_and_of_expert_tensors(name, tmp_path):
    config, params = as_imported(name)
    folder = save_folder(
        tmp_path / "out", params, config, bytes_tokenizer(), max_shard_bytes=15_000
    )
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    jax.tree.map(np.testing.assert_array_equal, load_params(folder, config), params)


@pytest.mark.parametrize("name", ["phi3", "mixtral", "gemma3"])
def test_each_device_reads_its_part(name, tmp_path):
    config, params = as_imported(name)
    folder = write_checkpoint(tmp_path, name)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("a", "b"))

    def spread(x):
        axes = [None] * x.ndim
        if x.ndim >= 3:
            axes[-2:] = "a", "b"
        return jax.sharding.NamedSharding(mesh, jax.P(*axes))

    shardings = jax.tree.map(spread, params)
    loaded = load_params(folder, config, shardings=shardings)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    q = loaded["layers"]["q"]
    assert {s.data.size for s in q.addressable_shards} == {q.size // 4}


@pytest.mark.full
def test_transformers_loads_every_export_with_equal_logits(tmp_path):
    """Needs JAXRL_LLM_PARITY_PYTHON: an interpreter with torch and transformers."""
    python = os.environ.get("JAXRL_LLM_PARITY_PYTHON")
    if not python:
        pytest.skip("JAXRL_LLM_PARITY_PYTHON names no interpreter with torch and transformers")
    folders = []
    for name in CASES:
        config, params = family_model(name)
        tokenizer = bytes_tokenizer()
        tokenizer.pad_id = None  # these vocabularies are smaller than the tokenizer's
        folder = save_folder(tmp_path / name, params, config, tokenizer)
        tokens = jnp.asarray(golden(name)["tokens"], jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape)
        hidden = forward(params, config, tokens, positions, jnp.ones_like(tokens))
        text = "ab<eos> naïve"
        np.savez(
            f"{folder}.npz",
            tokens=np.asarray(tokens),
            logits=np.asarray(logits(params, hidden, config)),
            ids=np.asarray(tokenizer.encode(text)),
        )
        told = {"config": golden(name)["config"], "text": text}
        pathlib.Path(f"{folder}.json").write_text(json.dumps(told))
        folders.append(str(folder))
    done = subprocess.run(
        [python, str(SCRIPT), *folders], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == len(CASES)


def test_the_one_width_of_a_mixtral_is_that_of_its_experts(tmp_path):
    config, _ = family_model("mixtral")
    config = dataclasses.replace(config, expert_size=24, intermediate_size=56, context=None)
    params = init_params(config, jax.random.key(0))
    folder = save_folder(tmp_path / "m", params, config, bytes_tokenizer())
    again = load_config(folder)
    assert (again.expert_size, again.intermediate_size) == (24, 24)
    jax.tree.map(np.testing.assert_array_equal, load_params(folder, again), params)
