# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Which frequencies a model has whose frequencies depend on the length of the context."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.errors import ModelError
from jaxrl_llm.models.config import ModelConfig, RopeScaling
from jaxrl_llm.models.rotary import inverse_frequencies, rotary_tables

PLAIN = ModelConfig(
    vocab_size=8,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=64,
)


def scaled(**scaling):
    return dataclasses.replace(PLAIN, rope_scaling=RopeScaling(**scaling))


LONG = scaled(
    kind="longrope",
    original_context=16,
    short_factor=(1.0, 1.0, 2.0, 2.0),
    long_factor=(4.0, 4.0, 8.0, 8.0),
)


@pytest.mark.parametrize(
    ("context", "length", "factors"),
    [
        (None, 1, "short_factor"),
        (None, 16, "short_factor"),
        (16, 64, "short_factor"),
        (17, 1, "long_factor"),
        (64, 64, "long_factor"),
    ],
)
def test_longrope_by_context_or_by_length(context, length, factors):
    config = dataclasses.replace(LONG, context=context)
    expected = 1e4 ** -(np.arange(4) / 4) / np.asarray(getattr(LONG.rope_scaling, factors))
    found, factor = inverse_frequencies(config, length=length)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(factor, np.sqrt(1 + np.log(64 / 16) / np.log(16)), rtol=1e-6)


def test_longrope_of_an_unknown_length_is_refused():
    for length in (17, None):
        with pytest.raises(ModelError, match=r"longrope.*at most 16 tokens"):
            inverse_frequencies(LONG, length=length)
    with pytest.raises(ModelError, match="longrope"):
        rotary_tables(
            jnp.arange(3)[:, None], LONG, jnp.dtype("float32")
        )  # as a sampler's, one position to a row


def test_equal_factors_need_no_length():
    factors = (1.0, 1.0, 2.0, 2.0)
    scaling = dataclasses.replace(LONG.rope_scaling, long_factor=factors)
    inverse_frequencies(dataclasses.replace(LONG, rope_scaling=scaling))


def test_dynamic_beyond_the_trained_context_needs_the_context():
    config = scaled(kind="dynamic", factor=2.0)
    plain = inverse_frequencies(PLAIN)[0]
    for length in (None, 1, 64):
        np.testing.assert_allclose(inverse_frequencies(config, length=length)[0], plain, rtol=1e-6)
    with pytest.raises(ModelError, match=r"dynamic.*at most 64 tokens"):
        inverse_frequencies(config, length=65)
    told = dataclasses.replace(config, context=65)
    assert inverse_frequencies(told, length=65)[0][-1] < plain[-1]
