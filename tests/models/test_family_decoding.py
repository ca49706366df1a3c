# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The sampler's cached decoding against tokens and log-probabilities of transformers."""

from __future__ import annotations

import numpy as np
import pytest
from family_models import CASES, family_model, golden

from jaxrl_llm.rollout.engine import Engine, EngineConfig, Request, SamplingParams
from jaxrl_llm.types import Prompt

DECODED = [name for name in CASES if "greedy" in golden(name)]
# Between them: windows, two rotary embeddings, experts.
DEFAULT = ("gemma3", "qwen3_moe")
MARKED = [n if n in DEFAULT else pytest.param(n, marks=pytest.mark.full) for n in DECODED]


@pytest.mark.parametrize("name", MARKED)
def test_greedy_decoding_equals_that_of_transformers(name):
    config, params = family_model(name)
    stored = golden(name)["greedy"]
    engine = Engine(
        config,
        params,
        EngineConfig(max_prompt_tokens=24, max_new_tokens=12, slots=8, page_size=4),
    )
    requests = [
        Request(
            Prompt(id=str(i), tokens=tuple(case["prompt"]), text=""),
            SamplingParams(max_tokens=len(case["tokens"]), temperature=0.0),
            n=1,
            uid=i,
        )
        for i, case in enumerate(stored)
    ]
    rollouts = {rollout.prompt.id: rollout for rollout in engine.generate(requests)}
    for i, case in enumerate(stored):
        rollout = rollouts[str(i)]
        assert rollout.tokens.tolist() == case["tokens"]
        np.testing.assert_allclose(rollout.logp_sampler, case["logp"], atol=1e-4)
