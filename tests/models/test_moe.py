# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The experts against computing all of them, on every path."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import tiny_model

from jaxrl_llm.models import moe
from jaxrl_llm.models.layers import linear
from jaxrl_llm.models.moe import expert_mlp, load_balancing_loss, router_metrics, z_loss
from jaxrl_llm.models.transformer import routed_forward


def problem(experts=8, top_k=2, rows=(4, 64), d=16, f=24, **traits):
    config, params = tiny_model(
        hidden_size=d,
        num_experts=experts,
        experts_per_token=top_k,
        expert_size=f,
        num_layers=1,
        family="qwen3_moe",
        **traits,
    )
    layer = {name: value[0] for name, value in params["layers"].items()}
    draw = np.random.default_rng(0)
    x = jnp.asarray(draw.standard_normal((*rows, d)), jnp.float32)
    return config, layer, x


def all_experts(x, layer, config):
    """The definition: every expert computes every token, and most results get weight 0."""
    scores = jnp.einsum("ntd,ed->nte", x, layer["router"])
    p = jax.nn.softmax(scores, axis=-1)
    kept = p >= jax.lax.top_k(p, config.experts_per_token)[0][..., -1:]
    weights = jnp.where(kept, p, 0.0)
    if config.renormalize_experts:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    gate = jax.nn.silu(jnp.einsum("ntd,efd->ntef", x, layer["gate"]))
    h = gate * jnp.einsum("ntd,efd->ntef", x, layer["up"])
    out = jnp.einsum("ntef,edf->nted", h, layer["down"])
    return jnp.einsum("nte,nted->ntd", weights, out)


def value_and_grads(function, x, layer, config):
    draw = np.random.default_rng(1)
    direction = jnp.asarray(draw.standard_normal(x.shape), jnp.float32)
    loss = lambda x, layer: jnp.sum(function(x, layer, config) * direction)  # noqa: E731
    used = {name: layer[name] for name in ("router", "gate", "up", "down")}
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, used)


def assert_close(found, expected):
    largest = max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(expected))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert float(jnp.max(jnp.abs(a - b))) <= 1e-5 * largest


@pytest.mark.parametrize(
    ("experts", "top_k", "rows", "renormalize"),
    [(8, 2, (4, 64), True), (5, 3, (1, 7), False)],
)
def test_values_and_gradients_equal_those_of_all_experts(experts, top_k, rows, renormalize):
    config, layer, x = problem(experts, top_k, rows, renormalize_experts=renormalize)
    expected = value_and_grads(all_experts, x, layer, config)
    ours = value_and_grads(lambda *a: expert_mlp(*a)[0], x, layer, config)
    assert_close(ours, expected)


def test_the_path_of_accelerators_gives_the_same():
    _, layer, x = problem()
    rows = x.reshape(-1, x.shape[-1])
    _, chosen, _ = moe.route(rows, layer["router"], 2, True)
    experts = (layer["gate"], layer["up"], layer["down"])
    ragged = jax.jit(functools.partial(moe._ragged, act=jax.nn.silu))(rows, chosen, experts)
    blocks = jax.jit(functools.partial(moe._in_blocks, act=jax.nn.silu))(rows, chosen, experts)
    np.testing.assert_allclose(ragged, blocks, atol=1e-5)


def test_all_tokens_to_one_expert():
    config, layer, x = problem()
    away = -100.0 * jnp.sign(x[0, 0])[None, :]
    layer["router"] = layer["router"].at[:2].set(0.0).at[2:].set(away)
    x = jnp.broadcast_to(x[:1, :1], x.shape)
    run = lambda function: jax.jit(lambda x, layer: function(x, layer, config))(x, layer)  # noqa: E731
    assert_close(run(expert_mlp)[0], run(all_experts))


def test_compiled_flops_are_near_those_of_the_chosen_experts():
    """XLA counts a loop's body once, so the products of the other blocks are added to its count."""
    config, layer, x = problem(8, 2, (4, 256), d=64, f=96)

    def flops(function, *args):
        return jax.jit(function).lower(*args).compile().cost_analysis()["flops"]

    rows = x.shape[0] * x.shape[1]
    _, owner, _, size = moe.block_layout(jnp.zeros((rows, 2), jnp.int32), 8)
    block = jnp.zeros((size, 64), jnp.float32)
    wide = jnp.zeros((size, 96), jnp.float32)
    body = 2 * flops(linear, block, layer["gate"][0]) + flops(linear, wide, layer["down"][0])
    assert body == 3 * 2 * size * 64 * 96
    ours = flops(lambda x, layer: expert_mlp(x, layer, config)[0], x, layer)
    ours += (len(owner) - 1) * body
    everything = flops(lambda x, layer: all_experts(x, layer, config), x, layer)
    assert everything > 0.95 * rows * 8 * 3 * 2 * 64 * 96
    assert ours <= 1.3 * 2 / 8 * everything
    assert ours >= 2 * rows * 3 * 2 * 64 * 96


