# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.heads import token_logprobs

M, D, V = 6, 8, 45


def problem(dtype=jnp.float32):
    draw = np.random.default_rng(1)
    hidden = jnp.asarray(draw.standard_normal((M, D)), dtype)
    head = jnp.asarray(2 * draw.standard_normal((V, D)), dtype)
    return hidden, head, jnp.asarray(draw.integers(0, V, M), jnp.int32)


def plain(hidden, head, targets, temperature):
    """The definition, with all logits at once."""
    logp = jax.nn.log_softmax(jnp.einsum("md,vd->mv", hidden, head) / temperature, axis=-1)
    chosen = jnp.take_along_axis(logp, targets[:, None], axis=1)[:, 0]
    return chosen, -jnp.sum(jnp.exp(logp) * logp, axis=-1)


def weighted(function, hidden, head, targets):
    """A scalar that depends differently on every output."""
    logp, entropy = function(hidden, head, targets)
    weights = jnp.arange(1, M + 1, dtype=logp.dtype)
    return jnp.sum(weights * logp - 0.7 * weights[::-1] * entropy)


# (temperature, chunk): with a remainder, without one, more than all.
CASES = [(1.0, 7), (0.6, 15), (1.0, 1000)]


def with_gradients(function):
    def both(hidden, head, targets):
        gradients = jax.grad(weighted, argnums=(1, 2))(function, hidden, head, targets)
        return *function(hidden, head, targets), *gradients

    return jax.jit(both)


def compare(cases, dtype, tolerance):
    inputs = problem(dtype)
    for temperature, chunk in cases:
        ours = with_gradients(
            functools.partial(token_logprobs, temperature=temperature, chunk=chunk)
        )
        definition = with_gradients(functools.partial(plain, temperature=temperature))
        for a, b in zip(ours(*inputs), definition(*inputs), strict=True):
            assert a.dtype == dtype
            scale = max(1.0, float(jnp.max(jnp.abs(b))))
            assert float(jnp.max(jnp.abs(a - b))) <= tolerance * scale


def test_values_and_gradients_equal_a_plain_log_softmax():
    compare(CASES, jnp.float32, 1e-5)


def test_values_and_gradients_in_float64():
    environment = {**os.environ, "JAX_ENABLE_X64": "1"}
    here = pathlib.Path(__file__)
    done = subprocess.run(
        [sys.executable, str(here)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "compared in float64"


def test_extreme_logits_stay_finite():
    hidden = jnp.asarray([[3e4], [-3e4]], jnp.float32)
    head = jnp.asarray([[1.0], [0.0], [-1.0], [0.5], [0.25]], jnp.float32)
    logp, entropy = token_logprobs(hidden, head, jnp.asarray([0, 0]), chunk=2)
    np.testing.assert_allclose(logp, [0.0, -6e4])
    np.testing.assert_allclose(entropy, [0.0, 0.0], atol=1e-6)


def test_half_precision_inputs_give_float32_outputs():
    hidden, head, targets = problem()
    half = (hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16))
    logp, entropy = token_logprobs(*half, targets, chunk=16)
    assert logp.dtype == entropy.dtype == jnp.float32
    wide = plain(*(x.astype(jnp.float32) for x in half), targets, 1.0)
    np.testing.assert_allclose(logp, wide[0], atol=1e-5)
    np.testing.assert_allclose(entropy, wide[1], atol=1e-5)


def test_entropy_of_even_odds():
    hidden, head = jnp.zeros((2, D), jnp.float32), jnp.ones((V, D), jnp.float32)
    logp, entropy = token_logprobs(hidden, head, jnp.asarray([0, V - 1]), chunk=7)
    np.testing.assert_allclose(logp, -np.log(V), rtol=1e-6)
    np.testing.assert_allclose(entropy, np.log(V), rtol=1e-6)


if __name__ == "__main__":
    assert jnp.zeros(1).dtype == jnp.float64
    compare([(0.6, 7)], jnp.float64, 1e-12)
    print("compared in float64")
