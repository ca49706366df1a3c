# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Attention by blocks of queries against attention at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.attention import (
    causal_attention,
    causal_segments,
    masked_attention,
    within_window,
)


def shared_rows(length):
    """Two rows: a prompt with completions behind it and padding; two packed sequences."""
    segments, prefixes, positions = (np.zeros((2, length), np.int32) for _ in "123")
    cut = length // 3
    for index, start in enumerate(range(cut, length - 9, cut)):
        end = min(start + cut, length - 9)
        segments[0, start:end], prefixes[0, start:end] = index + 2, 1
        positions[0, start:end] = cut + np.arange(end - start)
    segments[0, :cut], positions[0, :cut] = 1, np.arange(cut)
    segments[1, :cut], segments[1, cut:] = 1, 2
    positions[1] = np.concatenate([np.arange(cut), np.arange(length - cut)])
    return jnp.asarray(positions), jnp.asarray(segments), jnp.asarray(prefixes)


@pytest.mark.parametrize(("length", "window"), [(63, None), (150, None), (200, 20), (1100, None)])
def test_blocks_of_queries_change_nothing(length, window):
    positions, segments, prefixes = shared_rows(length)
    allowed = causal_segments(positions, segments, prefixes)
    assert not np.triu(np.asarray(allowed), 1).any()  # nobody looks to the right
    if window is not None:
        allowed &= within_window(positions, window)
    draw = lambda seed, heads: jax.random.normal(jax.random.key(seed), (2, length, heads, 8))  # noqa: E731
    q, k, v, weight = draw(0, 4), draw(1, 2), draw(2, 2), draw(3, 4)

    def outcome(attention):
        def total(q, k, v):
            return jnp.sum(weight * attention(q, k, v, allowed, scale=0.7, softcap=5.0))

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))(q, k, v)

    (value, grads), (expected, expected_grads) = (
        outcome(causal_attention),
        outcome(masked_attention),
    )
    np.testing.assert_allclose(value, expected, rtol=1e-4)
    for got, want in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * float(jnp.max(jnp.abs(want))))
