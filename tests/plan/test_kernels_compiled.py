# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The attention kernels in the run's own programs, compiled for accelerators that are not there."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
from plan_loads import LLAMA, workload

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models.kernels import choice
from jaxrl_llm.models.kernels.cudnn import cudnn_found
from jaxrl_llm.plan.compile import compile_programs
from jaxrl_llm.plan.gpu import grid, target_config
from jaxrl_llm.plan.hardware import CHIPS, parse_topology
from jaxrl_llm.plan.table import kernel_counts
from jaxrl_llm.rollout.settings import EngineConfig
from jaxrl_llm.sharding.mesh import MeshConfig
from jaxrl_llm.trainers.dry_run import attention_line

SMALL = dataclasses.replace(LLAMA, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=128)
LAYOUT = MeshConfig(data=2, fsdp=2, tensor=2)
needs = pytest.mark.skipif
no_tpu = needs(importlib.util.find_spec("libtpu") is None, reason="the extra tpu is not installed")
no_cuda = needs(
    not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)),
    reason="neither of the extras cuda12 and cuda13 is installed",
)


def compiled(topology, load):
    """Update and decode, by name."""
    only = ("update", "decode")
    done = compile_programs(
        load,
        parse_topology(topology),
        LAYOUT,
        sampler=MeshConfig(data=2, tensor=2),
        only=only,
        timeout=800.0,
    )
    assert [program.error for program in done] == [None, None]
    return {program.name: kernel_counts(program) for program in done}


@no_tpu
@pytest.mark.full
def test_a_tpu_gets_splash_in_the_update_and_the_paged_kernel_in_decoding():
    kernels = compiled("v5e:2x4", workload(SMALL, shared=False))
    # Of both layers: forward, and backward two; decoding has no scan, one kernel for each layer.
    splash = ("fwd_segmented_residuals", "dq_segmented_no_residuals", "dkv_segmented_no_residuals")
    assert kernels["update"] == {f"tpu_custom_call splash_mha_{name}": 2 for name in splash}
    assert kernels["decode"] == {"tpu_custom_call paged_decode": 2}


@no_tpu
@pytest.mark.full
def test_a_tpu_gets_no_kernel_where_xla_is_asked_for():
    model = dataclasses.replace(SMALL, attention_backend="xla")
    sampler = dataclasses.replace(workload(SMALL).sampler, attention_backend="xla")
    kernels = compiled("v5e:2x4", workload(model, shared=False, sampler=sampler))
    assert kernels == {"update": {}, "decode": {}}


@no_cuda
@pytest.mark.full
def test_a_gpu_gets_cudnn_in_the_update_and_the_paged_kernel_in_decoding():
    if not cudnn_found():
        pytest.skip("cuDNN is not installed (nvidia-cudnn-cu12 or -cu13)")
    kernels = compiled("h100:8", workload(SMALL))
    name = "__cudnn$fmhaScaleBiasSoftmax"
    # Of both layers: forward, once more on the way back (its sums are not kept), and backward.
    assert kernels["update"] == {name: 4, name + "Backward": 2}
    assert kernels["decode"] == {"__gpu$xla.gpu.triton": 2}


@no_cuda
@pytest.mark.full
def test_a_gpu_gets_triton_in_the_update_where_it_is_asked_for():
    model = dataclasses.replace(SMALL, attention_backend="triton")
    kernels = compiled("h100:8", workload(model, shared=False))
    # Of both layers: forward, once more on the way back, and backward two.
    assert kernels["update"] == {"__gpu$xla.gpu.triton": 8}


def test_every_gpu_of_the_table_is_described_for_the_compiler():
    for chip in CHIPS.values():
        if chip.kind == "cuda":
            text = target_config(chip)
            assert f"device_memory_size: {chip.memory}\n" in text
            assert text.count("{") == text.count("}") == 4
    assert "core_count: 132\n" in target_config(CHIPS["h200"])
    grids = {"h100:1": "1x1x1", "h100:8": "1x1x8", "h100:16": "1x2x8", "h100:4": "1x1x4"}
    assert {name: grid(parse_topology(name)) for name in grids} == grids


def test_the_plan_tells_which_back_end_and_why(monkeypatch):
    monkeypatch.setattr(choice, "cudnn_found", lambda: True)
    line = attention_line(LLAMA, "bfloat16", "tpu", LAYOUT, shared=True)
    assert line == "rows: xla (splash: rows share prompts (--train.layout=packed lets it run))"
    sizes = EngineConfig(max_prompt_tokens=16, max_new_tokens=16)
    line = attention_line(SMALL, "bfloat16", "gpu", LAYOUT, shared=True, engine=sizes)
    assert line == "rows: cudnn; decoding: triton"
    line = attention_line(SMALL, "float32", "cpu", LAYOUT, shared=False, engine=sizes)
    assert line == "rows: xla (no kernel for cpu); decoding: xla (over a view of the pages)"
    with pytest.raises(ConfigError, match="splash can't serve this run"):
        model = dataclasses.replace(SMALL, attention_backend="splash")
        attention_line(model, "bfloat16", "tpu", LAYOUT, shared=True)
