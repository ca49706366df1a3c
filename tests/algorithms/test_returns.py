# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Advantages per token, against loops written out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.returns import (
    decoupled_reward_advantages,
    discounted_returns,
    gae_advantages,
    task_normalized,
    terminal_rewards,
    token_baseline_advantages,
    tool_token_baseline_advantages,
    whitened,
)

RNG = np.random.default_rng(4)


def close(ours, expected):
    np.testing.assert_allclose(ours, expected, atol=2e-5)


def f32(x):
    return jnp.asarray(x, jnp.float32)


def compiled(function, **settings):
    return jax.jit(functools.partial(function, **settings))


def test_the_reward_sits_on_the_last_chosen_token():
    """Stopped by an end token, cut at the limit, an observation at the end, nothing chosen."""
    mask = jnp.asarray([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]], bool)
    ours = compiled(terminal_rewards)(f32([3.0, 5.0, 7.0, 9.0]), mask)
    assert ours.tolist() == [[0, 0, 3, 0], [0, 0, 0, 5], [0, 0, 7, 0], [0, 0, 0, 0]]


def test_returns_do_not_decay_over_observations():
    rewards, mask = f32([[1.0, 50.0, 2.0, 4.0]]), jnp.asarray([[1, 0, 1, 1]], bool)
    ours = compiled(discounted_returns, gamma=0.5)(rewards, mask)
    close(ours, [[1.0 + 0.5 * (2.0 + 0.5 * 4.0), 0.0, 4.0, 4.0]])


def test_an_observation_carries_value_and_advantage_across():
    rewards, values = RNG.normal(size=(2, 3, 5))
    mask = np.ones((3, 5), bool)
    gae = compiled(gae_advantages, gamma=0.9, lam=0.7, whiten=False)
    dense = gae(f32(rewards), f32(values), jnp.asarray(mask))
    where = [0, 2, 3, 6, 7]
    wide = np.zeros((3, 9), bool)
    wide[:, where] = True
    garbage = np.full((2, 3, 9), np.nan)
    garbage[:, :, where] = rewards, values
    gappy = gae(*f32(garbage), jnp.asarray(wide))
    for ours, expected in zip(gappy, dense, strict=True):
        close(np.asarray(ours)[:, where], expected)
        assert not np.asarray(ours)[~wide].any()


def test_whitening():
    values, mask = RNG.normal(2.0, 3.0, (4, 6)), RNG.uniform(size=(4, 6)) < 0.6
    ours = np.asarray(compiled(whitened)(f32(values), jnp.asarray(mask)))
    chosen = values[mask]
    close(ours[mask], (chosen - chosen.mean()) / chosen.std(ddof=1))
    assert not ours[~mask].any()
    assert not np.asarray(compiled(whitened)(jnp.full((4, 6), 0.1), jnp.asarray(mask))).any()


def test_task_normalisation_runs_over_the_tokens_of_a_task():
    advantages, mask = RNG.normal(size=(5, 4)), RNG.uniform(size=(5, 4)) < 0.7
    tasks = np.array([7, 3, 7, 3, 9])
    advantages[4] = 0.1
    ours = np.asarray(
        compiled(task_normalized)(f32(advantages), jnp.asarray(mask), jnp.asarray(tasks))
    )
    for task in (7, 3):
        rows = tasks == task
        chosen = advantages[rows][mask[rows]]
        close(ours[rows][mask[rows]], (chosen - chosen.mean()) / chosen.std())
    assert not ours[4].any() and not ours[~mask].any()


def baseline_by_loops(returns, energy, alive, zero_tail):
    """One group: rows × steps."""
    baseline = np.zeros_like(returns)
    lengths = alive.sum(1)
    for step in range(returns.shape[1]):
        weight = np.where(alive[:, step], energy[:, step], 0.0)
        baseline[:, step] = (weight * returns[:, step]).sum() / (weight.sum() + 1e-8)
    order = np.argsort(lengths)
    longest, second = order[-1], lengths[order[-2]]
    if zero_tail and lengths[longest] > second:
        baseline[longest, second:] = 0.0
    return baseline


