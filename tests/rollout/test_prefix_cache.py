# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Pages kept of earlier prompts: less is computed, the tokens are the same, new weights end it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.rollout.engine import Engine, EngineConfig, Request, SamplingParams
from jaxrl_llm.types import Prompt

SYSTEM = tuple((3 + 5 * i + i * i) % 97 for i in range(37))


def requests(count: int, first: int = 0, new: int = 10, **options) -> list[Request]:
    """They begin alike (37 tokens: 9 pages of 4 and a token) and end differently."""
    return [
        Request(
            Prompt(f"q{i}", (*SYSTEM, *range(i, i + 3 + i % 5)), ""),
            SamplingParams(max_tokens=new, seed=7, **options),
            n=1 + i % 3,
            uid=i,
        )
        for i in range(first, first + count)
    ]


def draws(rollouts) -> dict:
    return {(r.prompt.id, r.sample): r.tokens.tolist() for r in rollouts}


def make_engine(config, params, **sizes) -> Engine:
    defaults = dict(max_prompt_tokens=64, max_new_tokens=32, slots=8, page_size=4)
    return Engine(config, params, EngineConfig(**{**defaults, **sizes}))


def test_only_the_rest_of_a_prompt_is_computed(tiny_config, tiny_params):
    """Within a call and from call to call; the tokens are the same as without."""
    cached = make_engine(tiny_config, tiny_params, prefix_cache=True)
    plain = make_engine(tiny_config, tiny_params)
    with_, without = (
        sorted(engine.generate(requests(4)), key=lambda r: (r.prompt.id, r.sample))
        for engine in (cached, plain)
    )
    assert draws(with_) == draws(without)
    for one, other in zip(with_, without, strict=True):
        np.testing.assert_allclose(one.logp_sampler, other.logp_sampler, atol=1e-5)
    total = sum(len(r.prompt.tokens) for r in requests(4))
    assert plain.stats.prefill_tokens == total
    assert cached.stats.prefill_tokens == total - 3 * 36 and cached.stats.cached_tokens == 3 * 36
    before = cached.stats.snapshot()
    assert draws(cached.generate(requests(1, 9))) == draws(plain.generate(requests(1, 9)))
    part = cached.stats.since(before)
    assert (part.prefill_tokens, part.cached_tokens) == (37 + 7 - 36, 36)


def test_new_weights_end_it(tiny_config, tiny_params):
    other = jax.tree.map(lambda x: x * jnp.float32(0.9), tiny_params)
    engine = make_engine(tiny_config, tiny_params, prefix_cache=True)
    list(engine.generate(requests(2)))
    engine.set_params(other, version=1)
    fresh = make_engine(tiny_config, other)
    before = engine.stats.snapshot()
    assert draws(engine.generate(requests(1))) == draws(fresh.generate(requests(1)))
    assert engine.stats.since(before).cached_tokens == 0
    # also under way: those that come later read nothing of the old weights
    running = engine.generate(requests(9, new=4))
    next(running)
    engine.set_params(tiny_params, version=2)
    late = {key: value for key, value in draws(running).items() if key[0] == "q8"}
    assert late == {
        key: value
        for key, value in draws(
            make_engine(tiny_config, tiny_params).generate(requests(9, new=4))
        ).items()
        if key[0] == "q8"
    }


@pytest.mark.parametrize("num_pages", [22, 40])
def test_kept_pages_give_way(tiny_config, tiny_params, num_pages):
    """With few pages requests run as they would without a cache, preempted or not."""
    plain = make_engine(tiny_config, tiny_params)
    scarce = make_engine(
        tiny_config, tiny_params, prefix_cache=True, num_pages=num_pages, decode_steps=4
    )
    for _ in range(2):
        assert draws(scarce.generate(requests(7, new=20))) == draws(
            plain.generate(requests(7, new=20))
        )
    assert scarce.stats.peak_pages < num_pages


def test_a_closed_iterator_leaves_the_pages_free(tiny_config, tiny_params):
    engine = make_engine(tiny_config, tiny_params, prefix_cache=True)
    running = engine.generate(requests(9))
    next(running)
    running.close()
    assert engine._prefixes.allocator.used == len(engine._prefixes.pages) > 0
    assert draws(engine.generate(requests(3))) == draws(
        make_engine(tiny_config, tiny_params).generate(requests(3))
    )


def test_scored_prompts_are_computed_whole(tiny_config, tiny_params):
    engine = make_engine(tiny_config, tiny_params, prefix_cache=True)
    list(engine.generate(requests(1)))
    before = engine.stats.snapshot()
    (rollout,) = engine.generate(requests(1, prompt_logprobs=True))
    assert len(rollout.prompt_logps) == len(rollout.prompt.tokens) - 1
    assert engine.stats.since(before).cached_tokens == 0
