# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Linear heads over hidden states: the scores of reward models.

A scoring model is ``{"decoder": …, "score": {"weight": [C, D], "bias": [C]}}``; a reward model has
one class and no bias, a process reward model the classes "wrong" and "right". The decoder's output
head is not used.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers import accumulation_dtype
from jaxrl_llm.models.transformer import Params, forward
from jaxrl_llm.types import Reach


def init_score_head(
    config: ModelConfig, classes: int, key: PRNGKeyArray, dtype: jnp.dtype = jnp.float32
) -> Params:
    """A head with normal weights of variance 1/(D + 1), as in https://arxiv.org/abs/2009.01325,
    so that first scores are of order one; a bias of 0 where there are several classes."""
    scale = (config.hidden_size + 1) ** -0.5
    weight = (scale * jax.random.normal(key, (classes, config.hidden_size))).astype(dtype)
    return {"weight": weight} | ({"bias": jnp.zeros(classes, dtype)} if classes > 1 else {})


def token_scores(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "N T"],
    positions: Int[Array, "N T"],
    segment_ids: Int[Array, "N T"],
    *,
    reach: Reach | None = None,
    remat: bool = False,
) -> Float[Array, "N T C"]:
    """``W·h + b`` at every token, in at least float32; the arguments are those of `forward`."""
    rows = tokens, positions, segment_ids
    hidden = forward(params["decoder"], config, *rows, reach=reach, remat=remat)
    wide = accumulation_dtype(hidden.dtype)
    with jax.named_scope("score"):
        scores = jnp.einsum(
            "ntd,cd->ntc", hidden, params["score"]["weight"], preferred_element_type=wide
        )
        if "bias" in params["score"]:
            scores = scores + params["score"]["bias"].astype(wide)[None, None, :]
    return scores
