# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Attention by blocks of queries against attention at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.attention import (
    block_prefixes,
    causal_attention,
    causal_segments,
    keys_read,
    masked_attention,
    within_window,
)
from jaxrl_llm.types import Reach


def group_rows(length, prompts, completions, seed=0):
    """Two rows of groups: prompts of random sizes, completions behind each, then padding."""
    rng = np.random.default_rng(seed)
    segments, prefixes, positions = (np.zeros((2, length), np.int32) for _ in "123")
    for row in range(2):
        place = segment = 0
        while True:
            sizes = [int(rng.integers(1, prompts + 1))]
            sizes += rng.integers(1, completions + 1, int(rng.integers(1, 6))).tolist()
            if place + sum(sizes) > length - 3:
                break
            prompt = segment + 1
            for number, size in enumerate(sizes):
                segment, at = segment + 1, slice(place, place + size)
                segments[row, at], prefixes[row, at] = segment, prompt if number else 0
                positions[row, at] = (sizes[0] if number else 0) + np.arange(size)
                place += size
    return jnp.asarray(positions), jnp.asarray(segments), jnp.asarray(prefixes)


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
    compare(causal_attention, allowed)


@pytest.mark.parametrize(
    ("length", "prompts", "completions", "window"),
    [(400, 20, 40, None), (640, 100, 64, None), (640, 100, 30, 25), (300, 64, 10, None)],
)
def test_bounds_on_segments_change_nothing(length, prompts, completions, window):
    positions, segments, prefixes = group_rows(length, prompts, completions)
    allowed = causal_segments(positions, segments, prefixes)
    if window is not None:
        allowed &= within_window(positions, window)
    reach = Reach(max(prompts, completions), prompts)
    assert keys_read(length, reach) < keys_read(length)
    starts = block_prefixes(segments, prefixes)
    compare(functools.partial(causal_attention, reach=reach, prefixes=starts), allowed)


def test_bounds_that_do_not_hold_would_be_seen():
    positions, segments, prefixes = group_rows(640, 100, 150)
    allowed = causal_segments(positions, segments, prefixes)
    starts = block_prefixes(segments, prefixes)
    for reach in (Reach(16, 100), Reach(150, 16)):
        with pytest.raises(AssertionError):
            compare(functools.partial(causal_attention, reach=reach, prefixes=starts), allowed)


def compare(attention, allowed):
    """Value and gradients of `attention` against those of `masked_attention`."""
    length = allowed.shape[1]
    q, k, v, weight = (
        jax.random.normal(jax.random.key(seed), (2, length, heads, 8))
        for seed, heads in enumerate((4, 2, 2, 4))
    )

    def outcome(attention):
        def total(q, k, v):
            return jnp.sum(weight * attention(q, k, v, allowed, scale=0.7, softcap=5.0))

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))(q, k, v)

    (value, grads), (expected, expected_grads) = outcome(attention), outcome(masked_attention)
    np.testing.assert_allclose(value, expected, rtol=1e-4)
    for got, want in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * float(jnp.max(jnp.abs(want))))
