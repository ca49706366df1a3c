# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Tiny models of every family with formula weights: `from family_models import …`."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import tempfile

from formula_weights import formula_weight
from golden_files import GOLDEN, read_golden
from safetensors.numpy import save_file

from jaxrl_llm.checkpoint.huggingface import load_config, load_params

CASES = sorted(path.stem.removeprefix("family_") for path in GOLDEN.glob("family_*.json"))


@functools.cache
def golden(name: str):
    return read_golden(f"family_{name}.json")


def write_checkpoint(folder: str | pathlib.Path, name: str) -> pathlib.Path:
    """config.json as transformers wrote it, and the weights."""
    folder, stored = pathlib.Path(folder), golden(name)
    tensors = {
        key: formula_weight(key, shape, stored["norm_centre"])
        for key, shape in stored["tensors"].items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(stored["config_written"]))
    return folder


@functools.cache
def family_model(name: str):
    """Configuration, for the length of the golden rows, and parameters."""
    with tempfile.TemporaryDirectory() as folder:
        folder = write_checkpoint(folder, name)
        config = load_config(folder)
        params = load_params(folder, config)
    return dataclasses.replace(config, context=len(golden(name)["tokens"][0])), params
