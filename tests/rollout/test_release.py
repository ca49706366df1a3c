# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The sampler gives its memory back between two batches."""

import gc

import jax
import pytest

from jaxrl_llm.errors import RequestError
from jaxrl_llm.rollout.engine import Engine, EngineConfig, Request, SamplingParams
from jaxrl_llm.types import Prompt


def test_weights_and_pages_are_freed_and_come_back(tiny_config, tiny_params):
    size = lambda: sum(x.nbytes for x in jax.live_arrays())  # noqa: E731
    gc.collect()
    before = size()
    sizes = {"max_prompt_tokens": 8, "max_new_tokens": 8, "slots": 16}
    engine = Engine(tiny_config, tiny_params, EngineConfig(**sizes))
    request = Request(Prompt("a", (1, 2, 3), ""), SamplingParams(max_tokens=8), 4, 0)
    first = [rollout.tokens.tolist() for rollout in engine.generate([request])]
    weights = sum(x.nbytes for x in jax.tree.leaves(tiny_params))
    assert size() > before + weights
    engine.release()
    assert size() - before < weights / 100
    with pytest.raises(RequestError, match="released"):
        next(iter(engine.generate([request])))
    engine.set_params(tiny_params, 1)
    assert [rollout.tokens.tolist() for rollout in engine.generate([request])] == first
    running = engine.generate([request])
    next(running)
    with pytest.raises(RequestError, match="generating"):
        engine.release()
