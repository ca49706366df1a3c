# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_models import family_model, golden
from flax import nnx
from tiny_model import tiny_model

from jaxrl_llm.models.nnx import Layer, from_module, to_module
from jaxrl_llm.models.transformer import forward, logits


def model_and_tokens(name=None):
    if name is None:
        config, params = tiny_model(qk_norm="head", family="qwen3")
        return config, params, jnp.asarray(np.arange(24).reshape(2, 12), jnp.int32)
    config, params = family_model(name)
    return config, params, jnp.asarray(golden(name)["tokens"], jnp.int32)[:, :20]


def pure_loss(params, config, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape)
    hidden = forward(params, config, tokens, positions, jnp.ones_like(tokens))
    out = logits(params, hidden, config)
    return jnp.mean(jnp.square(out)), out


FULL = [pytest.param(name, marks=pytest.mark.full) for name in ("gemma3", "mixtral")]


@pytest.mark.parametrize("name", [None, *FULL])
def test_logits_and_gradients_are_those_of_the_functions(name):
    config, params, tokens = model_and_tokens(name)
    module = to_module(params, config)
    (_, expected), grads = jax.jit(jax.value_and_grad(pure_loss, has_aux=True), static_argnums=1)(
        params, config, tokens
    )
    found = nnx.jit(lambda m, t: m(t))(module, tokens)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    by_module = nnx.jit(nnx.grad(lambda m, t: jnp.mean(jnp.square(m(t)))))(module, tokens)
    largest = max(float(jnp.max(jnp.abs(g))) for g in jax.tree.leaves(grads))
    for index in (0, config.num_layers - 1):
        for part in ("q", "gate", "attn_norm"):
            np.testing.assert_allclose(
                by_module["layers"][index][part][...],
                grads["layers"][part][index],
                atol=1e-5 * largest,
            )
    np.testing.assert_allclose(by_module["embed"][...], grads["embed"], atol=1e-5 * largest)


def test_round_trip_is_bitwise():
    config, params, _ = model_and_tokens()
    again = from_module(to_module(params, config))
    assert jax.tree.structure(again) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_display_shows_the_parameters(capsys):
    config, params, _ = model_and_tokens()
    module = to_module(params, config)
    nnx.display(module)
    shown = capsys.readouterr().out
    assert "Decoder" in shown and "Layer" in shown and "embed" in shown


class Silent(Layer):
    """A layer of one's own: passes its input on."""

    def __call__(self, x, cos, sin, attend):
        return x


def test_a_layer_of_ones_own():
    config, params, tokens = model_and_tokens()
    module = to_module(params, config)
    run = nnx.jit(lambda module, tokens: module(tokens))
    before = run(module, tokens)
    module.layers[1] = Silent(module.layers[1].values(), config)
    assert float(jnp.max(jnp.abs(run(module, tokens) - before))) > 1e-2
    jax.tree.map(np.testing.assert_array_equal, from_module(module), params)
