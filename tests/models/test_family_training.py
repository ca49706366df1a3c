# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Every family can be trained: in full, and by an adapter."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_models import CASES, family_model, golden

from jaxrl_llm.models.heads import sequence_logprobs
from jaxrl_llm.models.lora import TARGETS, LoraConfig, attach, init_adapter, merge

MARKED = [n if n == "gemma3" else pytest.param(n, marks=pytest.mark.full) for n in CASES]


def mean_logp(params, config, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape)
    mask = positions > 0
    logp, _ = sequence_logprobs(
        params,
        config,
        tokens,
        positions,
        jnp.ones_like(tokens),
        mask,
        num_targets=tokens.shape[1] - 1,
        remat=True,
    )
    return jnp.sum(logp) / jnp.sum(mask).astype(logp.dtype)


def rises_as_the_gradient_says(loss, start):
    """A short step along the gradient changes the value by what the gradient predicts.

    So short that no token changes its experts: there the value jumps.
    """
    grads = jax.jit(jax.grad(loss))(start)
    squares = sum(float(jnp.sum(jnp.square(g))) for g in jax.tree.leaves(grads))
    length = 0.001 / squares  # predicts a rise of 0.001 nats
    moved = lambda sign: jax.tree.map(lambda p, g: p + sign * length * g, start, grads)  # noqa: E731
    slope = (float(loss(moved(0.5))) - float(loss(moved(-0.5)))) / 0.001
    assert slope == pytest.approx(1.0, abs=0.03), slope


def tokens_of(name):
    return jnp.asarray(golden(name)["tokens"], jnp.int32)


@pytest.mark.parametrize("name", MARKED)
def test_all_parameters_train(name):
    config, params = family_model(name)
    loss = jax.jit(functools.partial(mean_logp, config=config, tokens=tokens_of(name)))
    rises_as_the_gradient_says(loss, params)


@pytest.mark.parametrize("name", MARKED)
def test_an_adapter_trains_and_merges(name):
    config, params = family_model(name)
    targets = TARGETS[:4] if config.num_experts else TARGETS
    lora = LoraConfig(rank=2, alpha=4.0, targets=targets)
    adapter = init_adapter(config, lora, jax.random.key(0))
    draw = np.random.default_rng(0)
    adapter = jax.tree.map(
        lambda x: x + jnp.asarray(0.1 * draw.standard_normal(x.shape), x.dtype), adapter
    )
    whole = functools.partial(mean_logp, config=config, tokens=tokens_of(name))
    loss = jax.jit(lambda adapter: whole(attach(params, adapter, lora)))
    rises_as_the_gradient_says(loss, adapter)
    assert float(loss(adapter)) == pytest.approx(
        float(whole(merge(params, adapter, lora))), abs=1e-5
    )
