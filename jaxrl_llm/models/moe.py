# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts MLP: router, experts, and the statistics that its losses need.

Each token goes to k of E experts (https://arxiv.org/abs/1701.06538). On GPU and TPU the tokens,
sorted by expert, pass through `jax.lax.ragged_dot`. On a CPU that function computes more than all
experts, so there they are sorted into blocks that belong to one expert each, padded to whole
blocks; a block that holds no token is skipped.

Under a mesh (`jax.set_mesh`) with an axis "expert" each device computes its own experts' tokens and
the parts are summed.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers import ACTIVATIONS, accumulation_dtype, linear

EXPERT_AXIS = "expert"
MIN_BLOCK, MAX_BLOCK = 8, 256  # rows; a block of one row would have other last bits


@struct.dataclass
class RouterStats:
    """Sums over the counted tokens of a layer; stacked [L, …] for a model, and they add up over
    micro-batches.

    Attributes:
        probabilities: Σ softmax(router logits), per expert.
        assignments: how many of the tokens chose each expert.
        z: Σ logsumexp(router logits)².
        tokens: how many there are.
    """

    probabilities: Any  # float [E]
    assignments: Any  # float [E]
    z: Any  # float []
    tokens: Any  # float []


def expert_mlp(
    x: Float[Array, "N T D"],
    layer: dict[str, Any],
    config: ModelConfig,
    counted: Bool[Array, "N T"] | None = None,
) -> tuple[Float[Array, "N T D"], RouterStats]:
    """``Σ_j weight_j · down_e(act(gate_e(x)) · up_e(x))`` over the experts e that a token chose.

    Args:
        counted: tokens that enter the statistics (not padding); None: all.
    """
    n, t, d = x.shape
    rows = x.reshape(-1, d)
    with jax.named_scope("router"):
        weights, chosen, stats = route(
            rows,
            layer["router"],
            config.experts_per_token,
            config.renormalize_experts,
            None if counted is None else counted.reshape(-1),
        )
    experts = (layer["gate"], layer["up"], layer["down"])
    apply = functools.partial(_apply_experts, activation=config.activation)
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.shape.get(EXPERT_AXIS, 1) > 1:
        apply = _over_expert_axis(apply, mesh)
    with jax.named_scope("experts"):
        out = apply(rows, weights, chosen, experts)
    return out.reshape(n, t, d), stats


def route(
    x: Float[Array, "M D"],
    router: Float[Array, "E D"],
    top_k: int,
    renormalize: bool,
    counted: Bool[Array, " M"] | None = None,
) -> tuple[Float[Array, "M k"], Int[Array, "M k"], RouterStats]:
    """Weights and indices of the experts that each token goes to.

    The k largest of ``softmax(x·routerᵀ)``, in ≥ float32, divided by their sum if `renormalize`.
    """
    wide = accumulation_dtype(x.dtype)
    scores = linear(x, router).astype(wide)
    probabilities = jax.nn.softmax(scores, axis=-1)
    weights, chosen = jax.lax.top_k(probabilities, top_k)
    if renormalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    real = jnp.ones(x.shape[0], wide) if counted is None else counted.astype(wide)
    hits = jnp.sum(jax.nn.one_hot(chosen, router.shape[0], dtype=wide), axis=1)
    stats = RouterStats(
        probabilities=jnp.einsum("m,me->e", real, probabilities),
        assignments=jnp.einsum("m,me->e", real, hits),
        z=jnp.sum(real * jnp.square(jax.nn.logsumexp(scores, axis=-1))),
        tokens=jnp.sum(real),
    )
    return weights, chosen.astype(jnp.int32), stats


def load_balancing_loss(stats: RouterStats) -> Float[Array, ""]:
    """``E · Σ_e f_e · P_e`` (Switch Transformer, https://arxiv.org/abs/2101.03961, Eq. 4–6).

    f_e: assignments to expert e per token, P_e: mean router probability, both over all layers and
    tokens that `stats` counts; k where all experts are used alike. Multiply with
    `config.router_aux_coef`.
    """
    return load_balancing_part(stats, assigned_shares(stats), jnp.sum(stats.tokens))


def assigned_shares(stats: RouterStats) -> Float[Array, " E"]:
    """f_e: assignments to each expert per token, over all layers."""
    assignments = stats.assignments.reshape(-1, stats.assignments.shape[-1])
    return jnp.sum(assignments, axis=0) / jnp.maximum(jnp.sum(stats.tokens), 1)


def load_balancing_part(
    stats: RouterStats, shares: Float[Array, " E"], tokens: Float[Array, ""] | float
) -> Float[Array, ""]:
    """What the tokens of `stats` add to the load-balancing loss of a batch.

    Args:
        shares: f_e of the whole batch.
        tokens: how many the whole batch has, times layers.
    """
    experts = shares.shape[0]
    probabilities = jnp.sum(stats.probabilities.reshape(-1, experts), axis=0)
    return experts * jnp.sum(shares * probabilities) / jnp.maximum(tokens, 1)


def z_loss(stats: RouterStats) -> Float[Array, ""]:
    """Mean of logsumexp(router logits)² over tokens and layers (ST-MoE,
    https://arxiv.org/abs/2202.08906, Eq. 5)."""
    return jnp.sum(stats.z) / jnp.maximum(jnp.sum(stats.tokens), 1)


def router_metrics(stats: RouterStats) -> dict[str, Float[Array, ""]]:
    """Over all layers: the losses, the busiest expert's share of its fair share (1 is even), the
    part of all (layer, expert) pairs that no token chose."""
    load = stats.assignments.reshape(-1, stats.assignments.shape[-1])
    share = load / jnp.maximum(jnp.mean(load, axis=-1, keepdims=True), 1e-9)
    return {
        "router/load_balancing_loss": load_balancing_loss(stats),
        "router/z_loss": z_loss(stats),
        "router/max_load": jnp.max(share),
        "router/idle_experts": jnp.mean((load == 0).astype(load.dtype)),
    }


def _over_expert_axis(apply, mesh):
    """Each device along the axis applies its own experts; tokens are the same on all of them."""
    count = mesh.shape[EXPERT_AXIS]
    spec = jax.P(EXPERT_AXIS)

    def local(rows, weights, chosen, experts):
        each = experts[0].shape[0]
        first = jax.lax.axis_index(EXPERT_AXIS) * each
        mine = chosen - first
        here = (mine >= 0) & (mine < each)
        # Other devices' tokens get the index that is one too many, whose blocks are never computed.
        out = apply(rows, weights, jnp.where(here, mine, each), experts)
        return jax.lax.psum(out, EXPERT_AXIS)

    def sharded(rows, weights, chosen, experts):
        if experts[0].shape[0] % count:
            return apply(rows, weights, chosen, experts)
        return jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(jax.P(), jax.P(), jax.P(), spec),
            out_specs=jax.P(),
            axis_names={EXPERT_AXIS},
        )(rows, weights, chosen, experts)

    return sharded


