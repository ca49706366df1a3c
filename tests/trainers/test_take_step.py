# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""One optimiser step: a batch that is not cut up ends where its pieces end."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm.trainers.state import add_gradients, make_state_functions, take_step


def test_a_batch_in_one_piece_is_its_pieces_added_up():
    batch = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    seen = []

    def stepped(pieces, dtype):
        functions = make_state_functions(optax.sgd(1.0))
        state = functions.init({"w": jnp.arange(3, dtype=dtype)})
        params = state.params

        def accumulate(grads, micro):
            seen.append(grads is None)

            def loss(trained):
                value = jnp.sum(jnp.tanh(jnp.asarray(micro, dtype) @ trained["w"])) / 4
                return value.astype(jnp.float32), {"n": (jnp.float32(len(micro)), 1.0)}

            grads, told = add_gradients(loss, grads, params)
            assert grads["w"].dtype == jnp.float32
            return grads, told

        state, metrics = take_step(functions, state, pieces, accumulate, step=0)
        return np.asarray(state.params["w"], np.float32), metrics

    whole, told = stepped(iter([batch]), jnp.float32)
    parts, told_of_parts = stepped(iter([batch[:1], batch[1:]]), jnp.float32)
    assert seen == [True, False, False]
    np.testing.assert_allclose(whole, parts, rtol=1e-6)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(told[name], told_of_parts[name], rtol=1e-6)
    by_hand = jax.grad(lambda w: jnp.sum(jnp.tanh(batch @ w)) / 4)(jnp.arange(3.0))
    np.testing.assert_allclose(whole, np.arange(3) - np.asarray(by_hand), rtol=1e-6)
    stepped([batch], jnp.bfloat16)
