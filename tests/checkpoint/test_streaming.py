# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Import holds little beyond the parameters, and each device its part."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_model import TINY, write_tiny_model

from jaxrl_llm.checkpoint import stacking
from jaxrl_llm.checkpoint.hf_names import HF_NAMES
from jaxrl_llm.checkpoint.huggingface import load_params
from jaxrl_llm.checkpoint.stacking import tensor_shapes
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.hf_config import config_to_hf

MIB = 1 << 20
LARGE = ModelConfig(
    vocab_size=32000,
    hidden_size=1024,
    intermediate_size=4096,
    num_layers=26,
    num_heads=8,
    num_kv_heads=8,
    head_dim=128,
)


@pytest.mark.parametrize("spread", [False, True])
def test_large_parts_are_filled_layer_by_layer(spread, tmp_path, monkeypatch):
    folder = write_tiny_model(tmp_path / "m")
    plain = load_params(folder, TINY)
    shardings = None
    if spread:
        mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
        shardings = jax.tree.map(
            lambda x: jax.sharding.NamedSharding(
                mesh, jax.P("a", "b") if x.ndim == 3 and x.shape[1] % 2 == 0 else jax.P()
            ),
            plain,
        )
    monkeypatch.setattr(stacking, "LARGE_PART", 100)
    sizes = []
    assemble = stacking._assemble

    def watched(*args):
        sizes.append(assemble(*args))
        return sizes[-1]

    monkeypatch.setattr(stacking, "_assemble", watched)
    loaded = load_params(folder, TINY, shardings=shardings)
    jax.tree.map(np.testing.assert_array_equal, loaded, plain)
    assert max(x.shape[0] for x in sizes if x.ndim == 3) == 1
    if spread:
        assert loaded["layers"]["q"].sharding == shardings["layers"]["q"]


CHILD = """
import sys, jax, jax.numpy as jnp
from jaxrl_llm.checkpoint.huggingface import load_config, load_params

def status(field):
    return next(int(l.split()[1]) << 10 for l in open("/proc/self/status") if l.startswith(field))

jnp.zeros(8).block_until_ready()
folder = sys.argv[1]
config = load_config(folder)
before = status("VmRSS")
params = jax.block_until_ready(load_params(folder, config))
size = sum(x.nbytes for x in jax.tree.leaves(params))
print(size, status("VmHWM") - before - size)
"""


@pytest.mark.full
def test_two_gigabytes_in_four_shards_need_little_more_than_themselves(tmp_path):
    names = write_large(tmp_path)
    largest = max(path.stat().st_size for path in names)
    environment = {**os.environ, "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    size, beyond = map(int, done.stdout.split())
    print(f"{size / MIB:.0f} MiB of parameters, {beyond / MIB:.0f} MiB beyond them at the peak")
    assert size > 1.9e9 and len(names) == 4
    assert beyond < 1.3 * largest


def write_large(folder: pathlib.Path) -> list[pathlib.Path]:
    """A synthetic checkpoint in four files, written without holding it whole."""
    (folder / "config.json").write_text(json.dumps(config_to_hf(LARGE)))
    shapes = list(tensor_shapes(LARGE, HF_NAMES["llama"]).items())
    files, weight_map = [], {}
    for number in range(4):
        file = folder / f"model-{number + 1:05d}-of-00004.safetensors"
        part = dict(shapes[number::4])
        save_file({name: np.full(shape, number, np.float32) for name, shape in part.items()}, file)
        weight_map.update(dict.fromkeys(part, file.name))
        files.append(file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return files
