# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import numpy as np
import pytest

from jaxrl_llm.errors import RewardError
from jaxrl_llm.rewards.answer import anchored_answer
from jaxrl_llm.rewards.base import score
from jaxrl_llm.rewards.length import CosineLength, Repetition, SoftOverlong
from jaxrl_llm.types import Prompt, Rollout


def _rollout(length, completion="", finish_reason="stop", tokens=None):
    tokens = np.arange(length, dtype=np.int32) if tokens is None else np.array(tokens, np.int32)
    logp = np.zeros(len(tokens), np.float32)
    mask = np.ones(len(tokens), bool)
    prompt = Prompt("p", (1,), "p", "7")
    return Rollout(prompt, 0, tokens, logp, mask, tokens, finish_reason, completion)


def test_soft_overlong_worked_by_hand():
    reward = SoftOverlong(limit=100, cache=20)
    lengths = (0, 79, 80, 81, 90, 99, 100, 101, 10_000)
    assert reward([_rollout(length) for length in lengths]) == pytest.approx(
        [0, 0, 0, -0.05, -0.5, -0.95, -1, -1, -1]
    )
    for limit, cache in ((10, 11), (10, 0), (10, -1)):
        with pytest.raises(RewardError, match="0 < cache ≤ limit"):
            SoftOverlong(limit=limit, cache=cache)


def test_cosine_worked_by_hand_and_the_unshaped_reward_beside_it():
    reward = CosineLength(anchored_answer, 100, 2.0, 1.0, -10.0, 0.0, exceeded=-20.0)
    right, wrong = "Answer: 7", "Answer: 8"
    cases = [
        (0, right, "stop", 2.0),
        (50, right, "stop", 1.5),
        (25, right, "stop", 1.0 + 0.5 * (1.0 + math.sqrt(0.5))),
        (0, wrong, "stop", -10.0),
        (50, wrong, "stop", -5.0),
        (100, right, "stop", -20.0),
        (10, right, "length", -20.0),
    ]
    rewards = reward([_rollout(length, text, finish) for length, text, finish, _ in cases])
    assert [each.value for each in rewards] == pytest.approx([value for *_, value in cases])
    assert [each.parts["unshaped"] for each in rewards] == [1, 1, 1, 0, 0, 1, 1]
    (verdict,) = score({"shaped": reward}, [_rollout(50, right)])
    assert verdict.parts == {"shaped": 1.5, "shaped/unshaped": 1.0}
    assert CosineLength(lambda rollouts: [None for _ in rollouts], 10)([_rollout(1)]) == [None]
    with pytest.raises(RewardError, match="not positive"):
        CosineLength(anchored_answer, 0)


def test_repetition_counts_distinct_ngrams():
    two = Repetition(n=2)
    rollouts = [_rollout(0, tokens=tokens) for tokens in ([], [1], [1, 2], [1, 2, 1, 2], [5] * 101)]
    assert two(rollouts) == pytest.approx([0.0, 0.0, 0.0, 2 / 3 - 1, 0.01 - 1])
    with pytest.raises(RewardError, match="n-gram"):
        Repetition(n=0)
