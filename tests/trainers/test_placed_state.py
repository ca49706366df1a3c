# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""An optimiser step leaves all where the ZeRO row says, and computes what one device does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import tiny_model

from jaxrl_llm.models.placement import Placement
from jaxrl_llm.sharding.mesh import MeshConfig
from jaxrl_llm.trainers.optimizers import OptimizerConfig, make_optimizer
from jaxrl_llm.trainers.state import add_gradients, make_state_functions, put, taken


def contribution(params):
    """Any function of all parameters, with gradients of all sizes."""
    parts = [jnp.sum(jnp.sin(x) * x) for x in jax.tree.leaves(params)]
    return sum(parts), {}


def assert_placed(tree, place, kind):
    for leaf, where in zip(
        jax.tree.leaves(tree), jax.tree.leaves(place.shardings(tree, kind)), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(where, leaf.ndim), (leaf.sharding, where)


@pytest.mark.parametrize(
    "layout",
    [
        MeshConfig(fsdp=2, tensor=2, zero=1),
        MeshConfig(fsdp=4, zero=2),
        MeshConfig(fsdp=2, tensor=2, pipeline=2),
    ],
)
def test_a_step(layout):
    config, params = tiny_model(hidden_size=32, num_layers=3)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2, weight_decay=0.1), 4)
    alone = make_state_functions(optimizer)
    state = alone.init(jax.tree.map(jnp.copy, params))
    grads, _ = add_gradients(contribution, alone.zeros(params), params)
    norm, after = alone.norm(grads), alone.apply(state, grads)

    place = Placement.make(layout, config)
    functions = make_state_functions(optimizer, place)
    state = functions.init(jax.tree.map(jnp.copy, place.put(params)))
    assert_placed(state.params, place, "parameters")
    assert_placed(state.opt_state, place, "optimizer")
    accumulate = place.jit(
        lambda grads, params: add_gradients(contribution, grads, params, place)[0],
        donate_argnums=0,
    )
    grads = accumulate(functions.zeros(state.params), state.params)
    assert_placed(grads, place, "gradients")
    assert float(functions.norm(grads)) == pytest.approx(float(norm), rel=1e-6)
    state = functions.apply(state, grads)
    assert_placed(state.params, place, "parameters")
    assert_placed(state.opt_state, place, "optimizer")

    saved = taken(state, place)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-7)
    jax.tree.map(close, jax.device_get(saved), jax.device_get(after))
    again = put(saved, place)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(again), jax.device_get(state))
    assert_placed(again.params, place, "parameters")
