# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.errors import RewardError
from jaxrl_llm.rewards.base import check_rewards, score
from jaxrl_llm.types import Prompt, Reward, Rollout


def _rollouts(count):
    return [
        Rollout(
            Prompt("p", (1,), "p", "7"),
            sample,
            np.zeros(1, np.int32),
            np.zeros(1, np.float32),
            np.ones(1, bool),
            np.zeros(1, np.int32),
            "stop",
        )
        for sample in range(count)
    ]


def _returns(value):
    return lambda rollouts: value


def _refused(fn, match, count=2):
    with pytest.raises(RewardError, match=match) as caught:
        score({"mine": fn}, _rollouts(count))
    assert "'mine" in str(caught.value) and "\n" not in str(caught.value)
    return caught.value


def test_weighted_sum_and_parts_by_name():
    rows = {
        "a": (lambda rs: [float(r.sample) for r in rs], 2.0),
        "b": lambda rs: [Reward(0.5, {"x": 3.0}, {"note": "n"}) for _ in rs],
        "shown": (_returns([10, 20]), 0.0),
    }
    assert score(rows, _rollouts(2)) == [
        Reward(0.5, {"a": 0.0, "b": 0.5, "b/x": 3.0, "shown": 10.0}, {"b": {"note": "n"}}),
        Reward(2.5, {"a": 1.0, "b": 0.5, "b/x": 3.0, "shown": 20.0}, {"b": {"note": "n"}}),
    ]


def test_not_judged_leaves_the_row_out_only_where_it_counts():
    rows = {"a": _returns([1, None]), "b": _returns([1, 1])}
    assert [reward and reward.value for reward in score(rows, _rollouts(2))] == [2.0, None]
    shown = score({"a": (_returns([1, None]), 0.0), "b": _returns([1, 1])}, _rollouts(2))
    assert [reward.value for reward in shown] == [1.0, 1.0]
    assert [sorted(reward.parts) for reward in shown] == [["a", "b"], ["b"]]


@pytest.mark.parametrize(
    "values",
    [
        [True, False],
        (1, 0),
        np.array([1, 0]),
        np.array([True, False]),
        jnp.array([1.0, 0.0], jnp.float32),
        [np.float16(1), np.array(0)],
        iter([1, 0]),
    ],
)
def test_numbers_of_many_kinds(values):
    rewards = score({"mine": _returns(values)}, _rollouts(2))
    assert [reward.value for reward in rewards] == [1.0, 0.0]
    assert all(type(reward.value) is float for reward in rewards)


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, 1e39, -(10**400), np.float32("inf"), "1", [1], 1j, np.ones(1)],
)
def test_a_value_that_is_no_finite_number(value):
    _refused(_returns([0, value]), "not a finite number.*for p, sample 1")
    # Nobody checks the types of a Reward that a user fills.
    reward, part = Reward(1.0), Reward(1.0)
    object.__setattr__(reward, "value", value)
    object.__setattr__(part, "parts", {"part": value})
    _refused(_returns([0, reward]), "not a finite number")
    assert "'mine/part'" in str(_refused(_returns([0, part]), "not a finite number"))


def test_a_value_that_can_not_even_be_shown():
    _refused(_returns([0, 10**5000]), "not a finite number")


def test_what_is_no_list():
    for value in (None, 1.0, "11", {"a": 1, "b": 2}, {1, 2}):
        _refused(_returns(value), "did not return a list")


def test_wrong_count():
    for value in ([], [1], [1, 2, 3]):
        _refused(_returns(value), f"wrong number of values · got {len(value)} · expected 2")


def test_a_function_that_raises():
    def fails(rollouts):
        raise KeyError("a\nmissing\ncolumn" + "x" * 10_000)

    error = _refused(fails, r"raised KeyError · got 'a.*test_base\.py:\d+")
    assert isinstance(error.__cause__, KeyError) and len(str(error)) < 500

    def fails_late(rollouts):
        yield 1.0
        raise ZeroDivisionError

    _refused(fails_late, "raised ZeroDivisionError · got no message")

    def interrupted(rollouts):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score({"mine": interrupted}, _rollouts(1))


def test_a_sum_beyond_float32():
    rows = {"a": (_returns([3e38]), 1.0), "b": (_returns([3e38]), 1.0)}
    with pytest.raises(RewardError, match="weighted sum"):
        score(rows, _rollouts(1))


def test_no_rollouts():
    assert score({"a": _returns([])}, []) == []


def test_rows_of_a_config_are_checked_before_the_run():
    check_rewards({"a": _returns([]), "b": (_returns([]), -0.5)})
    for rows, message in (
        ({}, "no reward is set"),
        ({"a": 1}, "'a' is not a function"),
        ({"a": (_returns([]), "1")}, "weight of the reward 'a'"),
        ({"a": (_returns([]), math.nan)}, "weight of the reward 'a'"),
        ({"a": (_returns([]), 0.0)}, "all rewards have weight 0"),
    ):
        with pytest.raises(RewardError, match=message):
            check_rewards(rows)
