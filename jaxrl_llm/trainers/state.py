# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What an update changes, and the compiled functions that change it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Float

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.heads import sequence_logprobs
from jaxrl_llm.models.layers import accumulation_dtype
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.types import Batch


@struct.dataclass
class TrainState:
    """Everything of the model that a checkpoint holds.

    Attributes:
        updates: optimiser updates done so far.
    """

    updates: Any  # int []
    params: Any
    opt_state: Any


class TrainFunctions(NamedTuple):
    """Compiled programs of the trainer; each is pure.

    Attributes:
        init: params → TrainState.
        logprobs: (params, batch, num_targets) → (logp, entropy), both [N, T], without gradient.
        zeros: params → gradient accumulators, at least float32.
        accumulate: (accumulators, params, batch, counts, stats, coefs, num_targets) →
            (accumulators, (loss, metrics)); the old accumulators are donated.
        norm: gradients → their global norm.
        apply: (state, gradients) → state; the old state is donated.
    """

    init: Callable
    logprobs: Callable
    zeros: Callable
    accumulate: Callable
    norm: Callable
    apply: Callable


def make_train_functions(
    model_config: ModelConfig,
    loss: Callable,
    optimizer: optax.GradientTransformation,
    *,
    temperature: float,
    remat: bool,
) -> TrainFunctions:
    """Compile-on-call functions for one model, one loss and one optimiser.

    Args:
        loss: ``(logp, entropy, batch, counts, stats, **coefs) → (contribution, metrics)`` of a
            micro-batch: the contributions of all micro-batches of an optimiser batch sum to its
            loss, so gradients are simply added.
        temperature: τ of the policy.
        remat: recompute layers in the backward pass.
    """

    def logprobs(params: Params, batch: Batch, num_targets: int):
        return sequence_logprobs(
            params,
            model_config,
            batch.tokens,
            batch.positions,
            batch.segment_ids,
            batch.mask,
            batch.prefix_ids,
            batch.sources,
            num_targets=num_targets,
            temperature=temperature,
            remat=remat,
        )

    def accumulate(grads, params, batch, counts, stats, coefs, num_targets):
        def contribution(params):
            logp, entropy = logprobs(params, batch, num_targets)
            value, metrics = loss(logp, entropy, batch, counts, stats, **coefs)
            return value, {**metrics, **sampler_gap(logp, batch)}

        (value, metrics), new = jax.value_and_grad(contribution, has_aux=True)(params)
        grads = jax.tree.map(lambda total, g: total + g.astype(total.dtype), grads, new)
        return grads, (value, metrics)

    def apply(state: TrainState, grads: Params) -> TrainState:
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
        # Optax mixes its integer step count with floats, which strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            changes, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, changes)
        return TrainState(updates=state.updates + 1, params=params, opt_state=opt_state)

    return TrainFunctions(
        init=jax.jit(
            lambda params: TrainState(
                updates=jnp.zeros((), jnp.int32), params=params, opt_state=optimizer.init(params)
            ),
            donate_argnums=0,
        ),
        logprobs=jax.jit(logprobs, static_argnums=2),
        zeros=jax.jit(
            functools.partial(
                jax.tree.map, lambda p: jnp.zeros_like(p, accumulation_dtype(p.dtype))
            )
        ),
        accumulate=jax.jit(accumulate, static_argnums=6, donate_argnums=0),
        norm=jax.jit(optax.tree.norm),
        apply=jax.jit(apply, donate_argnums=0),
    )


def sampler_gap(
    logp: Float[Array, "N T"], batch: Batch
) -> dict[str, tuple[Float[Array, ""], Array]]:
    """Trainer against sampler on the trained tokens: (sum, count), (largest, 1) under "/max"."""
    logp = jax.lax.stop_gradient(logp)
    gap = jnp.where(batch.mask, logp - batch.logp_sampler.astype(logp.dtype), 0.0)
    count = jnp.sum(batch.mask).astype(logp.dtype)
    ratio = jnp.where(batch.mask, jnp.exp(jnp.clip(gap, -20.0, 20.0)), 0.0)
    return {
        "sampling/sampling_logp_difference/mean": (jnp.sum(jnp.abs(gap)), count),
        "sampling/sampling_logp_difference/max": (jnp.max(jnp.abs(gap)), jnp.ones_like(count)),
        "sampling/importance_sampling_ratio/mean": (jnp.sum(ratio), count),
    }
