# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""How parameters, gradients and optimiser state lie on a mesh."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from family_models import CASES, family_model
from tiny_model import tiny_model

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models.axes import axis_sizes, layer_axes, tree_axes
from jaxrl_llm.models.lora import LoraConfig, attach, init_adapter, merge
from jaxrl_llm.models.placement import Placement
from jaxrl_llm.models.shapes import layer_shapes
from jaxrl_llm.models.transformer import forward
from jaxrl_llm.sharding.mesh import MeshConfig
from jaxrl_llm.sharding.pipeline import unstage_layers

WIDE = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 4, "vocab_size": 256}


def bytes_of(tree, device):
    """What one device holds."""
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
        if shard.device == device
    )


def whole_bytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def test_every_parameter_of_every_family_has_axes():
    for name in CASES:
        config, params = family_model(name)
        assert set(layer_axes(config)) == set(layer_shapes(config))
        for (path, leaf), axes in zip(
            jax.tree_util.tree_leaves_with_path(params),
            jax.tree.leaves(tree_axes(params, config), is_leaf=lambda x: isinstance(x, tuple)),
            strict=True,
        ):
            assert len(axes) == leaf.ndim and None not in axes, (name, path, axes)
            for axis, size in zip(axes, leaf.shape, strict=True):
                units = axis_sizes(config).get(axis)
                assert units is None or size % units == 0, (name, path, axis, size)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_bytes_fall_as_the_zero_row_says(zero):
    config, params = tiny_model(**WIDE)
    place = Placement.make(MeshConfig(data=1, fsdp=4, tensor=2, zero=zero), config)
    placed = place.put(params)
    zeros = place.jit(lambda p: place.split(jax.tree.map(lambda x: x * 0.0, p), "gradients"))
    moments = place.jit(lambda p: place.split(optax.scale_by_adam().init(p), "optimizer"))
    parts = {1: (1, 1, 4), 2: (1, 4, 4), 3: (4, 4, 4)}[zero]
    norms = whole_bytes({k: v for k, v in params["layers"].items() if "norm" in k})
    norms += params["final_norm"].nbytes
    matrices = whole_bytes(params) - norms
    state = moments(placed)
    for tree, over in zip((placed, zeros(placed), state.mu), parts, strict=True):
        # Norms are as long as the residual stream, which `tensor` does not split.
        expected = matrices / (2 * over) + norms / over
        for device in place.mesh.devices.flat:
            assert bytes_of(tree, device) == expected
    for leaf in jax.tree.leaves((placed, state)):
        assert leaf.sharding.device_set == set(place.mesh.devices.flat)


@pytest.mark.parametrize(("stages", "rounds"), [(2, 1), (4, 1), (2, 2)])
def test_stages_hold_their_part_of_the_layers(stages, rounds):
    config, params = tiny_model(**WIDE)
    layout = MeshConfig(data=1, pipeline=stages, rounds=rounds)
    place = Placement.make(layout, config, jax.devices()[:stages])
    placed = place.put(params)
    for device in place.mesh.devices.flat:
        assert bytes_of(placed["layers"], device) * stages == whole_bytes(params["layers"])
    back = jax.device_get(place.take(placed))
    jax.tree.map(np.testing.assert_array_equal, back, jax.device_get(params))


def test_layers_that_do_not_divide_come_back():
    config, params = tiny_model(**WIDE | {"num_layers": 5})
    place = Placement.make(MeshConfig(data=2, pipeline=4), config)
    placed = place.put(params)
    assert placed["layers"]["q"].shape[:3] == (1, 4, 2)
    jax.tree.map(
        np.testing.assert_array_equal, jax.device_get(place.take(placed)), jax.device_get(params)
    )
    shapes = place.abstract(params, "parameters")
    for shape, leaf in zip(
        jax.tree.leaves(shapes), jax.tree.leaves(place.take(placed)), strict=True
    ):
        assert (shape.shape, shape.sharding) == (leaf.shape, leaf.sharding)


def test_layers_move_between_layouts_without_another_copy():
    config, params = tiny_model(**WIDE)
    trainer = Placement.make(MeshConfig(data=1, fsdp=2, pipeline=2, tensor=2), config)
    sampler = Placement.make(MeshConfig(data=4, tensor=2), config)
    placed = trainer.put(params)
    onto = sampler.shardings(params, "parameters")
    moved = trainer.take(placed, onto=onto)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(moved), jax.device_get(params))
    assert jax.tree.leaves(jax.tree.map(lambda x, s: x.sharding == s, moved, onto)).count(0) == 0
    # The program of the largest leaf needs no more room beside its result than the leaf itself.
    change = functools.partial(unstage_layers, layers=4)
    gate, where = placed["layers"]["gate"], onto["layers"]["gate"]
    need = jax.jit(change, out_shardings=where).lower(gate).compile().memory_analysis()
    assert need.output_size_in_bytes == gate.nbytes / 2
    assert need.temp_size_in_bytes <= gate.nbytes / 2


