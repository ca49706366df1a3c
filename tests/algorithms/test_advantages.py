# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Advantages of whole answers, by hand and by brute force."""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from policy_batch import ALL, make, rollout_arrays

from jaxrl_llm.algorithms.advantages import (
    SEQUENCE_ADVANTAGES,
    best_of_group_advantages,
    drop_unjudged,
    gpg_advantages,
    group_advantages,
    informative_groups,
    leave_one_out_advantages,
    length_weighted_advantages,
    maximum_likelihood_advantages,
    pass_at_k_advantages,
    reward_arrays,
)
from jaxrl_llm.algorithms.presets import PRESETS
from jaxrl_llm.algorithms.returns import (
    decoupled_reward_advantages,
    task_normalized,
    whitened,
)
from jaxrl_llm.errors import RewardError


def table(*rows):
    return jnp.asarray(rows, jnp.float32)


def close(ours, expected, **tolerance):
    np.testing.assert_allclose(ours, expected, **{"atol": 1e-6, **tolerance})


def test_group_standard_deviation():
    rewards = table([1.0, 2.0, 6.0])
    close(group_advantages(rewards, eps=0.0), (rewards - 3.0) / math.sqrt(7.0))
    close(group_advantages(rewards, ddof=0, eps=0.5), (rewards - 3.0) / (math.sqrt(14 / 3) + 0.5))


@pytest.mark.parametrize(
    "name", [name for name in SEQUENCE_ADVANTAGES if name != "greedy_baseline"]
)
def test_nothing_to_compare_gives_exactly_zero(name):
    """Equal rewards whose mean is not equal to them in floats, groups of one, and of none."""
    rewards = jnp.full((3, 7), 0.1)
    valid = jnp.asarray([[True] * 7, [True] + [False] * 6, [False] * 7])
    mixed = rewards.at[1, 3].set(5.0).at[2].set(jnp.arange(7.0))
    function, inputs = SEQUENCE_ADVANTAGES[name]
    arrays = {"rewards": mixed, "valid": valid, "lengths": jnp.ones((3, 7))}
    assert not np.asarray(function(*(arrays[i] for i in inputs))).any()


def test_equal_rewards_would_not_cancel_by_themselves():
    rewards = np.full(7, 0.1, np.float32)
    assert np.float32(rewards.sum(dtype=np.float32)) / np.float32(7) != rewards[0]


@pytest.mark.parametrize(
    "name", [*{PRESETS[name].advantage: name for name in ALL}.values(), "agentrl"]
)
def test_a_reward_of_none_is_the_row_left_out(name):
    """Every advantage, whatever its statistics run over."""
    rng = np.random.default_rng(0)
    rewards = rng.choice([0.0, 0.5, 1.0], size=(3, 4))
    rewards[:, 0], rewards[:, 1] = 1.0, 0.0
    mask = np.arange(6)[None] < rng.integers(1, 7, 12)[:, None]
    arrays = rollout_arrays(rewards, mask, rng)
    valid = np.ones((3, 4), bool)
    valid[:, 2] = False
    poisoned = np.where(valid, rewards, 77.0)
    algorithm = make(name)
    ours = np.asarray(algorithm.advantages(poisoned, mask, valid=valid, **arrays))

    def left_out(x):
        by_group = x.reshape(3, 4, *x.shape[1 if x.shape[0] == 12 else 2 :])
        return by_group[:, [0, 1, 3]].reshape(-1, *x.shape[1:]) if x.shape[0] == 12 else (
            by_group[:, [0, 1, 3]]
        )  # fmt: skip

    arrays = {k: x if k == "greedy_rewards" else left_out(x) for k, x in arrays.items()}
    expected = algorithm.advantages(left_out(rewards), left_out(mask), **arrays)
    ours = ours.reshape(3, 4, 6)
    assert not ours[:, 2].any()
    close(ours[:, [0, 1, 3]].reshape(9, 6), expected)
    nothing = algorithm.estimate(rewards, mask, valid=~np.ones((3, 4), bool), **{
        **rollout_arrays(rewards, mask, rng)
    })  # fmt: skip
    assert not np.asarray(nothing.advantages).any()


def test_leave_one_out_is_the_mean_of_the_others():
    rewards = np.array([[1.0, 0.0, 4.0, 2.0]], np.float32)
    others = [[r - np.delete(rewards, i).mean() for i, r in enumerate(rewards[0])]]
    close(leave_one_out_advantages(jnp.asarray(rewards)), others)


def test_length_weighted_baseline():
    ours = length_weighted_advantages(
        table([1.0, 0.0, 3.0]), jnp.ones((1, 3), bool), table([2.0, 5.0, 1.0])
    )
    close(ours, np.array([[1.0, 0.0, 3.0]]) - 5 / 8)


def test_gpg_makes_up_for_rows_without_gradient():
    rewards = table([1.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0])
    centred = np.array([[2 / 3, -1 / 3, -1 / 3], [0, 0, 0], [0, 0, 0]])
    close(gpg_advantages(rewards), 9 / 3 * centred)
    close(gpg_advantages(rewards, gpg_factor="nonzero_rewards"), 9 / 4 * centred)
    valid = jnp.asarray([[True] * 3, [True] * 3, [False] * 3])
    close(gpg_advantages(rewards, valid), 6 / 3 * centred)


