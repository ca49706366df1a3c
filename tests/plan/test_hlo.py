# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.plan.hlo import array_bytes, count

# A module in the form in which the TPU compiler writes: products as convolutions, the trip count in
# the loop's condition, one collective in two computations on one channel, a kernel's metadata over
# several lines.
TPU_TEXT = """HloModule jit_f, is_scheduled=true

%body (p: (s32[], bf16[128,64])) -> (s32[], bf16[128,64]) {
  %p = (s32[]{:T(128)}, bf16[128,64]{1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %x = bf16[128,64]{1,0:T(8,128)} get-tuple-element(%p), index=1
  %w = bf16[64,64]{1,0} constant({...})
  %g = bf16[256,64]{1,0} all-gather(%x), channel_id=7, replica_groups=[2,2]<=[4], dimensions={0}
  %k.1 = bf16[128,64] custom-call(%x, /*index=1*/%g), custom_call_target="tpu_custom_call", METADATA
  %y = f32[128,64]{1,0:T(8,128)} convolution(%x, %w), dim_labels=bf_oi->bf
  ROOT %t = (s32[]{:T(128)}, bf16[128,64]{1,0:T(8,128)}) tuple(%i, %k.1)
}

%cond (p.1: (s32[], bf16[128,64])) -> pred[] {
  %limit = s32[]{:T(128)} constant(5)
  %p.1 = (s32[]{:T(128)}, bf16[128,64]{1,0:T(8,128)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%p.1), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i.1, %limit), direction=LT
}

ENTRY %main (a: bf16[128,64]) -> bf16[128,64] {
  %a = bf16[128,64]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %init = (s32[], bf16[128,64]{1,0}) tuple(%zero, %a)
  %loop = (s32[], bf16[128,64]{1,0}) while(%init), condition=%cond, body=%body
  %q = bf16[8,16,32]{2,1,0} constant({...})
  %r = bf16[8,16,32]{2,1,0} constant({...})
  %s = f32[8,16,16] convolution(%q, %r), WINDOW, dim_labels=0bf_0oi->0bf
  %s2 = f32[16,16,1]{2,1,0} convolution(%q, %r), window={size=8}, dim_labels=0bf_0oi->bf0
  ROOT %out = bf16[128,64]{1,0} get-tuple-element(%loop), index=1
}
""".replace("WINDOW", "window={size=8 stride=7 lhs_dilate=8}").replace(
    "METADATA", 'frontend_attributes={kernel={\n"blocks":"{128}"\n}}, metadata={op_name="k"}'
)


def test_a_loop_counts_as_often_as_its_condition_says():
    counts = count(TPU_TEXT)
    body = 2 * 128 * 64 * 64
    batched = 2 * 8 * 16 * 16 * 32  # a product for each of 8, written as a dilated convolution
    summed = 2 * 16 * 16 * 32 * 8  # one product whose sum runs over the 8 as well
    assert counts.flops == 5 * body + batched + summed
    assert counts.kernels == {"tpu_custom_call k": 5.0}
    assert counts.collectives == {"all-gather": (5.0, 5.0 * 256 * 64 * 2)}
    assert counts.open_loops == 0


def test_a_loop_without_a_known_end_counts_once_and_is_told_of():
    counts = count(TPU_TEXT.replace("direction=LT", "direction=NE"))
    assert counts.open_loops == 1
    assert counts.kernels == {"tpu_custom_call k": 1.0}


def test_a_sum_that_is_started_and_awaited_moves_its_result():
    text = """HloModule jit_f, is_scheduled=true

ENTRY %main (a: f32[128,64]) -> f32[128,64] {
  %a = f32[128,64]{1,0} parameter(0)
  %start = f32[128,64]{1,0} all-reduce-start(%a), channel_id=1, to_apply=%add
  %sum = f32[128,64]{1,0} all-reduce-done(%start)
  %both = (f32[32,64]{1,0}, f32[128,64]{1,0}) all-gather-start(%b), channel_id=2, dimensions={0}
  %b = f32[32,64]{1,0} constant({...})
  ROOT %whole = f32[128,64]{1,0} all-gather-done(%both)
}
"""
    size = 128 * 64 * 4
    assert count(text).collectives == {"all-reduce": (1.0, size), "all-gather": (1.0, size)}


def test_a_loop_whose_counter_goes_by_two_runs_half_as_often():
    text = TPU_TEXT.replace("tuple(%i, %k.1)", "tuple(%next, %k.1)").replace(
        "  %x = bf16", "  %two = s32[] constant(2)\n  %next = s32[] add(%i, %two)\n  %x = bf16"
    )
    assert text.count("%next") == 2
    assert count(text).kernels == {"tpu_custom_call k": 3.0}  # 0, 2 and 4 are less than 5


def test_bytes_of_shapes():
    assert array_bytes("(s32[]{:T(128)}, bf16[5,64,256]{2,1,0:T(8,128)(2,1)}, pred[3])") == (
        4 + 5 * 64 * 256 * 2 + 3
    )


def scanned(layers, x):
    def layer(x, w):
        return jnp.tanh(jnp.einsum("md,ed->me", x, w)), None

    return jnp.sum(jax.lax.scan(layer, x, layers)[0])


def test_flops_and_collectives_of_a_compiled_scan_over_devices():
    mesh = Mesh(
        np.array(jax.devices()).reshape(2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2
    )
    put = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))  # noqa: E731 - short
    depth, rows, width = 7, 64, 96
    layers = jax.ShapeDtypeStruct(
        (depth, width, width), jnp.float32, sharding=put(None, None, None)
    )
    x = jax.ShapeDtypeStruct((rows, width), jnp.float32, sharding=put(("data", "fsdp")))
    compiled = jax.jit(jax.grad(scanned)).lower(layers, x).compile()
    counts = count(compiled.as_text())
    # One product forward and two backward, but none for the gradient of the first input.
    each = 2 * (rows // 8) * width * width
    assert counts.flops == pytest.approx(3 * depth * each, rel=0.02)
    assert compiled.cost_analysis()["flops"] < 0.5 * counts.flops  # the compiler counts a body once
    assert counts.open_loops == 0
    total = sum(size for _, size in counts.collectives.values())
    assert total >= depth * width * width * 4  # gradients are summed over all devices
