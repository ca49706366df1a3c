# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""How much a token weighs, and sums over sequences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_batch import batch_of

from jaxrl_llm.algorithms.presets import AlgoConfig, resolve
from jaxrl_llm.algorithms.reductions import (
    add_counts,
    batch_counts,
    on_mask,
    sequence_maximum,
    sequence_mean,
    sequence_total,
)

SEGMENTS = jnp.asarray([[1, 1, 2, 2, 2, 0], [1, 2, 3, 3, 0, 0]])
MASK = jnp.asarray([[1, 1, 1, 0, 1, 1], [0, 1, 1, 1, 0, 0]], bool)
VALUES = jnp.asarray([[1.0, 2.0, 3.0, np.nan, 5.0, 6.0], [np.nan, 8.0, 9.0, 10.0, 11.0, 12.0]])


def test_totals_means_and_maxima_of_packed_sequences():
    packed = [jax.jit(f) for f in (sequence_total, sequence_mean, sequence_maximum)]
    total, mean, most = (f(VALUES, MASK, SEGMENTS) for f in packed)
    assert total.tolist() == [[3, 3, 8, 8, 8, 6], [0, 8, 19, 19, 0, 0]]
    assert mean.tolist() == [[1.5, 1.5, 4, 4, 4, 6], [0, 8, 9.5, 9.5, 0, 0]]
    assert most.tolist() == [[2, 2, 5, 5, 5, 6], [0, 8, 10, 10, 0, 0]]
    assert sequence_total(VALUES, MASK).tolist() == [[17] * 6, [27] * 6]
    assert sequence_maximum(VALUES, MASK).tolist() == [[6] * 6, [10] * 6]


def test_counts():
    mask = MASK & (SEGMENTS > 0)
    counts = batch_counts(mask, SEGMENTS)
    # Segment 1 of the second row has no trained token: it does not count.
    assert (int(counts.tokens), int(counts.sequences)) == (7, 4)
    rows = [batch_counts(mask[i : i + 1], SEGMENTS[i : i + 1]) for i in range(2)]
    total = add_counts(rows)
    assert (int(total.tokens), int(total.sequences)) == (7, 4)
    whole = batch_counts(jnp.asarray([[True, False], [False, False]]))
    assert (int(whole.tokens), int(whole.sequences)) == (1, 1)


def test_narrow_floats_are_promoted():
    assert on_mask(jnp.ones((1, 2), jnp.bfloat16), jnp.ones((1, 2), bool)).dtype == jnp.float32


@pytest.mark.parametrize(
    ("name", "ratio"), [("dr_grpo", 1.0), ("grpo", 100.0), ("dapo", 1.0), ("rloo", 1.0)]
)
def test_weight_of_a_token_in_a_short_and_in_a_long_answer(name, ratio):
    """10 and 1,000 tokens, equal advantages."""
    algorithm = resolve(AlgoConfig(name=name), max_tokens=1000)
    mask = np.arange(1000)[None] < np.array([[10], [1000]])
    zeros = np.zeros(mask.shape)
    batch = batch_of(
        tokens=zeros.astype(int), positions=zeros.astype(int), segment_ids=mask.astype(int),
        mask=mask, advantages=np.ones(mask.shape), logp_sampler=zeros, logp_old=zeros,
    )  # fmt: skip
    counts = algorithm.counts(mask, batch.segment_ids)
    loss = jax.jit(jax.grad(lambda x: algorithm.loss(x, x * 0.0, batch, counts)[0]))
    grad = np.asarray(loss(jnp.zeros(mask.shape)))
    np.testing.assert_allclose(grad[0, 0] / grad[1, 0], ratio, rtol=1e-5)
    np.testing.assert_allclose(grad[0, 9], grad[0, 0])