def test_best_of_group_is_the_leave_one_out_maximum():
    rewards = np.array([[1.0, 0.2, 0.7], [0.5, 0.5, 0.1], [-1.0, -2.0, -4.0]], np.float32)
    expected = [[max(row) - max(np.delete(row, i)) for i in range(3)] for row in rewards]
    close(best_of_group_advantages(jnp.asarray(rewards)), expected)
    scaled = best_of_group_advantages(jnp.asarray(rewards), normalize_std=True)
    close(scaled, expected / (rewards.std(1, ddof=1, keepdims=True) + 1e-6), rtol=1e-5)


@pytest.mark.parametrize("right", [0, 1, 2, 4, 6])
@pytest.mark.parametrize("pass_k", [1, 2, 3])
def test_pass_at_k_is_the_mean_over_all_subsets(right, pass_k):
    count = 6
    rewards = np.array([1.0] * right + [0.0] * (count - right))
    subsets = list(itertools.combinations(range(count), pass_k))
    passed = np.array([max(rewards[list(s)]) for s in subsets])
    mean, sigma = passed.mean(), passed.std()
    expected = [
        0.0
        if sigma == 0
        else np.mean([passed[j] - mean for j, s in enumerate(subsets) if i in s]) / sigma
        for i in range(count)
    ]
    # Two rows that could not be judged change nothing.
    padded = jnp.asarray([[*rewards, 1.0, 0.0]], jnp.float32)
    valid = jnp.asarray([[True] * count + [False] * 2])
    close(pass_at_k_advantages(padded, valid, pass_k=pass_k), [[*expected, 0.0, 0.0]], atol=1e-5)


def test_maximum_likelihood_weighs_hard_prompts_more():
    rewards = table([1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0], [0.0] * 4)
    close(
        maximum_likelihood_advantages(rewards),
        [[3.0, -1.0, -1.0, -1.0], [1 / 3, 1 / 3, 1 / 3, -1.0], [0.0] * 4],
    )


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_rewards_that_are_not_finite_are_refused(bad):
    with pytest.raises(RewardError, match="rollout 2"):
        reward_arrays([0.0, None, bad, 1.0], 2)


def test_rewards_handed_over_as_arrays_are_looked_at():
    mask, bad = np.ones((4, 2), bool), np.array([[0.0, 1.0], [np.inf, 1.0]])
    with pytest.raises(RewardError, match="rollout 2"):
        make("grpo").advantages(bad, mask)
    judged = np.array([[True, True], [False, True]])
    ours = make("grpo").advantages(bad, mask, valid=judged)
    assert np.isfinite(ours).all()
    good = np.zeros((2, 2))
    parts = np.zeros((2, 2, 3))
    parts[1, 1, 0] = np.nan
    with pytest.raises(RewardError, match="a part of the reward of rollout 3"):
        make("gdpo").advantages(good, mask, reward_parts=parts)
    with pytest.raises(RewardError, match="the greedy reward of prompt 1"):
        make("remax").advantages(good, mask, greedy_rewards=np.array([0.0, -np.inf]))


def test_rewards_become_arrays():
    values, valid = reward_arrays([0.5, None, 1.0, 2.0], 2)
    assert values.tolist() == [[0.5, 0.0], [1.0, 2.0]]
    assert valid.tolist() == [[True, False], [True, True]]
    with pytest.raises(RewardError, match="whole groups"):
        reward_arrays([1.0, 2.0, 3.0], 2)


def test_the_group_filter_keeps_or_drops_whole_groups():
    rewards = table([1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [2.0, 2.0, 5.0])
    valid = jnp.asarray([[True] * 3, [True] * 3, [True, True, False]])
    kept = informative_groups(rewards, valid)
    assert kept.shape == (3,) and kept.tolist() == [True, False, False]
    mask = jnp.ones((9, 2), bool)
    assert drop_unjudged(mask, valid).sum(1).tolist() == [2] * 8 + [0]


def test_equal_rewards_teach_nothing_without_an_eps():
    rewards = jnp.array([[0.1] * 4, [0.0] * 4, [0.0, 0.0, 1.0, 2.0]])
    mask = jnp.ones((12, 3), bool)
    found = {
        "group_std": group_advantages(rewards, eps=0.0),
        "best": best_of_group_advantages(rewards, normalize_std=True, eps=0.0),
        "likelihood": maximum_likelihood_advantages(rewards, eps=0.0),
        "decoupled": decoupled_reward_advantages(
            rewards[:, :, None], rewards >= 0, mask, jnp.ones(1), eps=0.0, batch_normalize="none"
        )[:, 0].reshape(3, 4),
        "task": task_normalized(
            jnp.repeat(rewards.reshape(12, 1), 3, axis=1), mask, jnp.arange(12) // 4, eps=0.0
        )[:, 0].reshape(3, 4),
    }
    for name, advantages in found.items():
        assert np.isfinite(advantages).all() and not np.any(advantages[:2]), name
        assert np.any(advantages[2]), name
    equal = rewards[:1].reshape(4, 1)
    assert not np.any(whitened(jnp.tile(equal, (1, 3)), mask[:4], eps=0.0))
