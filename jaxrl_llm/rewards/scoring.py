# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Sequences of tokens through a scoring model, in batches of few shapes."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np

from jaxrl_llm.checkpoint.score_folder import ScoringModel, load_score_folder
from jaxrl_llm.errors import RewardError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.score_heads import token_scores
from jaxrl_llm.models.transformer import Params


@functools.lru_cache(maxsize=4)
def scoring_model(path: str, dtype: str) -> ScoringModel:
    """The model of a folder, read once a process; raises as `load_score_folder`."""
    return load_score_folder(path, dtype)


@functools.partial(jax.jit, static_argnums=1)
def _scores(params: Params, config: ModelConfig, tokens, positions, segment_ids):
    return token_scores(params, config, tokens, positions, segment_ids)


def scores_of(
    model: ScoringModel, sequences: Sequence[Sequence[int]], *, rows: int
) -> list[np.ndarray]:
    """The scores at every token of each sequence, [T, C]; a score does not depend on its batch.

    Sequences of like length share a batch, so that little is padded.

    Args:
        rows: sequences that are scored at once, ≥ 2.

    Raises:
        RewardError: a sequence is empty or longer than the model's context.
    """
    most = model.config.max_position_embeddings
    for sequence in sequences:
        if not 0 < len(sequence) <= most:
            raise RewardError(
                "a sequence can't be scored",
                got=f"{len(sequence)} tokens",
                expected=f"1 to {most}, the reward model's context",
            )
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    found: list[np.ndarray] = [np.zeros(0)] * len(sequences)
    for start in range(0, len(order), rows):
        places = order[start : start + rows]
        width = _width(max(len(sequences[i]) for i in places), most)
        tokens, segments = (np.zeros((rows, width), np.int32) for _ in range(2))
        for n, i in enumerate(places):
            tokens[n, : len(sequences[i])] = sequences[i]
            segments[n, : len(sequences[i])] = 1
        positions = np.broadcast_to(np.arange(width, dtype=np.int32), tokens.shape)
        arrays = map(jax.numpy.asarray, (tokens, positions, segments))
        scores = np.asarray(_scores(model.params, model.config, *arrays))
        for n, i in enumerate(places):
            found[i] = scores[n, : len(sequences[i])]
    return found


def _width(length: int, most: int) -> int:
    """32, 48, 64, 96, 128, …: two shapes for each doubling."""
    size = 32
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
    return min(size, most)
