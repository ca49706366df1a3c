# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Layers in stages on the mesh axis `pipeline`: GPipe, and the circular schedule of v rounds.

Layers [L, …] are stored as [v, S, k, …], the second axis split over S groups of devices: stage s
holds the layers (r·S + s)·k … (r·S + s)·k + k − 1 of every round r. A missing layer at the end is
zeros and hands its input on. In every tick all stages work side by side (`vmap`), each on another
micro-batch, and hand the result to the next one (`roll`, a collective-permute); after the last a
micro-batch comes back to the first for the next round. M micro-batches need M·v + S − 1 ticks, of
which S − 1 are idle for each stage (GPipe, https://arxiv.org/abs/1811.06965; rounds as the
interleaved stages of https://arxiv.org/abs/2104.04473, §2.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from jaxrl_llm.sharding.rules import constrain

Stage = Callable[[Any, Any, Array, Any], tuple[Array, Any]]
"""(weights [k, …], flags [k], x [R, T, D], rows [R, …]) → (x, statistics [k, …] or None)."""


def ticks(microbatches: int, stages: int, rounds: int = 1) -> int:
    """``M·v + S − 1``: steps in each of which every stage does one run of its layers."""
    return microbatches * rounds + stages - 1


def bubble(microbatches: int, stages: int, rounds: int = 1) -> float:
    """The part of its ticks in which a stage has nothing to do, ``(S − 1) / (M·v + S − 1)``."""
    return (stages - 1) / ticks(microbatches, stages, rounds)


def stage_layers(
    x: Shaped[Array, "L ..."] | np.ndarray, stages: int, rounds: int
) -> Shaped[Array, "v S k ..."] | np.ndarray:
    """Stacked layers as stages; zeros where layers are missing at the end."""
    runs = stages * rounds
    each = -(-x.shape[0] // runs)
    missing = runs * each - x.shape[0]
    if missing:
        numpy = np if isinstance(x, np.ndarray) else jnp
        x = numpy.concatenate([x, numpy.zeros((missing, *x.shape[1:]), x.dtype)])
    return x.reshape(rounds, stages, each, *x.shape[1:])


def unstage_layers(
    x: Shaped[Array, "v S k ..."] | np.ndarray, layers: int
) -> Shaped[Array, "L ..."] | np.ndarray:
    """The inverse of `stage_layers`: the first so many layers, in order."""
    return x.reshape(-1, *x.shape[3:])[:layers]


def run_pipeline(
    stage: Stage,
    weights: Any,
    flags: Any,
    x: Float[Array, "N T D"],
    rows: Any,
    *,
    microbatches: int,
) -> tuple[Float[Array, "N T D"], Any]:
    """`x` through all layers, and the statistics of each layer [v·S·k, …], summed over rows.

    Args:
        stage: one run of layers, a scan over them.
        weights, flags: leaves [v, S, k, …].
        rows: arrays [N, …] that every layer needs of its rows.
        microbatches: M ≤ N; ≥ S where v > 1. Rows are dealt to micro-batches in turn, so that each
            device keeps its own; N that M does not divide is filled up with rows of zeros.
    """
    rounds, stages = jax.tree.leaves(weights)[0].shape[:2]
    assert rounds == 1 or microbatches >= stages, (rounds, microbatches, stages)
    count = x.shape[0]
    x, rows = jax.tree.map(lambda a: _deal(a, microbatches), (x, rows))
    index = jnp.arange(stages)
    every = jax.vmap(stage, spmd_axis_name="pipeline")

    def work(weights, flags, state, rows, t):
        """All stages in tick t: micro-batch u mod M in round u div M, u = t − s."""
        u = t - index
        now = jnp.clip(u // microbatches, 0, rounds - 1)
        mine, my_flags = jax.tree.map(lambda w: _of_round(w, now), (weights, flags))
        my_rows = jax.tree.map(lambda a: _staged(a[u % microbatches]), rows)
        out, stats = every(mine, my_flags, state, my_rows)
        busy = (u >= 0) & (u < microbatches * rounds)
        return _staged(out), _by_round(stats, now, busy, rounds)

    # Nothing inside a tick is kept for the backward pass but what the stages began with.
    work = jax.checkpoint(work)

    def tick(carry, t):
        waiting, state, total = carry
        fed = jax.lax.dynamic_index_in_dim(waiting, t % microbatches, 1, keepdims=False)
        first = (index == 0)[:, None, None, None]
        out, stats = work(weights, flags, jnp.where(first, fed, state), rows, t)
        total = jax.tree.map(jnp.add, total, stats)
        state = _staged(jnp.roll(out, 1, axis=0))
        # What came back from the last stage waits, at the first, for its next round or the end;
        # the others keep what passes through them and never read it.
        place = (t - stages + 1) % microbatches
        old = jax.lax.dynamic_index_in_dim(waiting, place, 1, keepdims=False)
        kept = jnp.where(t >= stages - 1, state, old)
        waiting = jax.lax.dynamic_update_index_in_dim(waiting, kept, place, 1)
        return (_waiting(waiting), state, total), None

    waiting = _waiting(jnp.broadcast_to(x[None], (stages, *x.shape)))
    state = _staged(jnp.zeros((stages, *x.shape[1:]), x.dtype))
    shapes = jax.eval_shape(work, weights, flags, state, rows, jnp.zeros((), jnp.int32))[1]
    total = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    steps = jnp.arange(ticks(microbatches, stages, rounds))
    (waiting, _, total), _ = jax.lax.scan(tick, (waiting, state, total), steps)
    # A sum is one all-reduce; the compiler would gather the buffers of all stages for an index.
    done = jnp.sum(jnp.where((index == 0)[:, None, None, None, None], waiting, 0.0), axis=0)
    done = constrain(done, None, "rows", None, None)
    out = jnp.swapaxes(done, 0, 1).reshape(-1, *x.shape[2:])[:count]
    return out, jax.tree.map(lambda s: s.reshape(-1, *s.shape[3:]), total)


def _deal(x: Shaped[Array, "N ..."], parts: int) -> Shaped[Array, "M R ..."]:
    """Row n to micro-batch n mod M."""
    missing = -x.shape[0] % parts
    if missing:
        x = jnp.concatenate([x, jnp.zeros((missing, *x.shape[1:]), x.dtype)])
    x = jnp.swapaxes(x.reshape(-1, parts, *x.shape[1:]), 0, 1)
    return constrain(x, None, "rows", *(None,) * (x.ndim - 2))


def _of_round(
    w: Shaped[Array, "v S k ..."] | np.ndarray, now: Int[Array, " S"]
) -> Shaped[Array, "S k ..."]:
    """What each stage works with in its round."""
    if w.shape[0] == 1:
        return jnp.asarray(w)[0]
    pick = lambda one, r: jax.lax.dynamic_index_in_dim(one, r, 0, keepdims=False)  # noqa: E731
    return jax.vmap(pick, in_axes=(1, 0), spmd_axis_name="pipeline")(jnp.asarray(w), now)


def _by_round(stats: Any, now: Int[Array, " S"], busy: Any, rounds: int) -> Any:
    """Statistics [S, k, …] of busy stages at their place in [v, S, k, …], 0 elsewhere."""
    here = (jnp.arange(rounds)[:, None] == now[None, :]) & busy[None, :]

    def place(s):
        where = here.reshape(*here.shape, *(1,) * (s.ndim - 1))
        return jnp.where(where, s[None], jnp.zeros((), s.dtype))

    return jax.tree.map(place, stats)


def _staged(x: Shaped[Array, "S R ..."]) -> Shaped[Array, "S R ..."]:
    return constrain(x, "stage", "rows", *(None,) * (x.ndim - 2))


def _waiting(x: Shaped[Array, "S M R ..."]) -> Shaped[Array, "S M R ..."]:
    return constrain(x, "stage", None, "rows", *(None,) * (x.ndim - 3))
