# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What a worker of `jaxrl_llm.rewards.reasoning_gym` runs; it imports reasoning-gym once."""

from __future__ import annotations

import pickle

import reasoning_gym  # the extra of that name


def score_answer(request: bytes) -> bytes:
    """(data set, answer, entry), pickled → the score as text."""
    dataset, answer, entry = pickle.loads(request)
    scorer = reasoning_gym.get_score_answer_fn(dataset)
    return repr(float(scorer(answer, entry))).encode()