def _apply_experts(rows, weights, chosen, experts, *, activation: str) -> Float[Array, "M D"]:
    """A chosen index ≥ E is no expert: its part is 0."""
    act = ACTIVATIONS[activation]
    on_cpu = functools.partial(_in_blocks, act=act)
    elsewhere = functools.partial(_ragged, act=act)
    parts = jax.lax.platform_dependent(rows, chosen, experts, cpu=on_cpu, default=elsewhere)
    wide = accumulation_dtype(rows.dtype)
    return jnp.einsum("mkd,mk->md", parts.astype(wide), weights.astype(wide)).astype(rows.dtype)


def _ragged(rows, chosen, experts, *, act) -> Float[Array, "M k D"]:
    gate, up, down = experts
    count, k = gate.shape[0], chosen.shape[1]
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=count).astype(jnp.int32)
    wide = accumulation_dtype(rows.dtype)

    def product(x, w):
        out = jax.lax.ragged_dot(x, w.swapaxes(1, 2), sizes, preferred_element_type=wide)
        return out.astype(x.dtype)

    x = rows[order // k]
    out = product(act(product(x, gate)) * product(x, up), down)
    out = jnp.where((flat[order] < count)[:, None], out, 0.0)
    return jnp.zeros_like(out).at[order].set(out).reshape(*chosen.shape, -1)


def block_layout(
    chosen: Int[Array, "M k"], experts: int
) -> tuple[Int[Array, " A"], Int[Array, " blocks"], Bool[Array, " blocks"], int]:
    """Where each of the A = M·k (token, expert) pairs goes, in blocks of one expert each.

    Returns:
        place of each pair among blocks·size rows (too large a number for a pair without an expert),
        the expert of each block, whether it holds a pair, and the size.
    """
    pairs = chosen.size
    size = block_size(pairs, experts)
    blocks = pairs // size + experts
    flat = chosen.reshape(-1)
    counts = jnp.bincount(flat, length=experts + 1).astype(jnp.int32)
    whole = -(-counts[:experts] // size)
    ends = jnp.cumsum(whole, dtype=jnp.int32)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    group_starts = jnp.cumsum(counts, dtype=jnp.int32) - counts
    within = jnp.arange(pairs, dtype=jnp.int32) - group_starts[flat[order]]
    first_rows = jnp.concatenate([(ends - whole) * size, jnp.full((1,), blocks * size, jnp.int32)])
    place = jnp.zeros(pairs, jnp.int32).at[order].set(first_rows[flat[order]] + within)
    index = jnp.arange(blocks, dtype=jnp.int32)
    owner = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
    return place, jnp.minimum(owner, experts - 1), index < ends[-1], size


def block_size(pairs: int, experts: int) -> int:
    """Rows of a block: a quarter of an expert's mean share, so padding adds at most a quarter."""
    quarter = max(pairs // (4 * experts), 1)
    return int(np.clip(1 << (quarter.bit_length() - 1), MIN_BLOCK, MAX_BLOCK))


def _in_blocks(rows, chosen, experts, *, act) -> Float[Array, "M k D"]:
    gate, up, down = experts
    m, k = chosen.shape
    place, owner, used, size = block_layout(chosen, gate.shape[0])
    blocks = owner.shape[0]
    tokens = jnp.arange(m * k, dtype=jnp.int32) // k
    source = jnp.full(blocks * size, m, jnp.int32).at[place].set(tokens, mode="drop")
    padded = jnp.concatenate([rows, jnp.zeros((1, rows.shape[1]), rows.dtype)])
    x = padded[source].reshape(blocks, size, -1)
    h = act(block_linear(x, gate, owner, used)) * block_linear(x, up, owner, used)
    out = block_linear(h, down, owner, used).reshape(blocks * size, -1)
    nothing = jnp.zeros((1, out.shape[1]), out.dtype)
    out = jnp.concatenate([out, nothing])[jnp.minimum(place, blocks * size)]
    return out.reshape(m, k, -1)


@jax.custom_vjp
def block_linear(
    x: Float[Array, "blocks size i"],
    w: Float[Array, "E o i"],
    owner: Int[Array, " blocks"],
    used: Bool[Array, " blocks"],
) -> Float[Array, "blocks size o"]:
    """``x[b] @ w[owner[b]].T`` for every used block, 0 for the others, one block after the other.

    The backward pass adds to one [E, o, i] array in place; the derivative that JAX would make holds
    an array of that size for every block.
    """
    wide = accumulation_dtype(x.dtype)

    def step(carry, block):
        rows, expert, is_used = block

        def product():
            part = jax.lax.dynamic_index_in_dim(w, expert, keepdims=False)
            return jnp.einsum("si,oi->so", rows, part, preferred_element_type=wide).astype(x.dtype)

        empty = _zeros((x.shape[1], w.shape[1]), x.dtype, x, w)
        return carry, jax.lax.cond(is_used, product, lambda: empty)

    return jax.lax.scan(step, None, (x, owner, used))[1]


def _block_linear_fwd(x, w, owner, used):
    return block_linear(x, w, owner, used), (x, w, owner, used)


def _block_linear_bwd(residuals, d_out):
    x, w, owner, used = residuals
    wide = accumulation_dtype(x.dtype)

    def step(d_w, block):
        rows, d_rows, expert, is_used = block

        def product(d_w):
            part = jax.lax.dynamic_index_in_dim(w, expert, keepdims=False)
            d_x = jnp.einsum("so,oi->si", d_rows, part, preferred_element_type=wide)
            new = jnp.einsum("so,si->oi", d_rows, rows, preferred_element_type=wide)
            old = jax.lax.dynamic_index_in_dim(d_w, expert, keepdims=False)
            d_w = jax.lax.dynamic_update_index_in_dim(d_w, old + new, expert, 0)
            return d_w, d_x.astype(x.dtype)

        skip = lambda d_w: (d_w, _zeros(rows.shape, x.dtype, d_out, w))  # noqa: E731 - short
        return jax.lax.cond(is_used, product, skip, d_w)

    start = _zeros(w.shape, wide, d_out, x)
    d_w, d_x = jax.lax.scan(step, start, (x, d_out, owner, used))
    return d_x, d_w.astype(w.dtype), None, None


block_linear.defvjp(_block_linear_fwd, _block_linear_bwd)


def _zeros(shape: tuple[int, ...], dtype, *like: Array) -> Array:
    """Zeros that, inside `shard_map`, vary over the mesh axes over which `like` does."""
    zeros = jnp.zeros(shape, dtype)
    for x in like:
        zeros = jnp.where(jnp.zeros(shape, bool), x.reshape(-1)[0].astype(dtype), zeros)
    return zeros