@pytest.mark.parametrize("zero_tail", [True, False])
@pytest.mark.parametrize("weighted", [False, True])
def test_token_baseline(zero_tail, weighted):
    lengths = np.array([[4, 6, 2], [3, 3, 5]])
    mask = np.arange(6)[None] < lengths.reshape(-1, 1)
    rewards = RNG.normal(size=mask.shape) * mask
    logp, squares = -RNG.uniform(0.1, 2, mask.shape), RNG.uniform(0, 1, mask.shape)
    weights = RNG.uniform(0.5, 2, mask.shape) if weighted else np.ones(mask.shape)
    returns = rewards[:, ::-1].cumsum(1)[:, ::-1]
    energy = np.cumsum((1 - 2 * np.exp(logp) + squares) * weights**2 * mask, axis=1)
    expected = np.concatenate([
        (returns - 0)[g] - baseline_by_loops(returns[g], energy[g], mask[g], zero_tail)
        for g in (slice(0, 3), slice(3, 6))
    ]) * mask  # fmt: skip
    dirty = [f32(np.where(mask, x, np.nan)) for x in (rewards, logp, squares)]
    given = f32(weights) if weighted else None
    valid = jnp.ones((2, 3), bool)
    arrays = (*dirty, jnp.asarray(mask), valid, given)
    plain = compiled(token_baseline_advantages, zero_tail=zero_tail)
    tools = compiled(tool_token_baseline_advantages, zero_tail=zero_tail)
    close(plain(*arrays), expected)
    close(tools(*arrays), expected)

    # With observations in between, the tool form counts chosen tokens.
    where = np.array([0, 1, 3, 6, 7, 9])
    spread = [np.full((6, 11), np.nan) for _ in dirty]
    for wide, narrow in zip(spread, dirty, strict=True):
        wide[:, where] = narrow
    wide_mask = np.zeros((6, 11), bool)
    wide_mask[:, where] = mask
    wide_weights = np.zeros((6, 11))
    wide_weights[:, where] = weights
    ours = tools(
        *(f32(x) for x in spread),
        jnp.asarray(wide_mask),
        valid,
        f32(wide_weights) if weighted else None,
    )
    close(np.asarray(ours)[:, where], expected)


def test_a_token_baseline_of_one_judged_row_is_nothing():
    mask = jnp.ones((2, 3), bool)
    valid = jnp.asarray([[True, False]])
    ours = compiled(token_baseline_advantages)(
        jnp.ones((2, 3)), -jnp.ones((2, 3)), jnp.ones((2, 3)), mask, valid
    )
    assert not np.asarray(ours).any()


@pytest.mark.parametrize("batch_normalize", ["sequences", "tokens", "none"])
def test_decoupled_rewards(batch_normalize):
    parts = RNG.normal(size=(3, 4, 2)) * [1.0, 100.0]
    mask = np.arange(5)[None] < RNG.integers(1, 6, 12)[:, None]
    weights = np.array([2.0, 0.5])
    total = (
        (parts - parts.mean(1, keepdims=True)) / parts.std(1, ddof=1, keepdims=True) * weights
    ).sum(2)
    if batch_normalize == "sequences":
        total = (total - total.mean()) / total.std(ddof=1)
    expected = np.where(mask, total.reshape(-1, 1), 0.0)
    if batch_normalize == "tokens":
        chosen = expected[mask]
        expected = np.where(mask, (expected - chosen.mean()) / chosen.std(ddof=1), 0.0)
    gdpo = compiled(decoupled_reward_advantages, batch_normalize=batch_normalize)
    ours = gdpo(f32(parts), jnp.ones((3, 4), bool), jnp.asarray(mask), f32(weights))
    close(ours, expected)
