# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What the sampler's sizes and a request's parameters may be."""

import pytest

from jaxrl_llm.errors import ConfigError, RequestError
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.rollout.settings import EngineConfig


def with_values(settings, values):
    """Tests check types where objects are made; users get no such help."""
    for name, value in values.items():
        object.__setattr__(settings, name, value)
    return settings


@pytest.mark.parametrize(
    "wrong",
    [
        {"weights": "fp8"}, {"weights": None}, {"attention": "dense"}, {"prefix_cache": "no"},
        {"page_size": 1.5}, {"slots": "8"}, {"slots": None}, {"slots": True}, {"num_pages": 1},
        {"prefill_tokens": 8}, {"prefill_tokens": 24},
    ],
)  # fmt: skip
def test_sizes_that_mean_nothing_are_refused(wrong):
    config = with_values(EngineConfig(4, 4), wrong)
    with pytest.raises(ConfigError, match=f"bad {next(iter(wrong))}"):
        config.__post_init__()


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 3.5}, {"max_tokens": 0}, {"min_tokens": 5}, {"seed": 0.5}, {"seed": 2**32},
        {"top_k": 0.7}, {"top_logprobs": 1.5}, {"top_logprobs": 21}, {"stop_ids": 5},
        {"stop_ids": (1.5,)}, {"stop_ids": (2**31,)}, {"stop_strings": "ab"},
        {"stop_strings": ("",)}, {"temperature": "1"}, {"temperature": 1e-46},
        {"temperature": 1e39}, {"temperature": float("nan")}, {"top_p": 0.0}, {"min_p": 1.1},
        {"logit_bias": {5: 1.0}}, {"logit_bias": ((5, 1e39),)},
        {"logit_bias": ((5, float("nan")),)}, {"logit_bias": ((5, 1.0), (5, 2.0))},
    ],
)  # fmt: skip
def test_values_that_can_not_be_sampled_with_are_refused(wrong):
    params = with_values(SamplingParams(4), wrong)
    with pytest.raises(RequestError, match=next(iter(wrong))):
        params.check()


def test_the_usual_ones_pass():
    bans = ((5, float("-inf")), (6, 2.0))
    SamplingParams(4, 0.0, 1.0, (2,), 2**32 - 1, 2**40, 1.0, 4, ("a",), bans, 20).check()
