# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities on request: of the likeliest tokens and of prompts, against a plain forward."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.errors import RequestError
from jaxrl_llm.models.transformer import forward, logits
from jaxrl_llm.rollout.engine import Engine, EngineConfig, Request, SamplingParams
from jaxrl_llm.types import Prompt


def prompt(length: int, start: int = 1) -> Prompt:
    tokens = tuple((start + 7 * i + i * i) % 97 for i in range(length))
    return Prompt(id=f"p{length}-{start}", tokens=tokens, text="")


@functools.partial(jax.jit, static_argnames="config")
def _logps(params, config, tokens, temperature):
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)[None, :]
    hidden = forward(params, config, tokens[None, :], positions, jnp.ones_like(positions))
    return jax.nn.log_softmax(logits(params, hidden, config)[0] / temperature, axis=-1)


def plain_logps(params, config, tokens, temperature: float) -> np.ndarray:
    """log softmax(logits/τ) [T, V] of a whole sequence (padded to 64); τ = 0 counts as 1."""
    padded = np.zeros(64, np.int32)
    padded[: len(tokens)] = tokens
    out = _logps(params, config, jnp.asarray(padded), jnp.float32(temperature or 1.0))
    return np.asarray(out)[: len(tokens)]


def make_engine(config, params, **sizes) -> Engine:
    defaults = dict(max_prompt_tokens=40, max_new_tokens=16, slots=8, page_size=4)
    return Engine(config, params, EngineConfig(**{**defaults, "prefill_tokens": 32, **sizes}))


def check(rollout, params, config) -> None:
    asked, length = rollout.request, len(rollout.prompt.tokens)
    logps = plain_logps(
        params, config, (*rollout.prompt.tokens, *rollout.tokens), asked.temperature
    )
    drawn = logps[length - 1 : -1]
    np.testing.assert_allclose(
        rollout.logp_sampler, drawn[np.arange(len(drawn)), rollout.tokens], atol=1e-4
    )
    if asked.top_logprobs:
        assert (
            rollout.top_tokens.shape == rollout.top_logps.shape == (len(drawn), asked.top_logprobs)
        )
        best = -np.sort(-drawn, axis=-1)[:, : asked.top_logprobs]
        np.testing.assert_allclose(rollout.top_logps, best, atol=1e-4)
        of_ids = np.take_along_axis(drawn, rollout.top_tokens, axis=-1)
        np.testing.assert_allclose(rollout.top_logps, of_ids, atol=1e-4)
        assert all(len(set(row)) == len(row) for row in rollout.top_tokens.tolist())
    else:
        assert rollout.top_tokens is None and rollout.top_logps is None
    if asked.prompt_logprobs:
        expected = logps[np.arange(length - 1), rollout.prompt.tokens[1:]]
        np.testing.assert_allclose(rollout.prompt_logps, expected, atol=1e-4)
    else:
        assert rollout.prompt_logps is None


@dataclasses.dataclass
class Told:
    """A rollout and what was asked for."""

    rollout: object
    request: SamplingParams

    def __getattr__(self, name):
        return getattr(self.rollout, name)


@pytest.mark.parametrize("num_pages", [None, 24])
def test_equal_a_plain_forward(tiny_config, tiny_params, num_pages):
    """Groups, prompts of 1 to 40 tokens over chunks of 32, other temperatures and greedy; with few
    pages some samples are preempted in between. Who asks for nothing gets nothing, and draws the
    same tokens as without company."""
    asked = [
        SamplingParams(max_tokens=12, top_logprobs=3, prompt_logprobs=True, seed=1),
        SamplingParams(max_tokens=12, temperature=0.7, top_logprobs=20, seed=2),
        SamplingParams(max_tokens=12, temperature=0.0, prompt_logprobs=True),
        SamplingParams(max_tokens=12, seed=3),
        SamplingParams(max_tokens=12, temperature=1.5, prompt_logprobs=True, seed=4),
        SamplingParams(max_tokens=12, temperature=0.0, top_logprobs=1, logit_bias=((3, -9.0),)),
    ]
    requests = [
        Request(prompt(length, i), params, n=2, uid=i)
        for i, (length, params) in enumerate(zip((1, 9, 40, 17, 16, 5), asked, strict=True))
    ]
    sizes = {} if num_pages is None else dict(num_pages=num_pages, decode_steps=4)
    engine = make_engine(tiny_config, tiny_params, **sizes)
    rollouts = list(engine.generate(requests))
    assert len(rollouts) == 12 and (num_pages is None or engine.stats.preempted > 0)
    by_id = {request.prompt.id: request for request in requests}
    for rollout in rollouts:
        check(Told(rollout, by_id[rollout.prompt.id].params), tiny_params, tiny_config)
    (alone, _) = make_engine(tiny_config, tiny_params).generate([requests[3]])
    (same,) = [r for r in rollouts if r.prompt.id == alone.prompt.id and r.sample == alone.sample]
    assert same.tokens.tolist() == alone.tokens.tolist()


def test_cut_with_the_tokens_at_a_stop_string(tiny_config, tiny_params):
    config = EngineConfig(max_prompt_tokens=8, max_new_tokens=32, slots=4)
    text = lambda tokens: "".join(chr(40 + token) for token in tokens)  # noqa: E731 - short
    engine = Engine(tiny_config, tiny_params, config, decode_text=text)
    plain = SamplingParams(max_tokens=30, seed=2, top_logprobs=2)
    (full,) = engine.generate([Request(prompt(6), plain)])
    stop = text(full.tokens)[11:13]
    params = dataclasses.replace(plain, stop_strings=(stop,))
    (cut,) = engine.generate([Request(prompt(6), params)])
    assert cut.finish_reason == "stop" and len(cut.top_logps) == len(cut.tokens) < 30
    np.testing.assert_array_equal(cut.top_tokens, full.top_tokens[: len(cut.tokens)])


def test_programs_are_made_only_where_asked(tiny_config, tiny_params):
    engine = make_engine(tiny_config, tiny_params)
    list(engine.generate([Request(prompt(9), SamplingParams(max_tokens=3))]))
    plain = engine.stats.programs
    asked = SamplingParams(max_tokens=3, top_logprobs=2, prompt_logprobs=True)
    list(engine.generate([Request(prompt(9), asked)]))
    assert engine.stats.programs == plain + 2
    with pytest.raises(RequestError, match="bad top_logprobs"):
        engine.generate([Request(prompt(9), SamplingParams(max_tokens=3, top_logprobs=21))])
