# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What one mesh wrote, another reads: the same numbers, and the next step's loss."""

import jax
import numpy as np
import optax
import pytest
from mesh_problems import RICH, parse, rl_problem

from jaxrl_llm.checkpoint.manager import CheckpointManager
from jaxrl_llm.models.placement import Placement


def optimizer_state(place, params):
    adam = optax.scale_by_adam()

    def one(params):
        grads = jax.tree.map(lambda p: p * p.dtype.type(0.5), params)
        with jax.numpy_dtype_promotion("standard"):
            state = adam.update(grads, adam.init(params))[1]
        return place.split(state, "optimizer")

    return place.jit(one)(params)


def test_a_checkpoint_continues_on_another_mesh(tmp_path):
    params, batch, loss = rl_problem(RICH, "float32")

    def next_loss(place, params):
        compute = place.jit(lambda p, rows: loss(p, rows, place.model))
        return float(compute(params, place.put_rows(batch)))

    first = Placement.make(parse("fsdp=8"), RICH)
    placed = first.put(params)
    saved = {
        "params": first.take(placed),
        "opt_state": first.take(optimizer_state(first, placed), "optimizer"),
    }
    manager = CheckpointManager(tmp_path)
    manager.save(1, saved, {})
    manager.wait()
    numbers, expected = jax.device_get(saved), next_loss(first, placed)

    for mesh, devices in [
        ("tensor=4,data=2", 8),
        ("data=1", 1),
        ("pipeline=2,rounds=2,fsdp=2,data=1", 4),
    ]:
        place = Placement.make(parse(mesh), RICH, jax.devices()[:devices])
        shapes = {
            "params": place.abstract(saved["params"], "parameters"),
            "opt_state": place.abstract(saved["opt_state"], "optimizer"),
        }
        arrays, _ = manager.restore(1, shapes)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(arrays), numbers)
        assert {len(x.sharding.device_set) for x in jax.tree.leaves(arrays)} == {devices}
        again = next_loss(place, place.put(arrays["params"]))
        assert again == pytest.approx(expected, rel=1e-5)
        state = place.put(arrays["opt_state"], "optimizer")
        back = jax.device_get(place.take(state, "optimizer"))
        jax.tree.map(np.testing.assert_array_equal, back, numbers["opt_state"])
    manager.close()
