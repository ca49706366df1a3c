# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What the sampler's sizes and a request's parameters may be."""

import dataclasses

import pytest

from jaxrl_llm.checkpoint.pretrained import TINY_CONFIG
from jaxrl_llm.errors import ConfigError, RequestError
from jaxrl_llm.rollout.checks import check_request
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.rollout.scheduler import Request
from jaxrl_llm.rollout.settings import EngineConfig
from jaxrl_llm.types import Prompt

BANNED = tuple((token, float("-inf")) for token in range(4))


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


@pytest.mark.parametrize(
    ("request_", "params", "told"),
    [
        ({"n": 2.5}, {}, "asks for no samples"),
        ({"n": 0}, {}, "asks for no samples"),
        ({"uid": -1}, {}, "bad uid"),
        ({"uid": 0.5}, {}, "bad uid"),
        ({"prompt": Prompt("a", (), "")}, {}, "empty prompt"),
        ({"prompt": with_values(Prompt("a", (1,), ""), {"tokens": (1.5,)})}, {}, "outside the"),
        ({"prompt": Prompt("a", (4,), "")}, {}, "outside the vocabulary"),
        ({"prompt": Prompt("a", (1,) * 9, "")}, {}, "too long"),
        ({}, {"logit_bias": ((4, 1.0),)}, "outside the vocabulary"),
        ({}, {"logit_bias": BANNED}, "bans every token"),
        (
            {},
            {"logit_bias": BANNED[:2], "stop_ids": (2, 3, 9), "min_tokens": 1},
            "bans every token",
        ),
        ({}, {"stop_strings": ("a",)}, "can't read tokens"),
        ({}, {"max_tokens": 9}, "too many max_tokens"),
    ],
)
def test_requests_that_can_not_be_served_are_refused(request_, params, told):
    model = dataclasses.replace(TINY_CONFIG, vocab_size=4)
    params = SamplingParams(**{"max_tokens": 4, **params})
    request = with_values(Request(Prompt("a", (1, 2), ""), params), request_)
    with pytest.raises(RequestError, match=told):
        check_request(request, EngineConfig(8, 8), model, reads_text=False)
