# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Settings of the optimiser that can't train are refused before a run begins."""

import math

import pytest

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.trainers.optimizers import OptimizerConfig


@pytest.mark.parametrize("field", ["learning_rate", "b1", "b2", "eps", "weight_decay"])
@pytest.mark.parametrize("value", [math.inf, math.nan, -1.0])
def test_numbers_that_are_not_finite_or_negative_are_refused(field, value):
    with pytest.raises(ConfigError, match=f"optimizer.{field} is out of range"):
        OptimizerConfig(**{field: value})


def test_an_infinite_norm_clips_nothing():
    assert OptimizerConfig(max_grad_norm=math.inf).max_grad_norm == math.inf
    for value in (0.0, math.nan):
        with pytest.raises(ConfigError, match="max_grad_norm is out of range"):
            OptimizerConfig(max_grad_norm=value)
