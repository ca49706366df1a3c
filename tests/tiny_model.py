# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""A tiny random model on disk, for tests that need a model folder: `from tiny_model import …`."""

from __future__ import annotations

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.checkpoint.huggingface import save_folder
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.transformer import param_shapes
from jaxrl_llm.text.tokenizer import bytes_tokenizer

TINY = ModelConfig(
    vocab_size=259,
    hidden_size=24,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    tie_word_embeddings=True,
)


def tiny_model(seed: int = 0, dtype=jnp.float32, **traits):
    """Configuration and random parameters; norms are not 1 and attention is not uniform.

    Drawn by numpy: every shape of a jax draw would be compiled.
    """
    config = dataclasses.replace(TINY, **traits)
    draw = np.random.default_rng(seed)
    params = jax.tree_util.tree_map_with_path(
        lambda path, shape: jnp.asarray(
            ("norm" in jax.tree_util.keystr(path)) + 0.2 * draw.standard_normal(shape), dtype
        ),
        param_shapes(config),
        is_leaf=lambda x: isinstance(x, tuple),
    )
    return config, params


def write_tiny_model(folder: str | pathlib.Path, seed: int = 0, **traits) -> pathlib.Path:
    """A HF folder with a tiny random Llama and the byte tokenizer (bos 256, eos 257, pad 258)."""
    config, params = tiny_model(seed, **traits)
    return save_folder(folder, params, config, bytes_tokenizer())
