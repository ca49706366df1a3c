# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""A sampler on a mesh draws what one device draws, with a part of weights and cache on each."""

import jax
import numpy as np
import pytest

from jaxrl_llm.errors import ConfigError, RequestError
from jaxrl_llm.rollout.engine import Engine, EngineConfig, Request, SamplingParams
from jaxrl_llm.rollout.engines import Engines
from jaxrl_llm.sharding.mesh import MeshConfig
from jaxrl_llm.types import Prompt

CONFIG = EngineConfig(max_prompt_tokens=8, max_new_tokens=12, slots=8, page_size=4, group_size=2)


def requests(count=6):
    rng = np.random.default_rng(0)
    sampling = SamplingParams(max_tokens=12, seed=7)
    prompts = [
        Prompt(str(i), tuple(rng.integers(0, 97, 3 + i % 5).tolist()), "") for i in range(count)
    ]
    return [Request(prompt, sampling, n=2, uid=i) for i, prompt in enumerate(prompts)]


def served(engine):
    return {(r.prompt.id, r.sample): r for r in engine.generate(requests())}


def shares(tree):
    """Bytes on each device."""
    held = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device.id] = held.get(shard.device.id, 0) + shard.data.nbytes
    return held


def test_a_mesh_draws_what_one_device_draws(tiny_config, tiny_params):
    expected = served(Engine(tiny_config, tiny_params, CONFIG))
    engines = Engines(tiny_config, tiny_params, CONFIG, MeshConfig(data=2, tensor=2))
    found = served(engines)
    assert found.keys() == expected.keys()
    for key, rollout in found.items():
        np.testing.assert_array_equal(rollout.tokens, expected[key].tokens)
        np.testing.assert_allclose(
            rollout.logp_sampler, expected[key].logp_sampler, rtol=0, atol=2e-5
        )
    # Both served; each device holds half of its engine's keys and values, and of the matrices.
    assert [engine.stats.useful_tokens > 0 for engine in engines.engines] == [True, True]
    for engine, own in zip(engines.engines, ([0, 1], [2, 3]), strict=True):
        pages = shares(engine._pages)
        assert sorted(pages) == own
        whole = sum(leaf.nbytes for leaf in jax.tree.leaves(engine._pages))
        assert set(pages.values()) == {whole // 2}
        weights = shares(engine._params)
        whole = sum(leaf.nbytes for leaf in jax.tree.leaves(engine._params))
        assert sorted(weights) == own
        assert max(weights.values()) < 0.6 * whole


def test_new_weights_reach_all(tiny_config, tiny_params):
    engines = Engines(tiny_config, tiny_params, CONFIG, MeshConfig(data=2))
    before = served(engines)
    engines.release()
    with pytest.raises(RequestError, match="released"):
        list(engines.generate(requests()))
    engines.set_params(jax.tree.map(lambda x: -x, tiny_params), 3)
    after = served(engines)
    assert engines.version == 3
    assert all((r.weights_version == 3).all() for r in after.values())
    assert any((after[k].tokens[:4] != before[k].tokens[:4]).any() for k in after)


def test_an_iterator_that_is_left_ends_all(tiny_config, tiny_params):
    engines = Engines(tiny_config, tiny_params, CONFIG, MeshConfig(data=2))
    rollouts = engines.generate(requests())
    next(rollouts)
    rollouts.close()
    assert len(served(engines)) == 12


def test_misfits_are_one_line(tiny_config, tiny_params):
    def make(layout):
        Engines(tiny_config, tiny_params, CONFIG, layout)

    with pytest.raises(ConfigError, match=r"sampler\.mesh is data × tensor .* fsdp 2"):
        make(MeshConfig(fsdp=2))
    with pytest.raises(ConfigError, match=r"--sampler\.mesh\.tensor=4"):
        make(MeshConfig(tensor=8))
