# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What each KL estimator descends, by exact enumeration over a vocabulary of five tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.kl import (
    KL_ESTIMATORS,
    adaptive_kl_coef,
    importance_weighted,
    k1,
    k3,
    reward_penalty,
)

_RNG = np.random.default_rng(0)
LOGITS, REF, MU = (jnp.asarray(x) for x in _RNG.normal(size=(3, 5)))
LOG_REF, LOG_MU = jax.nn.log_softmax(REF), jax.nn.log_softmax(MU)
PI = np.asarray(jax.nn.softmax(LOGITS))


def reverse_kl(logits):
    logp = jax.nn.log_softmax(logits)
    return jnp.sum(jnp.exp(logp) * (logp - LOG_REF))


def forward_kl(logits):
    return jnp.sum(jnp.exp(LOG_REF) * (LOG_REF - jax.nn.log_softmax(logits)))


def no_kl(logits):
    return 0.0 * jnp.sum(logits)


def expected_gradient(term, probabilities):
    """Σ_a q(a) ∇ term(log π(a)): what a loss over samples from q has as its mean gradient."""

    def loss(logits):
        return jnp.sum(jnp.asarray(probabilities) * term(jax.nn.log_softmax(logits)))

    return jax.grad(loss)(LOGITS)


@pytest.mark.parametrize(
    ("name", "descends"),
    [
        ("k1", no_kl),
        ("k2", reverse_kl),
        ("k3", forward_kl),
        ("k1+", reverse_kl),
        ("k3+", reverse_kl),
        ("abs+", reverse_kl),
    ],
)
def test_gradient_on_policy_and_off_policy(name, descends):
    estimator = KL_ESTIMATORS[name]
    expected = jax.grad(descends)(LOGITS)
    ours = expected_gradient(lambda logp: estimator(logp, LOG_REF), PI)
    np.testing.assert_allclose(ours, expected, atol=1e-12)

    def weighted(logp):
        return importance_weighted(estimator(logp, LOG_REF), logp, LOG_MU)

    ours = expected_gradient(weighted, jnp.exp(LOG_MU))
    np.testing.assert_allclose(ours, expected, atol=1e-12)
    unweighted = expected_gradient(lambda logp: estimator(logp, LOG_REF), jnp.exp(LOG_MU))
    assert np.abs(unweighted - expected).max() > 1e-3


def test_abs_descends_neither():
    ours = expected_gradient(lambda logp: KL_ESTIMATORS["abs"](logp, LOG_REF), PI)
    for other in (no_kl, reverse_kl, forward_kl):
        assert np.abs(ours - jax.grad(other)(LOGITS)).max() > 1e-3


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_through_the_weight_value_and_gradient_are_the_reverse_kl(name):
    estimator = KL_ESTIMATORS[name]

    def weighted(logp):
        return importance_weighted(estimator(logp, LOG_REF), logp, LOG_MU, detach=False)

    value = jnp.sum(jnp.exp(LOG_MU) * weighted(jax.nn.log_softmax(LOGITS)))
    np.testing.assert_allclose(value, reverse_kl(LOGITS), atol=1e-12)
    ours = expected_gradient(weighted, jnp.exp(LOG_MU))
    np.testing.assert_allclose(ours, jax.grad(reverse_kl)(LOGITS), atol=1e-12)


@pytest.mark.parametrize("name", ["k1", "k3", "k1+", "k3+"])
def test_expected_value_is_the_reverse_kl(name):
    values = KL_ESTIMATORS[name](jnp.log(jnp.asarray(PI)), LOG_REF)
    np.testing.assert_allclose(np.sum(PI * values), reverse_kl(LOGITS), atol=1e-12)


def test_k1_in_the_reward_descends_the_reverse_kl():
    logp = jax.nn.log_softmax(LOGITS)
    rewards = reward_penalty(jnp.zeros((1, 5)), k1(logp, LOG_REF)[None], 0.7)[0]
    ours = expected_gradient(lambda logp: -rewards * logp, PI)
    np.testing.assert_allclose(ours, 0.7 * jax.grad(reverse_kl)(LOGITS), atol=1e-12)


def test_k3_far_from_the_reference():
    far = jnp.asarray([-100.0, 0.0, 100.0])
    value, grad = k3(far, jnp.zeros(3)), jax.grad(lambda x: jnp.sum(k3(x, jnp.zeros(3))))(far)
    np.testing.assert_allclose(value, [np.exp(20) - 101, 0.0, 99.0 + np.exp(-20)])
    np.testing.assert_allclose(grad, [1 - np.exp(20), 0.0, 1 - np.exp(-20)])


def test_adaptive_coefficient():
    kwargs = {"target": 0.1, "horizon": 100.0, "samples": 50}
    np.testing.assert_allclose(adaptive_kl_coef(0.2, 0.11, **kwargs), 0.2 * (1 + 0.1 * 0.5))
    np.testing.assert_allclose(adaptive_kl_coef(0.2, 9.0, **kwargs), 0.2 * (1 + 0.2 * 0.5))
    np.testing.assert_allclose(adaptive_kl_coef(0.2, 0.0, **kwargs), 0.2 * (1 - 0.2 * 0.5))
