# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Tiny reward models on disk, the same ones every time: `from score_models import …`."""

from __future__ import annotations

import pathlib

import jax.numpy as jnp
import numpy as np
from tiny_model import tiny_model

from jaxrl_llm.checkpoint.score_folder import save_score_folder
from jaxrl_llm.text.tokenizer import Tokenizer, bytes_tokenizer

# Of several lengths; two with an end token (257) inside, all with one at the end.
SEQUENCES = [
    [256, 72, 105, 257],
    [256, 72, 257, 105, 33, 10, 257],
    [65, 66, 67, 68, 69, 70, 71, 72, 257, 257],
    [9, 257],
]


def write_score_model(
    folder: pathlib.Path, classes: int, tokenizer: Tokenizer | None = None
) -> pathlib.Path:
    """A folder with a tiny random classifier: one label a sequence, or two a token."""
    config, decoder = tiny_model(seed=4, num_layers=2)
    draw = np.random.default_rng(5)
    score = {"weight": jnp.asarray(draw.standard_normal((classes, 24)), jnp.float32)}
    if classes > 1:
        score["bias"] = jnp.asarray(draw.standard_normal(classes), jnp.float32)
    params = {"decoder": decoder, "score": score}
    return save_score_folder(folder, params, config, tokenizer or bytes_tokenizer())
