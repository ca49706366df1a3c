# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""A tiny random model on disk, for tests that need a model folder: `from tiny_model import …`."""

from __future__ import annotations

import dataclasses
import pathlib

import jax
import jax.numpy as jnp

from jaxrl_llm.checkpoint.huggingface import save_folder
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.transformer import init_params
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
    """Configuration and random parameters; norms are not 1 and attention is not uniform."""
    config = dataclasses.replace(TINY, **traits)
    key_base, key_noise = jax.random.split(jax.random.key(seed))
    params = init_params(config, key_base)
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(key_noise, len(leaves))
    noisy = [
        (x + 0.2 * jax.random.normal(k, x.shape, x.dtype)).astype(dtype)
        for x, k in zip(leaves, keys, strict=True)
    ]
    return config, jax.tree.unflatten(treedef, noisy)


def write_tiny_model(folder: str | pathlib.Path, seed: int = 0, **traits) -> pathlib.Path:
    """A HF folder with a tiny random Llama and the byte tokenizer (bos 256, eos 257, pad 258)."""
    config, params = tiny_model(seed, **traits)
    return save_folder(folder, params, config, bytes_tokenizer())
