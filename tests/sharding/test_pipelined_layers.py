# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The schedule of the pipeline, on stages that are arithmetic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.sharding.pipeline import bubble, run_pipeline, stage_layers, ticks, unstage_layers


def scan_lengths(jaxpr):
    """The lengths of all scans of a program, nested ones included."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            found.append(eqn.params["length"])
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found += scan_lengths(inner)
    return found


def affine(weights, flags, x, rows):
    """One run of layers ``x → a·x + b·row``: their order matters; counts the rows it sees."""

    def layer(x, scanned):
        (a, b), there = scanned
        out = jnp.where(there, a * x + b * rows[:, None, None], x)
        return out, jnp.sum(rows)

    return jax.lax.scan(layer, x, (weights, flags))


@pytest.mark.parametrize(
    ("layers", "stages", "rounds", "micro", "rows"),
    [(4, 2, 1, 1, 4), (4, 4, 1, 2, 4), (5, 2, 2, 2, 6), (9, 4, 2, 5, 10), (7, 3, 1, 4, 6)],
)
def test_every_row_passes_every_layer_in_order(layers, stages, rounds, micro, rows):
    rng = np.random.default_rng(0)
    a, b = rng.normal(1, 0.3, layers), rng.normal(0, 1, layers)
    x, row = rng.normal(size=(rows, 3, 2)).astype(np.float32), np.arange(1.0, rows + 1)
    expected = x.astype(np.float64)
    for scale, shift in zip(a, b, strict=True):
        expected = scale * expected + shift * row[:, None, None]

    staged = [stage_layers(w.astype(np.float32), stages, rounds) for w in (a, b)]
    there = stage_layers(np.ones(layers, bool), stages, rounds)

    def run(x):
        return run_pipeline(
            affine, tuple(staged), there, x, jnp.asarray(row, jnp.float32), microbatches=micro
        )

    out, seen = run(jnp.asarray(x))
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)
    # Each layer saw each row once; nothing idle was counted.
    np.testing.assert_allclose(seen[:layers], np.full(layers, row.sum()), rtol=1e-6)
    # Every scan over layers runs inside the one over ticks, of the length that the formula says.
    lengths = scan_lengths(jax.make_jaxpr(run)(x).jaxpr)
    assert lengths == [micro * rounds + stages - 1, staged[0].shape[2]]
    assert lengths[0] == ticks(micro, stages, rounds)


def test_stages_hold_the_layers_of_every_round():
    staged = stage_layers(np.arange(1, 8), 2, 2)
    assert staged.tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 0]]]
    assert unstage_layers(staged, 7).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert unstage_layers(stage_layers(jnp.arange(8), 4, 2), 8).tolist() == list(range(8))


@pytest.mark.parametrize(
    ("micro", "rounds", "part"),
    [(4, 1, 3 / 7), (8, 1, 3 / 11), (16, 1, 3 / 19), (4, 2, 3 / 11), (16, 2, 3 / 35)],
)
def test_the_bubble_of_four_stages(micro, rounds, part):
    assert bubble(micro, 4, rounds) == pytest.approx(part, rel=1e-12)
