# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What a layer keeps for its backward pass: the formula against a trace of the model itself."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest
from plan_loads import FAMILIES

from jaxrl_llm.models.transformer import abstract_params, forward
from jaxrl_llm.plan.memory import kept_per_token


def kept_by_a_trace(model, rows: int, width: int, dtype) -> float:
    """Bytes that the scan over layers really hands to its backward pass, each layer."""
    ints = jax.ShapeDtypeStruct((rows, width), jnp.int32)

    def run(params, tokens, positions, segments):
        out, back = jax.vjp(lambda p: forward(p, model, tokens, positions, segments), params)
        return back(out)

    traced = jax.make_jaxpr(run)(abstract_params(model, dtype), ints, ints, ints)
    (scan,) = (
        e
        for e in traced.jaxpr.eqns
        if e.primitive.name == "scan"
        and not e.params["reverse"]
        and e.params["length"] == model.num_layers
    )
    pairs = zip(scan.outvars, scan.params["jaxpr"].out_avals, strict=True)
    saved = [v for v, inner in pairs if v.aval.shape != inner.shape]  # stacked, not carried on
    return sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in saved) / model.num_layers


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_what_layers_keep_is_what_a_trace_keeps(family, dtype):
    model, rows, width = FAMILIES[family], 4, 256
    traced = kept_by_a_trace(model, rows, width, jnp.dtype(dtype))
    size = jnp.dtype(dtype).itemsize
    formula = rows * width * kept_per_token(model, width, size, 1)
    assert formula == pytest.approx(traced, rel=0.1)
