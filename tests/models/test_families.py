# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Every family against numbers that transformers computed for it (scripts/make_family_golden.py).

The rows are longer than every sliding window and every original context.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_models import CASES, family_model, golden
from formula_weights import projections
from golden_files import unpack

from jaxrl_llm.checkpoint.hf_names import HF_NAMES
from jaxrl_llm.checkpoint.stacking import split_params
from jaxrl_llm.models.config import LayerTraits
from jaxrl_llm.models.heads import sequence_logprobs
from jaxrl_llm.models.hf_config import config_from_hf, config_to_hf
from jaxrl_llm.models.presets import FAMILIES
from jaxrl_llm.models.transformer import abstract_params, forward, logits, unstack_layers


@functools.partial(jax.jit, static_argnums=1)
def logits_of(params, config, tokens, positions, segments):
    return logits(params, forward(params, config, tokens, positions, segments), config)


def rows(name):
    tokens = jnp.asarray(golden(name)["tokens"], jnp.int32)
    return tokens, jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape)


def laid_out(name):
    """The first row padded on the left by 5, and both packed into one row, as [2, 77] arrays."""
    tokens = np.asarray(golden(name)["tokens"])
    t = tokens.shape[1]
    count, ones, none, pad = np.arange(t), np.ones(t), np.zeros(t), np.zeros(5)
    left = [(pad + 7, tokens[0], none), (pad, count, none), (pad, ones, none)]
    packed = [(*tokens, pad + 3), (count, count, pad), (ones, ones + 1, pad)]
    return [
        jnp.asarray(np.stack([np.concatenate(one), np.concatenate(two)]), jnp.int32)
        for one, two in zip(left, packed, strict=True)
    ]


# The others differ from these in numbers, not in code, or are two of a kind.
FULL = ("llama", "llama_linear", "llama_dynamic", "llama_yarn", "phi3", "qwen3_moe_plain")


def marked(name, full):
    return pytest.param(name, marks=pytest.mark.full) if full else name


@pytest.mark.parametrize("name", [marked(n, n in FULL) for n in CASES])
def test_logits_equal_those_of_transformers_padded_left_and_packed(name):
    config, params = family_model(name)
    expected = unpack(golden(name)["logits"])
    t = expected.shape[1]
    found = np.asarray(logits_of(params, config, *laid_out(name)))
    assert np.std(expected) > 0.3
    assert np.max(np.abs(found[0, 5 : 5 + t] - expected[0])) < 1e-4
    assert np.max(np.abs(found[1, :t] - expected[0])) < 1e-4
    assert np.max(np.abs(found[1, t : 2 * t] - expected[1])) < 1e-4


@pytest.mark.parametrize("name", CASES)
def test_configuration_and_count(name):
    stored = golden(name)
    config = config_from_hf(stored["config"])
    assert config == config_from_hf(stored["config_written"])
    assert config_from_hf(config_to_hf(config)) == config
    assert config.num_params == stored["parameters"]
    _, params = family_model(name)
    assert config.num_params == sum(x.size for x in jax.tree.leaves(params))


def test_every_family_has_a_golden_file():
    assert {golden(name)["config"]["model_type"] for name in CASES} == set(FAMILIES)


def test_layers_differ_as_their_family_says():
    window, full = LayerTraits(8, "global"), LayerTraits(None, "global")
    assert family_model("gemma2")[0].layers == (window, full, window, full)
    assert family_model("qwen2")[0].layers == (full, full, window, window)
    near = LayerTraits(8, "local")
    assert family_model("gemma3")[0].layers == (near, near, full, near)
    nope = LayerTraits(8, "none")
    assert family_model("smollm3")[0].layers == (full, nope, full, nope)


@pytest.mark.parametrize(
    "name", [marked(n, n != "gemma2") for n in CASES if "gradients" in golden(n)]
)
def test_gradients_of_the_mean_log_probability_equal_those_of_transformers(name):
    config, params = family_model(name)
    tokens, positions = rows(name)
    ones = jnp.ones_like(tokens)
    mask = positions > 0

    def mean_logp(params):
        logp, _ = sequence_logprobs(
            params, config, tokens, positions, ones, mask, num_targets=tokens.shape[1] - 1
        )
        return jnp.sum(logp) / jnp.sum(mask).astype(logp.dtype)

    value, grads = jax.jit(jax.value_and_grad(mean_logp))(params)
    stored = golden(name)["gradients"]
    assert abs(float(value) - stored["mean_logp"]) < 1e-5
    fetch = split_params(grads, config, HF_NAMES[config.family])
    assert set(fetch) == set(stored["projections"])
    scale = max(abs(x) for values in stored["projections"].values() for x in values)
    for tensor, expected in stored["projections"].items():
        np.testing.assert_allclose(
            projections(tensor, fetch[tensor]()), expected, atol=2e-5 * scale, rtol=1e-4
        )


def test_unstacked_layers_hold_the_experts_of_their_layer():
    _, params = family_model("mixtral")
    split = unstack_layers(params)["layers"]
    assert len(split) == 3
    np.testing.assert_array_equal(split[2]["gate"], params["layers"]["gate"][2])


def test_the_program_is_no_larger_for_more_layers():
    sizes = []
    for count in (4, 8):
        stored = dict(golden("gemma3")["config_written"], num_hidden_layers=count)
        del stored["layer_types"]
        config = config_from_hf(stored)
        shape = jax.ShapeDtypeStruct((2, 16), jnp.int32)
        traced = jax.jit(forward, static_argnums=1).trace(
            abstract_params(config), config, shape, shape, shape
        )
        sizes.append(len(traced.lower().as_text().splitlines()))
    assert sizes[0] == sizes[1]
