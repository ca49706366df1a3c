# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What an update changes, and one optimiser step, the same for everything that learns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from jaxrl_llm.errors import NonFinite
from jaxrl_llm.models.layers import accumulation_dtype
from jaxrl_llm.models.placement import FREE, Place
from jaxrl_llm.trainers.metrics import Sums


@struct.dataclass
class TrainState:
    """What a checkpoint holds of something that learns.

    Attributes:
        updates: optimiser updates done so far.
        params: what is trained: parameters, an adapter, a critic.
    """

    updates: Any  # int []
    params: Any
    opt_state: Any


class StateFunctions(NamedTuple):
    """Compiled programs over states; each is pure.

    Attributes:
        init: params → TrainState; params are donated.
        zeros: params → gradient accumulators, at least float32.
        norm: gradients → their global norm.
        apply: (state, gradients) → state; the old state is donated.
    """

    init: Callable
    zeros: Callable
    norm: Callable
    apply: Callable


def make_state_functions(
    optimizer: optax.GradientTransformation, place: Place = FREE
) -> StateFunctions:
    """Compile-on-call functions for one optimiser, over states that lie as `place` says."""

    def init(params: Any) -> TrainState:
        return TrainState(
            updates=jnp.zeros((), jnp.int32),
            params=place.split(params, "parameters"),
            opt_state=place.split(optimizer.init(params), "optimizer"),
        )

    def zeros(params: Any) -> Any:
        grads = jax.tree.map(lambda p: jnp.zeros_like(p, accumulation_dtype(p.dtype)), params)
        return place.split(grads, "gradients")

    def apply(state: TrainState, grads: Any) -> TrainState:
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
        grads = place.split(grads, "optimizer")
        # Optax mixes its integer step count with floats, which strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            changes, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, changes)
        return TrainState(
            updates=state.updates + 1,
            params=place.split(params, "parameters"),
            opt_state=place.split(opt_state, "optimizer"),
        )

    return StateFunctions(
        init=place.jit(init, donate_argnums=0),
        zeros=place.jit(zeros),
        norm=place.jit(optax.tree.norm),
        apply=place.jit(apply, donate_argnums=0),
    )


def taken(state: TrainState, place: Place) -> TrainState:
    """A state as checkpoints hold it, with stacked layers [L, …], whatever the mesh."""
    return state.replace(
        params=place.take(state.params), opt_state=place.take(state.opt_state, "optimizer")
    )


def put(state: TrainState, place: Place) -> TrainState:
    """The inverse of `taken`, on the mesh of `place`."""
    return state.replace(
        params=place.put(state.params), opt_state=place.put(state.opt_state, "optimizer")
    )


def add_gradients(
    contribution: Callable, grads: Any | None, trained: Any, place: Place = FREE
) -> tuple[Any, tuple[Any, Any]]:
    """Gradients plus those of ``contribution(trained) → (value, metrics)``, and (value, metrics).

    The contributions of all micro-batches of an optimiser batch sum to its loss, so gradients are
    simply added.

    Args:
        grads: those of the other micro-batches, at least float32; None where there are none.
    """
    (value, metrics), new = jax.value_and_grad(contribution, has_aux=True)(trained)
    if grads is None:
        grads = jax.tree.map(lambda g: g.astype(accumulation_dtype(g.dtype)), new)
    else:
        grads = jax.tree.map(lambda total, g: total + g.astype(total.dtype), grads, new)
    return place.split(grads, "gradients"), (value, metrics)


def take_step(
    functions: StateFunctions,
    state: TrainState,
    micro_batches: Iterable[Any],
    accumulate: Callable,
    *,
    step: int,
    learner: str = "",
) -> tuple[TrainState, dict[str, float]]:
    """One optimiser step: gradients of micro-batches added up, checked and applied.

    Args:
        accumulate: (gradients or None, micro-batch) → (gradients, (contribution, metrics)).
        step: for the error.
        learner: whose step it is, where there are several: "critic".

    Returns:
        the new state, and the metrics of its batch with "loss" and "grad_norm".

    Raises:
        NonFinite: a loss or gradient; the state is as before.
    """
    micro_batches = list(micro_batches)
    # A batch that is not cut up saves two passes over all gradients.
    sums, grads = Sums(), functions.zeros(state.params) if len(micro_batches) > 1 else None
    for micro in micro_batches:
        grads, (loss, metrics) = accumulate(grads, micro)
        sums.add({**metrics, "loss/sum": (loss, 1.0)})
    norm = float(functions.norm(grads))
    metrics = sums.means() | {"grad_norm": norm}
    if not (np.isfinite(metrics["loss"]) and np.isfinite(norm)):
        what = f"the {learner}'s loss or gradient" if learner else "a loss or gradient"
        rate = f"a lower {learner}.learning_rate" if learner else "a lower learning rate"
        raise NonFinite(
            f"{what} is not finite in step {step + 1}",
            got=f"loss {metrics['loss']}, gradient norm {norm}",
            hint=rate,
        )
    return functions.apply(state, grads), metrics
