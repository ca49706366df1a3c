# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Rollouts as rows: what is trained on, what is padding, and the few shapes that rows have."""

import numpy as np
import pytest

from jaxrl_llm.trainers.batching import count_targets, micro_batches, pad_rollouts, round_length
from jaxrl_llm.types import Prompt, Reward, Rollout

EOS = 2  # also the padding token of SmolLM2


def rollout(prompt, completion, reason="stop", judged=True):
    count = len(completion)
    return Rollout(
        prompt=Prompt("p", tuple(prompt), ""),
        sample=0,
        tokens=np.array(completion, np.int32),
        logp_sampler=-np.arange(1, count + 1, dtype=np.float32),
        mask=np.ones(count, bool),
        weights_version=np.zeros(count, np.int32),
        finish_reason=reason,
        reward=Reward(1.0) if judged else None,
    )


def test_the_chosen_eos_is_trained_on_once_and_padding_never_though_pad_is_eos():
    rows = [
        rollout([5, EOS, 6], [7, 8, EOS]),
        rollout([5], [9, EOS]),
        rollout([5, 6], [9], "length"),
    ]
    batch = pad_rollouts(rows, longest=40)
    for row, source in enumerate(rows):
        trained = batch.tokens[row][batch.mask[row]].tolist()
        assert trained == source.tokens.tolist()
        assert trained.count(EOS) == (source.finish_reason == "stop")
        size = len(source.prompt.tokens) + len(source.tokens)
        assert not batch.mask[row, size:].any() and not batch.segment_ids[row, size:].any()
        assert batch.segment_ids[row, :size].all()
    np.testing.assert_array_equal(batch.logp_sampler[0, 3:6], [-1, -2, -3])


def test_a_rollout_without_a_verdict_keeps_its_row_and_trains_nothing():
    batch = pad_rollouts([rollout([5], [9, 3]), rollout([5], [9, 3], judged=False)], longest=8)
    assert batch.mask.sum(axis=1).tolist() == [2, 0]


def test_row_lengths_are_few_and_never_beyond_the_longest():
    shapes = {round_length(length, 1000) for length in range(1, 1001)}
    assert shapes == {32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1000}
    assert all(round_length(n, 1000) >= n for n in range(1, 1001))
    assert {round_length(length, 25) for length in range(1, 26)} == {25}


@pytest.mark.parametrize(("most", "longest", "bound"), [(1, 4, 4), (3, 64, 16), (17, 64, 32)])
def test_the_bound_on_trained_tokens_is_static(most, longest, bound):
    mask = np.zeros((2, 80), bool)
    mask[1, 5 : 5 + most] = True
    assert count_targets(mask, longest) == bound


def test_micro_batches_hold_every_row_once():
    batch = pad_rollouts([rollout([5], [n]) for n in range(8)], longest=8)
    parts = list(micro_batches(batch, 2))
    assert [part.tokens.shape[0] for part in parts] == [2, 2, 2, 2]
    np.testing.assert_array_equal(np.concatenate([p.tokens for p in parts]), batch.tokens)
    assert all(part.logp_old is None for part in parts)
