# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Run by test_processes.py: one of several processes that take the same steps together.

``python process_steps.py PORT PROCESSES INDEX MESH [hang] [late]``: prints losses and gradient
norms of updates as JSON. With `hang` a process other than 0 stops for good after its first step,
with `late` it begins that one after 40 s.
"""

from __future__ import annotations

import json
import os
import sys
import time

import jax


def main(port: str, processes: int, index: int, mesh: str, how: list[str]) -> None:
    from jaxrl_llm.sharding.joining import start
    from jaxrl_llm.sharding.processes import ProcessConfig, Watchdog

    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        start(ProcessConfig(f"localhost:{port}", processes, index, lost_after=3.0))
    import jax.numpy as jnp
    import optax
    from mesh_problems import PLAIN, accumulator, micro_batches, parse, rl_problem

    from jaxrl_llm.models.placement import Placement
    from jaxrl_llm.sharding.processes import connect

    params, batch, loss = rl_problem(PLAIN, "float32")
    place = Placement.make(parse(mesh), PLAIN)
    optimizer = optax.adam(1e-2)

    def apply(params, state, grads):
        with jax.numpy_dtype_promotion("standard"):
            changes, state = optimizer.update(grads, state)
        params = optax.apply_updates(params, changes)
        return place.split(params, "parameters"), place.split(state, "optimizer")

    init = place.jit(lambda p: place.split(optimizer.init(p), "optimizer"))
    zeros = place.jit(lambda p: place.split(jax.tree.map(jnp.zeros_like, p), "gradients"))
    accumulate = place.jit(accumulator(loss, place), donate_argnums=0)
    apply = place.jit(apply, donate_argnums=(0, 1))
    norm = place.jit(optax.tree.norm)
    with Watchdog(3.0):
        connect(place.mesh)
        if "late" in how and index > 0:
            time.sleep(40)
        params = place.put(params)
        state, found = init(params), []
        for _ in range(3):
            grads, total = zeros(params), 0.0
            for rows in micro_batches(batch):
                placed = place.put_rows(rows)
                grads, value = accumulate(grads, params, placed)
                total += float(value)
            found.append([total, float(norm(grads))])
            params, state = apply(params, state, grads)
            print(json.dumps({"step": len(found)}), flush=True)
            if "hang" in how and index > 0:
                time.sleep(1000)
        leaves = jax.tree.leaves(params)
        result = {
            "steps": found,
            "rows": sorted(
                {shard.index[0].start or 0 for shard in placed.tokens.addressable_shards}
            ),
            "addressable": all(leaf.is_fully_addressable for leaf in leaves),
            "devices": len(jax.devices()),
            "pid": os.getpid(),
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:2], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])
