# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The run's own programs over abstract arguments: what training jits, lowered for a mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.algorithms.presets import resolve
from jaxrl_llm.models.placement import Placement
from jaxrl_llm.models.transformer import abstract_params
from jaxrl_llm.plan.memory import sampler_share
from jaxrl_llm.plan.workload import Workload
from jaxrl_llm.rollout.kv_cache import init_pages
from jaxrl_llm.rollout.layout import decode_slots, prefill_chunks
from jaxrl_llm.rollout.programs import decode, prefill
from jaxrl_llm.rollout.scheduler import Prefill
from jaxrl_llm.rollout.view import init_view, view_width
from jaxrl_llm.rollout.weights import pack
from jaxrl_llm.sharding.mesh import MeshConfig, replicated, rows
from jaxrl_llm.trainers.dry_run import abstract_batch
from jaxrl_llm.trainers.optimizers import make_optimizer
from jaxrl_llm.trainers.policy import make_train_functions

Lower = Callable[[], Any]
UPDATE, APPLY, LOGPROBS, PREFILL, DECODE = (
    "update",
    "optimiser",
    "log-probability",
    "prefill",
    "decode",
)


def train_programs(load: Workload, place: Placement) -> Iterator[tuple[str, Lower]]:
    """The trainer's programs: gradient of a micro-batch, optimiser step, log-probabilities."""
    algorithm = resolve(load.algo, group_size=load.group_size, max_tokens=load.new_tokens)
    functions = make_train_functions(
        place.model,
        algorithm.loss,
        make_optimizer(load.optimizer, load.updates),
        temperature=load.temperature,
        remat=load.remat,
    )
    params = _placed(place, abstract_params(load.model, jnp.dtype(load.dtype)), "parameters")
    grads = _like(place, jax.eval_shape(functions.state.zeros, params), "gradients")
    state = jax.eval_shape(functions.state.init, params)
    state = dataclasses.replace(
        state,
        updates=_whole(place, state.updates),
        params=params,
        opt_state=_like(place, state.opt_state, "optimizer"),
    )
    shape = load.micro, load.width, load.reach
    batch = abstract_batch(*shape, needs_ref=algorithm.needs_ref, valued=False, shared=load.shared)
    if "old log-probabilities" in load.forwards:
        batch = batch.replace(logp_old=batch.logp_sampler)
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows(place.mesh)), batch
    )
    counts = jax.tree.map(
        lambda x: _whole(place, np.asarray(x)),
        algorithm.counts(np.ones((1, 2), bool), np.ones((1, 2), np.int32)),
    )
    coefs = _coefficients(algorithm)

    def update(grads, params, batch, counts, coefs):
        grads, rest = functions.accumulate(
            grads, params, None, batch, counts, None, None, coefs, load.targets
        )
        return place.split(grads, "gradients"), rest

    def apply(state, grads):
        state = functions.state.apply(state, grads)
        return dataclasses.replace(
            state,
            params=place.split(state.params, "parameters"),
            opt_state=place.split(state.opt_state, "optimizer"),
        )

    if not algorithm.needs_batch_stats:
        program = jax.jit(update, donate_argnums=0)
        yield UPDATE, functools.partial(program.lower, grads, params, batch, counts, coefs)
    yield APPLY, functools.partial(jax.jit(apply, donate_argnums=0).lower, state, grads)
    yield LOGPROBS, functools.partial(functions.logprobs.lower, (params, None), batch, load.targets)


def sampler_placement(load: Workload, tensor: int, devices: list[Any]) -> Placement:
    """Copies of the sampler, each over `tensor` devices. What is split over `data` elsewhere is
    not split over copies: each has requests of its own."""
    copies = len(devices) // tensor
    grid = np.array(devices[: copies * tensor]).reshape(copies, tensor)
    mesh = Mesh(grid, ("copy", "tensor"), axis_types=(AxisType.Auto,) * 2)
    return Placement(mesh, MeshConfig(data=1, tensor=tensor), load.model)


def sampler_programs(
    load: Workload, sampler: MeshConfig, place: Placement, platform: str
) -> Iterator[tuple[str, Lower]]:
    """The sampler's programs, weights and pages split over `tensor` devices; all copies alike."""
    engine, dtype = load.sampler, jnp.dtype(load.dtype)
    model = dataclasses.replace(load.model, attention_backend=engine.attention_backend)
    share, tensor = sampler_share(load, sampler), sampler.tensor
    slots = -(-share.slots // 16) * 16
    viewed = platform == "cpu"
    form = "left" if viewed and dtype.itemsize >= 4 else "plain"
    stacked = abstract_params(load.model, dtype)
    shapes = jax.eval_shape(functools.partial(pack, form=form), stacked)
    params = _like(place, shapes, "parameters")
    heads = "tensor" if load.model.num_kv_heads % tensor == 0 and tensor > 1 else None
    where = NamedSharding(place.mesh, PartitionSpec(None, None, heads, None))
    cache = jax.eval_shape(lambda: init_pages(load.model, share.num_pages, engine.page_size, dtype))
    cache = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), cache)
    longest = engine.max_prompt_tokens + engine.max_new_tokens
    table = -(-longest // engine.page_size)
    whole = functools.partial(_whole, place)
    first = next(prefill_chunks([Prefill((0,), [1])], engine.prefill_tokens, table))
    chunk = jax.tree.map(whole, first.arrays)
    yield PREFILL, functools.partial(prefill.lower, params, model, form, cache, chunk)
    tables = whole(np.zeros((slots, table), np.int32))
    if viewed:
        width = view_width(longest, table * engine.page_size)
        view = jax.eval_shape(lambda: init_view(load.model, slots, width, dtype))
        cache, tables = jax.tree.map(whole, view), None
    steps = min(engine.decode_steps, engine.max_new_tokens)
    limit = whole(np.int32(steps))
    rows_ = jax.tree.map(whole, decode_slots([None] * slots))
    arguments = (params, model, form, cache, tables, rows_, limit, limit)
    yield DECODE, functools.partial(decode.lower, *arguments, steps=steps)


def _placed(place: Placement, tree: Any, kind: str) -> Any:
    """Parameters with stacked layers as this mesh keeps them, with their shardings."""
    return _like(place, jax.eval_shape(place.stage, tree), kind)


def _like(place: Placement, tree: Any, kind: str) -> Any:
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        tree,
        place.shardings(tree, kind),
    )


def _whole(place: Placement, x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated(place.mesh))


def _coefficients(algorithm: Any) -> dict[str, Any]:
    coefs = {}
    if algorithm.needs_ref and not algorithm.kl_in_reward:
        coefs["kl_coef"] = np.float32(0.0)
    if algorithm.needs_entropy_gradient:
        coefs["entropy_coef"] = np.float32(0.0)
    return coefs
