# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Log-ratios of a hundred overflow nowhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_batch import LOSSES, MASK, STORED, make, stored_batch

from jaxrl_llm.algorithms.corrections import CORRECTIONS, REJECTIONS, importance_weights
from jaxrl_llm.algorithms.kl import KL_ESTIMATORS, importance_weighted

ENTROPY = jnp.ones(MASK.shape)
FAR = np.where(np.arange(MASK.size).reshape(MASK.shape) % 3 == 0, -100.0, -0.5)


def finite(algorithm, logp, batch):
    counts = algorithm.counts(batch.mask, batch.segment_ids)
    stats = algorithm.batch_stats(logp, ENTROPY, batch)

    def loss(logp):
        return algorithm.loss(logp, ENTROPY, batch, counts, stats)

    (value, metrics), grad = jax.value_and_grad(loss, has_aux=True)(logp)
    assert np.isfinite(value) and np.isfinite(grad).all()
    assert all(np.isfinite(total) for total, _ in metrics.values())


@pytest.mark.parametrize("name", LOSSES)
def test_every_preset(name):
    near, far = jnp.full(MASK.shape, -0.5), jnp.asarray(FAR, jnp.float32)
    for logp, old in ((near, far), (far, near)):
        batch = stored_batch(
            jnp.asarray(STORED["advantages_used_in_losses"], jnp.float32),
            logp_old=old, logp_sampler=old, logp_ref=old,
        )  # fmt: skip
        finite(make(name, kl_coef=0.1), logp, batch)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_every_kl(name):
    near, far = jnp.full(MASK.shape, -0.5), jnp.asarray(FAR, jnp.float32)

    def terms(logp, other):
        kl = KL_ESTIMATORS[name](logp, other)
        weighted = [importance_weighted(kl, logp, other, detach=d) for d in (True, False)]
        return sum(jnp.sum(x) for x in (kl, *weighted))

    both = jax.jit(jax.value_and_grad(terms))
    for pair in ((near, far), (far, near)):
        value, grad = both(*pair)
        assert np.isfinite(value) and np.isfinite(grad).all()


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_every_correction(level):
    near, far = jnp.full(MASK.shape, -0.5), jnp.asarray(FAR, jnp.float32)
    for old, sampler in ((near, far), (far, near)):
        batch = stored_batch(jnp.ones(MASK.shape), logp_old=old, logp_sampler=sampler)
        for correction in CORRECTIONS:
            finite(make("grpo", correction=correction, correction_level=level), near, batch)
        weights = importance_weights(old, sampler, batch.mask, level=level)
        assert np.asarray(weights).max() <= np.exp(20.0) * 1.0001
        assert not np.asarray(weights)[~MASK].any()
    if level == "token":
        for rejection in REJECTIONS:
            finite(make("grpo", rejection=rejection), near, batch)
