# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The engine against a plain loop over the dense decoder, and its promises."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.transformer import forward, logits
from jaxrl_llm.rollout.engine import Engine, EngineConfig, Request, SamplingParams
from jaxrl_llm.types import Prompt


def prompt(length: int, start: int = 1) -> Prompt:
    tokens = tuple((start + 7 * i + i * i) % 97 for i in range(length))
    return Prompt(id=f"p{length}-{start}", tokens=tokens, text="")


@functools.partial(jax.jit, static_argnames="config")
def _dense_logps(params, config, tokens):
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)[None, :]
    hidden = forward(params, config, tokens[None, :], positions, jnp.ones_like(positions))
    return jax.nn.log_softmax(logits(params, hidden)[0], axis=-1)


def dense_greedy(params, config, tokens, count):
    """Greedy continuation by running the whole sequence anew for every token (padded to 128)."""
    tokens, logps = list(tokens), []
    for _ in range(count):
        padded = np.zeros(128, np.int32)
        padded[: len(tokens)] = tokens
        row = np.asarray(_dense_logps(params, config, jnp.asarray(padded)))[len(tokens) - 1]
        tokens.append(int(row.argmax()))
        logps.append(row.max())
    return tokens[-count:], np.array(logps)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_greedy_equals_a_dense_loop(tiny_config, tiny_params, page_size):
    """Prompts of one token, exactly one page, several pages, longer than a prefill chunk."""
    config = EngineConfig(
        max_prompt_tokens=64,
        max_new_tokens=12,
        slots=4,
        page_size=page_size,
        prefill_tokens=16,
        decode_steps=5,
    )
    engine = Engine(tiny_config, tiny_params, config)
    lengths = [1, 2, page_size, 3 * page_size, 3 * page_size + 1, 41, 64]
    requests = [
        Request(prompt(n), SamplingParams(max_tokens=12, temperature=0.0), n=2, uid=i)
        for i, n in enumerate(lengths)
    ]
    rollouts = list(engine.generate(requests))
    assert len(rollouts) == 2 * len(lengths)
    for rollout in rollouts:
        expected, logps = dense_greedy(tiny_params, tiny_config, rollout.prompt.tokens, 12)
        assert rollout.tokens.tolist() == expected
        np.testing.assert_allclose(rollout.logp_sampler, logps, atol=2e-5)
        assert rollout.finish_reason == "length" and rollout.mask.all()