def test_adapters_and_score_heads_have_axes():
    config, params = tiny_model(**WIDE)
    lora = LoraConfig(rank=4, dora=True)
    adapter = init_adapter(config, lora, jax.random.key(0), params)
    tree = {"decoder": attach(params, adapter, lora), "score": {"weight": np.zeros((1, 32))}}
    axes = tree_axes(tree, config)
    down = axes["decoder"]["layers"]["down"]
    assert down.base == ("layers", "embed", "mlp")
    assert down.a == ("layers", "rank", "mlp") and down.b == ("layers", "embed", "rank")
    assert down.magnitude == ("layers", "embed")
    assert axes["score"]["weight"] == ("classes", "embed")
    assert tree_axes(adapter, config)["q"]["b"] == ("layers", "heads", "rank")
    place = Placement.make(MeshConfig(data=1, fsdp=2, pipeline=2, tensor=2), config)
    q = place.put(adapter)["q"]
    assert math.prod(q["b"].sharding.shard_shape(q["b"].shape)) * 4 == q["b"].size


def test_the_adapter_of_a_missing_layer_is_nothing():
    """Three layers in two stages of two: the fourth one's rows are as long as its magnitudes, 0."""
    config, params = tiny_model(**WIDE | {"num_layers": 3})
    lora = LoraConfig(rank=2, dora=True)
    adapter = init_adapter(config, lora, jax.random.key(0), params)
    draw = np.random.default_rng(1)
    for parts in adapter.values():
        parts["b"] = jnp.asarray(0.1 * draw.standard_normal(parts["b"].shape), jnp.float32)
    tokens = draw.integers(0, 256, (4, 8)).astype(np.int32)
    rows = tokens, np.tile(np.arange(8, dtype=np.int32), (4, 1)), np.ones_like(tokens)
    rows = jax.tree.map(jnp.asarray, rows)
    weights = draw.standard_normal((4, 8, config.hidden_size)).astype(np.float32)

    def gradients(model):
        def loss(adapter, params):
            return jnp.sum(weights * forward(attach(params, adapter, lora), model, *rows))

        return jax.value_and_grad(loss)

    expected, wanted = jax.jit(gradients(config))(adapter, params)
    place = Placement.make(MeshConfig(data=1, pipeline=2), config, jax.devices()[:2])
    placed = place.put(adapter), place.put(params)
    found, grads = place.jit(gradients(place.model))(*placed)
    assert abs(found - expected) <= 1e-5 * abs(expected)
    for leaf in jax.tree.leaves(grads):
        assert np.isfinite(leaf).all()
    for one, other in zip(jax.tree.leaves(wanted), jax.tree.leaves(place.take(grads)), strict=True):
        assert np.abs(one).max() > 0
        assert np.abs(one - other).max() <= 1e-5 * np.abs(one).max()
    merged = place.jit(functools.partial(merge, lora=lora))(placed[1], placed[0])
    for leaf in jax.tree.leaves(merged):
        assert np.isfinite(leaf).all()


def test_what_the_mesh_does_not_divide_stays_whole():
    config, params = tiny_model(**WIDE | {"vocab_size": 259})
    place = Placement.make(MeshConfig(data=2, tensor=4), config)
    placed = place.put(params)
    assert placed["embed"].sharding.shard_shape((259, 32)) == (259, 32)
    # Two key/value heads on four devices: the same on all.
    assert place.shardings(placed, "parameters")["layers"]["k"].spec == jax.P(None, None, None)
    assert place.shardings(placed, "parameters")["layers"]["q"].spec == jax.P(None, "tensor", None)


@pytest.mark.parametrize(
    ("layout", "traits", "words"),
    [
        ({"tensor": 8}, {}, ["8 for 4 attention heads", "--mesh.tensor=4"]),
        ({"data": 1, "tensor": 3}, {}, ["3 for 4 attention heads", "--mesh.tensor=2 or 4"]),
        ({"tensor": 4}, {"intermediate_size": 66}, ["66 columns of the MLP", "--mesh.tensor=2"]),
        ({"fsdp": 8}, {"hidden_size": 36}, ["hidden state", "--mesh.fsdp=4"]),
        ({"pipeline": 8}, {}, ["8 for 4 layers", "--mesh.pipeline=4"]),
        ({"pipeline": 2, "rounds": 3}, {}, ["mesh.rounds", "3 for 4 layers", "--mesh.rounds=2"]),
    ],
)
def test_a_model_that_does_not_fit_is_one_line(layout, traits, words):
    config, _ = tiny_model(**WIDE)
    with pytest.raises(ConfigError) as caught:
        Placement.make(MeshConfig(**layout), dataclasses.replace(config, **traits))
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)
