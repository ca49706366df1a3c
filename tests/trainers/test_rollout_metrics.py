# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What a step's metrics say of the rewards within groups."""

import numpy as np
import pytest

from jaxrl_llm.trainers.critic import value_metrics
from jaxrl_llm.trainers.metrics import rollout_metrics
from jaxrl_llm.types import Batch, Prompt, Reward, Rollout


def group(values):
    none = np.zeros(1, np.int32)
    prompt = Prompt("p", (1,), "")
    return [
        Rollout(
            prompt, i, none, none.astype(np.float32), none == 0, none, "stop", "",
            None if value is None else Reward(value),
        )
        for i, value in enumerate(values)
    ]  # fmt: skip


def test_groups_of_one_have_no_spread():
    alone = rollout_metrics(group([1.0, 0.0, 1.0]), 1)
    assert alone["reward"] == pytest.approx(2 / 3)
    assert not {"reward_std", "frac_reward_zero_std"} & alone.keys()
    # Nor has a group of which one could be judged; the others count.
    found = rollout_metrics(group([1.0, None, 1.0, 1.0, 0.0, 1.0]), 2)
    assert found["frac_reward_zero_std"] == 0.5
    assert found["reward_std"] == pytest.approx(np.sqrt(0.5) / 2)


@pytest.mark.parametrize("value", [0.1, 0.7, 1 / 3, 1e17])
def test_equal_rewards_are_equal_whatever_their_rounding(value):
    found = rollout_metrics(group([value] * 6 + [0.0] * 5 + [1.0]), 6)
    assert found["frac_reward_zero_std"] == 0.5
    assert rollout_metrics(group([value] * 6), 6)["reward_std"] == 0.0


def test_equal_returns_leave_nothing_to_explain():
    mask = np.ones((1, 7), bool)
    returns = np.full((1, 7), 0.1, np.float32)
    zero = np.zeros((1, 7), np.int32)
    fields = {"tokens": zero, "positions": zero, "segment_ids": zero, "mask": mask}
    rows = np.arange(7, dtype=np.float32)[None]
    batch = Batch(**fields, advantages=rows, logp_sampler=rows, values=rows, returns=returns)
    assert "value/explained_variance" not in value_metrics(batch)
    assert returns.var() > 0  # what the variance says of them
