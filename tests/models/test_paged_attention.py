# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over pages against the equation in NumPy, float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.paged_attention import paged_attention, view_attention

TRAITS = [
    {},
    {"window": 7},
    {"window": 64, "softcap": 2.0},
    {"scale": 0.1},
    {"window": 1},
    {"softcap": 0.5, "scale": 1.0},
]
ROWS, SPAN, QUERIES, H, K, HD = 3, 192, 5, 4, 2, 8


def reference(q, keys, values, positions, window=None, softcap=None, scale=None):
    """softmax(scores) · values over the positions that each query may see, one query at a time."""
    out = np.zeros(q.shape)
    for row, query, head in np.ndindex(q.shape[:3]):
        end = positions[row, query] + 1
        first = max(0, end - window) if window is not None else 0
        k, v = (x[row, first:end, head // (H // K)].astype(np.float64) for x in (keys, values))
        scores = k @ q[row, query, head] * (HD**-0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max())
        out[row, query, head] = weights @ v / weights.sum()
    return out


@pytest.mark.parametrize("traits", TRAITS, ids=str)
@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_paged_attention_equals_the_equation(page_size, traits):
    """Shuffled pages, garbage beyond each query's position."""
    rng = np.random.default_rng(page_size)
    per_row = SPAN // page_size
    tables = rng.permutation(np.arange(1, 1 + ROWS * per_row)).reshape(ROWS, per_row)
    shape = (ROWS, SPAN, K, HD)
    keys, values = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
    starts = np.array([0, 61, SPAN - QUERIES])
    positions = starts[:, None] + np.arange(QUERIES)
    pages = []
    for dense in (keys, values):
        pool = np.full((1 + ROWS * per_row, page_size, K, HD), 1e3, np.float32)
        pool[tables] = dense.reshape(ROWS, per_row, page_size, K, HD)
        pages.append(jnp.array(pool))
    q = rng.normal(size=(ROWS, QUERIES, H, HD)).astype(np.float32)
    got = paged_attention(
        jnp.array(q),
        *pages,
        jnp.array(tables, jnp.int32),
        jnp.array(positions, jnp.int32),
        **traits,
    )
    expected = reference(q, keys, values, positions, **traits)
    np.testing.assert_allclose(got, expected, atol=3e-6)
    plain = reference(q, keys, values, positions)
    assert not traits or np.abs(expected - plain).max() > 1e-2  # every trait matters


@pytest.mark.parametrize("traits", TRAITS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_view_attention_equals_the_equation(dtype, traits):
    """One query a row, at the first, a middle and the last place; garbage beyond it."""
    rng = np.random.default_rng(5)
    positions = np.array([0, 130, SPAN - 1])
    rounded = lambda x: np.array(jnp.asarray(x, dtype).astype(jnp.float32))  # noqa: E731 - short
    keys, values = (rounded(rng.normal(size=(ROWS, SPAN, K, HD))) for _ in range(2))
    q = rounded(rng.normal(size=(ROWS, 1, H, HD)))
    expected = reference(q, keys, values, positions[:, None], **traits)[:, 0]
    plain = reference(q, keys, values, positions[:, None])[:, 0]
    assert not traits or np.abs(expected - plain).max() > 1e-2  # every trait matters
    for row, position in enumerate(positions):
        keys[row, position + 1 :], values[row, position + 1 :] = 1e3, -1e3
    got = view_attention(
        jnp.asarray(q[:, 0], dtype),
        jnp.asarray(keys.transpose(0, 2, 3, 1), dtype),
        jnp.asarray(values.transpose(0, 2, 1, 3), dtype),
        jnp.array(positions, jnp.int32),
        **traits,
    )
    assert got.dtype == jnp.dtype(dtype)
    # in bfloat16 weights and result are rounded, each to 2⁻⁹ of a value; none is beyond 4
    atol = 3e-6 if dtype == "float32" else 4 * 2.0**-8
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, atol=atol)