def test_blocks_hold_one_expert_each():
    chosen = jnp.asarray(np.random.default_rng(0).integers(0, 8, (256, 2)), jnp.int32)
    place, owner, used, size = moe.block_layout(chosen, 8)
    assert size == 16 and owner.shape == used.shape == (40,)
    assert len(np.unique(place)) == chosen.size
    np.testing.assert_array_equal(owner[place // size], chosen.reshape(-1))
    assert np.all(used[place // size])
    counts = np.bincount(chosen.reshape(-1), minlength=8)
    assert int(jnp.sum(used)) == int(np.sum(-(-counts // size)))


@pytest.mark.parametrize("parts", [2, pytest.param(4, marks=pytest.mark.full)])
def test_an_expert_axis_changes_nothing(parts):
    config, layer, x = problem()
    expected = value_and_grads(lambda *a: expert_mlp(*a)[0], x, layer, config)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:parts]), ("expert",))
    split = jax.sharding.NamedSharding(mesh, jax.P("expert"))
    names = ("gate", "up", "down")
    layer = {**layer, **{name: jax.device_put(layer[name], split) for name in names}}
    with jax.set_mesh(mesh):
        found = value_and_grads(lambda *a: expert_mlp(*a)[0], x, layer, config)
    assert_close(found, jax.device_get(expected))
    d_gate = found[1][1]["gate"]
    assert {s.data.shape[0] for s in d_gate.addressable_shards} == {8 // parts}


def test_statistics_and_losses_by_hand():
    config, layer, x = problem(experts=4, top_k=2, rows=(1, 3))
    counted = jnp.asarray([[True, True, False]])
    _, stats = jax.jit(lambda x, layer: expert_mlp(x, layer, config, counted))(x, layer)
    scores = np.asarray(linear(x, layer["router"]))[0, :2].astype(np.float64)
    p = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    hits = np.zeros((2, 4))
    for row, best in enumerate(np.argsort(-p, axis=-1)[:, :2]):
        hits[row, best] = 1
    np.testing.assert_allclose(stats.probabilities, p.sum(0), rtol=1e-5)
    np.testing.assert_allclose(stats.assignments, hits.sum(0))
    assert float(stats.tokens) == 2
    expected = 4 * np.sum(hits.mean(0) * p.mean(0))
    np.testing.assert_allclose(load_balancing_loss(stats), expected, rtol=1e-5)
    squares = np.log(np.exp(scores).sum(-1)) ** 2
    np.testing.assert_allclose(z_loss(stats), squares.mean(), rtol=1e-5)
    found = router_metrics(stats)
    np.testing.assert_allclose(found["router/max_load"], hits.sum(0).max() / hits.sum(0).mean())
    np.testing.assert_allclose(found["router/idle_experts"], np.mean(hits.sum(0) == 0))


def test_an_even_router_has_the_least_load_balancing_loss():
    even = moe.RouterStats(jnp.full(4, 2.0), jnp.full(4, 4.0), jnp.float32(0), jnp.float32(8))
    assert float(load_balancing_loss(even)) == 2.0  # k
    skewed = dataclasses.replace(
        even, probabilities=jnp.asarray([5.0, 1, 1, 1]), assignments=jnp.asarray([8.0, 8, 0, 0])
    )
    assert float(load_balancing_loss(skewed)) > 2.5


def test_without_a_counted_token_the_losses_are_0():
    none = moe.RouterStats(jnp.zeros(4), jnp.zeros(4), jnp.float32(0), jnp.float32(0))
    found = [load_balancing_loss(none), z_loss(none), *router_metrics(none).values()]
    assert [float(value) for value in found] == [0, 0, 0, 0, 0, 1]  # all experts are idle
    loss = lambda p: load_balancing_loss(dataclasses.replace(none, probabilities=p))  # noqa: E731 - short
    np.testing.assert_array_equal(jax.grad(loss)(jnp.zeros(4)), jnp.zeros(4))


def test_a_model_gives_statistics_of_every_layer_without_padding():
    config, params = tiny_model(
        num_experts=4, experts_per_token=2, expert_size=8, family="qwen3_moe"
    )
    tokens = jnp.asarray(np.arange(12).reshape(2, 6), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(6, dtype=jnp.int32)[None, :], (2, 6))
    segments = jnp.asarray([[1] * 6, [1] * 4 + [0] * 2], jnp.int32)
    hidden, stats = jax.jit(routed_forward, static_argnums=1)(
        params, config, tokens, positions, segments
    )
    assert stats.assignments.shape == (config.num_layers, 4)
    np.testing.assert_allclose(stats.tokens, 10)
    np.testing.assert_allclose(jnp.sum(stats.assignments, axis=1), 20)
    other = tokens.at[1, 4:].set(77)  # padding holds anything
    again, same = jax.jit(routed_forward, static_argnums=1)(
        params, config, other, positions, segments
    )
    np.testing.assert_allclose(same.probabilities, stats.probabilities, rtol=1e-6)
    np.testing.assert_allclose(again[1, :4], hidden[1, :4], atol=1e-6)
