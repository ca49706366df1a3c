# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The stored batch: ours against verl's advantages, losses, gradients, KL and corrections."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_batch import MASK, REWARDS, STORED, VERL, loss_and_gradient, make, stored_batch

from jaxrl_llm.algorithms.corrections import (
    icepop_weights,
    importance_weights,
    rejection_mask,
    truncated_weights,
)
from jaxrl_llm.algorithms.kl import KL_ESTIMATORS
from jaxrl_llm.algorithms.reductions import reduce_terms
from jaxrl_llm.algorithms.returns import generalized_advantages

MASKS = jnp.asarray(MASK)


def close(ours, theirs):
    ours = np.asarray(ours)
    assert ours.dtype == np.float64
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


def masked(values):
    return np.where(MASK, values, 0.0)


@pytest.mark.parametrize(
    ("name", "settings", "golden"),
    [
        ("grpo", {}, "adv/grpo"),
        ("dr_grpo", {}, "adv/dr_grpo(norm=False)"),
        ("rloo", {}, "adv/rloo"),
        ("reinforce_pp_baseline", {}, "adv/reinforce_plus_plus_baseline"),
        ("reinforce_pp", {}, "adv/reinforce_plus_plus(g=1)"),
        ("remax", {}, "adv/remax(baseline=.25)"),
        ("opo", {}, "adv/opo"),
        ("ppo", {}, "adv/gae(g=1.0,l=1.0)"),
        ("ppo", {"gamma": 0.99, "lam": 0.95, "whiten": False}, "adv/gae(g=.99,l=.95) unwhitened"),
    ],
)
def test_advantages(name, settings, golden):
    ours = make(name, **settings).advantages(
        REWARDS, MASK, values=STORED["values"], greedy_rewards=np.full(2, 0.25)
    )
    close(ours, masked(VERL[golden]))


def test_returns_of_gae():
    estimate = make("ppo").estimate(REWARDS, MASK, values=STORED["values"])
    close(estimate.returns, masked(VERL["ret/gae(g=1.0,l=1.0)"]))


@pytest.mark.parametrize(
    ("golden", "name", "settings"),
    [
        ("vanilla", "dapo", {"dual_clip": 3.0}),
        ("gspo", "gspo", {"clip_low": 0.2, "clip_high": 0.28}),
        ("gspo", "gspo_token", {"clip_low": 0.2, "clip_high": 0.28}),
        ("cispo", "cispo", {"clip_low": 0.2, "clip_high": 0.28}),
        (
            "dppo_tv",
            "dppo",
            {"divergence_low": 0.1, "divergence_high": 0.1, "ratio_base": "old"},
        ),
    ],
)
def test_losses_and_gradients(golden, name, settings):
    batch = stored_batch(STORED["advantages_used_in_losses"])
    logp = STORED["log_prob"]
    value, (grad, _), _ = loss_and_gradient(make(name, **settings), logp, logp * 0.0, batch)
    close(value, VERL[f"loss/{golden}"])
    close(grad, VERL[f"grad/{golden}"])


@pytest.mark.parametrize(
    ("golden", "reduction", "constant", "scale"),
    [
        ("token-mean", "token_mean", None, 1.0),
        ("seq-mean-token-sum", "sequence_sum", None, 1.0),
        ("seq-mean-token-mean", "sequence_mean", None, 1.0),
        ("seq-mean-token-sum-norm", "constant", 5.0, 1.0),
        # Summed over all tokens: the constant reduction counts six sequences.
        ("token-sum", "constant", 1.0, 6.0),
    ],
)
def test_reductions(golden, reduction, constant, scale):
    logp = jnp.asarray(STORED["log_prob"])
    total, count = reduce_terms(logp, MASKS, reduction=reduction, constant=constant)
    close(scale * total / count, VERL[f"agg/{golden}"])


@pytest.mark.parametrize("name", ["k1", "abs", "k2", "k3", "k1+", "k3+"])
def test_kl_values_and_gradients(name):
    estimator = KL_ESTIMATORS[name]
    logp, ref = jnp.asarray(STORED["log_prob"]), jnp.asarray(STORED["ref_log_prob"])
    close(estimator(logp, ref), VERL[f"kl/{name}"])
    grad = jax.grad(lambda x: jnp.sum(jnp.where(MASKS, estimator(x, ref), 0.0)))(logp)
    close(grad, VERL[f"klgrad/{name}"])


def test_value_loss():
    returns = VERL["ret/gae(g=1.0,l=1.0)"]
    algorithm = make("ppo", value_clip=0.2)
    arrays = (jnp.asarray(x) for x in (STORED["vpreds"], STORED["values"], returns))
    value, _ = algorithm.value_loss(*arrays, MASKS, algorithm.counts(MASK))
    close(value, VERL["value_loss(clip=.2)"])


def test_importance_weights():
    old, sampler = (jnp.asarray(STORED[k]) for k in ("old_log_prob", "rollout_log_prob"))
    weights = importance_weights(old, sampler, MASKS)
    close(truncated_weights(weights, correction_high=2.0), VERL["rollout_is/token/2.0"])
    icepop = icepop_weights(weights, correction_low=0.5, correction_high=2.0)
    close(icepop, VERL["rollout_is/token/0.5_2.0"])


@pytest.mark.parametrize(
    ("golden", "rejection", "low", "high"),
    [
        ("token_k1/0.5_2.0", "token_k1", 0.5, 2.0),
        ("seq_mean_k1/0.8_1.25", "sequence_mean_k1", 0.8, 1.25),
    ],
)
def test_rejection(golden, rejection, low, high):
    old, sampler = (jnp.asarray(STORED[k]) for k in ("old_log_prob", "rollout_log_prob"))
    kept = rejection_mask(
        old, sampler, MASKS, rejection=rejection, rejection_low=low, rejection_high=high
    )
    np.testing.assert_array_equal(np.asarray(kept), VERL[f"rollout_rs/{golden}"] > 0)


def test_rejection_bounds_are_on_sampler_over_trainer():
    # The stored bounds are reciprocal and cannot tell; these are not. exp(0.9) = 2.46.
    mask = jnp.ones((1, 2), bool)
    old, sampler = jnp.asarray([[-1.0, -1.9]]), jnp.asarray([[-1.9, -1.0]])
    kept = rejection_mask(old, sampler, mask, rejection_low=0.9, rejection_high=3.0)
    assert kept.tolist() == [[False, True]]


def test_unwhitened_gae_is_the_textbook_sum():
    # Two chosen tokens around an observation, γ = 0.9, λ = 0.8, by hand.
    rewards, values = jnp.asarray([[0.0, 7.0, 1.0]]), jnp.asarray([[0.5, 9.0, 0.25]])
    mask = jnp.asarray([[True, False, True]])
    advantages, returns = generalized_advantages(rewards, values, mask, gamma=0.9, lam=0.8)
    last = 1.0 - 0.25
    first = (0.0 + 0.9 * 0.25 - 0.5) + 0.9 * 0.8 * last
    np.testing.assert_allclose(advantages, [[first, 0.0, last]], atol=1e-12)
    np.testing.assert_allclose(returns, [[first + 0.5, 0.0, 1.0]], atol=1e-12)
