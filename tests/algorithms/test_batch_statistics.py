# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""First-pass statistics: quantiles, covariances, draws, schedules."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.covariance import (
    chosen_count,
    largest_cutoff,
    smallest_cutoff,
    token_scores,
)
from jaxrl_llm.algorithms.entropy import masked_quantile, scheduled_temperature

RNG = np.random.default_rng(2)


@pytest.mark.parametrize("fraction", [0.0, 0.2, 0.37, 0.8, 1.0])
def test_quantile(fraction):
    values, mask = RNG.normal(size=(5, 7)), RNG.uniform(size=(5, 7)) < 0.6
    dirty = jnp.asarray(np.where(mask, values, np.nan), jnp.float32)
    ours = masked_quantile(dirty, jnp.asarray(mask), fraction)
    np.testing.assert_allclose(ours, np.quantile(values[mask], fraction), rtol=1e-6)
    assert float(masked_quantile(dirty, jnp.zeros((5, 7), bool), fraction)) == 0.0


def test_cutoffs_choose_as_many_as_asked():
    values = jnp.asarray(RNG.normal(size=(5, 7)), jnp.float32)
    mask = jnp.asarray(RNG.uniform(size=(5, 7)) < 0.6)
    count = chosen_count(mask, 0.25)
    assert int(count) == int(0.25 * int(mask.sum()))
    top = mask & (values >= largest_cutoff(values, mask, count))
    assert int(top.sum()) == int(count)
    assert float(jnp.where(top, values, 9.0).min()) >= float(
        jnp.where(mask & ~top, values, -9.0).max()
    )
    scores = token_scores(jnp.arange(35).reshape(5, 7), jnp.zeros((5, 7), int), values)
    drawn = mask & (scores <= smallest_cutoff(scores, mask, count))
    assert int(drawn.sum()) == int(count)
    assert int(chosen_count(mask, 1e-6)) == 1
    few = mask & (scores <= smallest_cutoff(scores, mask, jnp.asarray(999)))
    assert int(few.sum()) == int(mask.sum())


def test_scores_are_uniform_and_depend_on_every_part():
    tokens, positions = RNG.integers(0, 50_000, (64, 64)), np.tile(np.arange(64), (64, 1))
    logp = RNG.normal(-2, 1, (64, 64))

    def scores(tokens=tokens, positions=positions, logp=logp):
        parts = jnp.asarray(tokens), jnp.asarray(positions), jnp.asarray(logp, jnp.float32)
        return np.asarray(token_scores(*parts)).astype(float) / 2**32

    plain = scores()
    counts, _ = np.histogram(plain, bins=16, range=(0, 1))
    expected = plain.size / 16
    # χ² of 15 degrees of freedom: above 44 once in ten thousand draws.
    assert ((counts - expected) ** 2 / expected).sum() < 44
    assert abs(np.corrcoef(plain.ravel(), logp.ravel())[0, 1]) < 0.06
    for changed in (scores(tokens + 1), scores(positions=positions + 1), scores(logp=logp + 1e-3)):
        assert (changed != plain).mean() > 0.999
        assert abs(np.corrcoef(plain.ravel(), changed.ravel())[0, 1]) < 0.06


def test_temperature_schedule():
    linear = [scheduled_temperature(s, start=1.0, end=0.5, steps=4) for s in (0, 1, 4, 9)]
    assert linear == [1.0, 0.875, 0.5, 0.5]
    bend = {"start": 1.0, "end": 0.5, "steps": 4, "shape": "cosine"}
    assert scheduled_temperature(2, **bend) == pytest.approx(0.75)
    assert scheduled_temperature(1, **bend) > 0.875
