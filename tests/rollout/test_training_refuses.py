# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What draws from another distribution than the loss knows can't be set in training."""

from __future__ import annotations

import dataclasses

import pytest

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.rollout.settings import EngineConfig
from jaxrl_llm.trainers.build import engine_config
from jaxrl_llm.trainers.settings import SamplerConfig

SHARED = {"temperature", "max_tokens", "stop_ids", "seed"}  # what the loss knows or does not mind
TOLD = {"top_logprobs", "prompt_logprobs", "stop_strings"}  # draws nothing else


def test_no_setting_of_a_run_changes_what_is_drawn_from():
    """Every field of the sampler's own parameters is one that the loss knows, one that changes no
    draw, or one that a run has no setting for; but `top_p`, which has one and is refused."""
    fields = {field.name for field in dataclasses.fields(SamplerConfig)}
    other = {field.name for field in dataclasses.fields(SamplingParams)} - SHARED - TOLD
    assert other == {"top_p", "top_k", "min_p", "min_tokens", "logit_bias"}
    assert other & fields == {"top_p"}
    for name in other - {"top_p"}:
        with pytest.raises(TypeError):
            SamplerConfig(**{name: 1})
    with pytest.raises(ConfigError, match="can't be trained on"):
        SamplerConfig(top_p=0.9)


def test_a_run_samples_with_the_weights_that_it_trains():
    assert "weights" not in {field.name for field in dataclasses.fields(SamplerConfig)}
    config = engine_config(SamplerConfig())
    assert isinstance(config, EngineConfig) and config.weights == "native"
    assert not config.prefix_cache
