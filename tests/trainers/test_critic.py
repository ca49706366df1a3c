# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Values are read where log-probabilities are, in every layout, and fitted to returns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.presets import AlgoConfig, resolve
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.transformer import forward, init_params
from jaxrl_llm.trainers.batching import pad_rollouts, plan_rows
from jaxrl_llm.trainers.critic import Critic, CriticConfig, make_critic_functions
from jaxrl_llm.trainers.passes import Passes
from jaxrl_llm.types import Prompt, Reward, Rollout

CONFIG = ModelConfig(61, 16, 24, 2, 4, 2, 8, tie_word_embeddings=True)


def samples():
    rng = np.random.default_rng(0)
    made = []
    for group in range(4):
        prompt = Prompt(str(group), tuple(rng.integers(0, 61, 3 + group).tolist()), "")
        for sample in range(4):
            count = int(rng.integers(1, 8))
            tokens = rng.integers(0, 61, count).astype(np.int32)
            none = np.zeros(count, np.float32)
            made.append(
                Rollout(prompt, sample, tokens, none, none == 0, tokens, "stop", "", Reward(1.0))
            )
    return made, pad_rollouts(made, longest=16)


def critic(layout, **settings):
    algorithm = resolve(AlgoConfig(name="ppo", **settings), group_size=4, max_tokens=8)
    functions = make_critic_functions(CONFIG, algorithm, CriticConfig(), remat=False)
    key, head = jax.random.split(jax.random.key(0))
    params = {
        "decoder": init_params(CONFIG, key),
        "score": {"weight": jax.random.normal(head, (1, 16))},
    }
    passes = Passes(
        put=lambda batch: batch,
        plan=lambda batch: plan_rows(
            batch, layout=layout, row_tokens=64, micro_tokens=64, longest=16
        ),
        epochs=1,
        minibatches=1,
        group_size=4,
        seed=0,
    )
    return Critic(algorithm, functions, functions.state.init(params), passes, 0)


def test_a_value_belongs_to_the_state_before_its_token():
    rollouts, batch = samples()
    made = critic("shared_prefix")
    got = made.values(batch)
    head = np.asarray(made.state.params["score"]["weight"][0])
    for row, rollout in enumerate(rollouts):
        tokens = jnp.array([rollout.prompt.tokens + tuple(rollout.tokens.tolist())] * 2, jnp.int32)
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        hidden = forward(
            made.state.params["decoder"], CONFIG, tokens, places, jnp.ones_like(tokens)
        )
        expected = np.asarray(hidden[0]) @ head
        start = len(rollout.prompt.tokens)
        np.testing.assert_allclose(
            got[row][batch.mask[row]], expected[start - 1 : -1], rtol=1e-4, atol=1e-5
        )
    np.testing.assert_allclose(got, critic("padded").values(batch), rtol=1e-4, atol=1e-5)
    assert (got[~batch.mask] == 0).all()


@pytest.mark.parametrize("layout", ["shared_prefix", "packed"])
def test_it_learns_returns_and_says_how_much_it_explains(layout):
    _, batch = samples()
    made = critic(layout, value_clip=float("inf"))
    goal = np.where(batch.mask, 1.0 + batch.tokens % 3, 0.0).astype(np.float32)
    found = []
    for step in range(30):
        filled = batch.replace(values=made.values(batch), returns=goal)
        found.append(made.run(filled, step))
    assert found[-1]["value/loss"] < 0.9 * found[0]["value/loss"]
    assert found[-1]["value/explained_variance"] > found[0]["value/explained_variance"]
    left = goal[batch.mask] - filled.values[batch.mask]
    np.testing.assert_allclose(
        found[-1]["value/explained_variance"],
        1 - left.var() / goal[batch.mask].var(),
        rtol=1e-5,
    )
