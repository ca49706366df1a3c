# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Formulas beside the configuration against the products that the traced program makes."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from family_models import family_model

from jaxrl_llm.models.transformer import abstract_params, forward, logits

ROWS, LENGTH = 2, 48


def product_flops(jaxpr) -> float:
    """2·m·n·k of every dot_general, inner programs included, loops by their length."""
    total = 0.0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contract, _), _ = eqn.params["dimension_numbers"]
            lhs = eqn.invars[0].aval.shape
            total += (
                2.0
                * math.prod(eqn.outvars[0].aval.shape)
                * math.prod(lhs[axis] for axis in contract)
            )
        times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                total += times * product_flops(inner)
    return total


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "olmo2", "phi3", "granite"])
def test_flops_per_token_are_those_of_the_traced_products(name):
    config, _ = family_model(name)
    # Masked rows compute every score, so the count has no windows.
    config = dataclasses.replace(config, sliding_window=None, window_layers=())
    shape = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)

    def run(params, tokens, positions, segments):
        return logits(params, forward(params, config, tokens, positions, segments), config)

    traced = jax.make_jaxpr(run)(abstract_params(config), shape, shape, shape)
    counted = product_flops(traced.jaxpr)
    assert counted == pytest.approx(ROWS * LENGTH * config.flops_per_token(LENGTH), rel=0.01)


def test_experts_and_windows_in_the_formula():
    config, _ = family_model("qwen3_moe")
    d, hd = config.hidden_size, config.head_dim
    attention = 2 * d * hd * (config.num_heads + config.num_kv_heads)
    experts = 3 * 3 * d * config.expert_size + 8 * d  # three of eight, and the router
    by_hand = 2.0 * (config.num_layers * (attention + experts) + config.vocab_size * d)
    assert config.flops_per_token() == by_hand
    windowed, _ = family_model("gemma2")  # two of four layers see 8 tokens
    scores = windowed.flops_per_token(32) - windowed.flops_per_token(0)
    heads = windowed.num_heads * windowed.head_dim
    assert scores == 4.0 * heads * (2 * 8 + 2 * 32)
    assert windowed.kv_bytes_per_token(2) == 2 * 4 * windowed.num_kv_heads * windowed.head_dim * 2
