# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The run's own programs, compiled in a child process for CPU devices."""

from __future__ import annotations

import importlib.util

import pytest
from plan_loads import LLAMA, workload

from jaxrl_llm.plan.compile import NotCompiled, check_compiler, compile_programs
from jaxrl_llm.plan.costing import exchanged_by_axis
from jaxrl_llm.plan.hardware import parse_topology
from jaxrl_llm.plan.memory import tree_bytes
from jaxrl_llm.sharding.mesh import MeshConfig


def test_gpus_that_are_not_there_are_not_pretended(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # no plugin is installed
    with pytest.raises(NotCompiled, match="estimated"):
        check_compiler(parse_topology("h100:8"))


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_an_update_compiled_over_eight_devices(axis):
    load = workload(LLAMA, dtype="float32", micro=16)
    layout = MeshConfig(data=2, fsdp=2, **{axis: 2})
    (update,) = compile_programs(load, parse_topology("cpu:8"), layout, only=("update",))
    assert update.error is None
    (part,) = (p for p in load.update_passes if p.kind == "update")
    micro_batches = load.rows / load.micro  # one of them is a run of the program
    assert update.flops == pytest.approx(part.computed_flops(layout) / micro_batches / 8, rel=0.05)
    params = tree_bytes(LLAMA, layout, "parameters", 4)
    assert update.arguments == pytest.approx(2 * params, rel=0.1)  # and the gradient sums
    if axis == "pipeline":  # a stage's weights in every tick, three times; half is its own
        exchanged = exchanged_by_axis(load, layout, learns=True)["fsdp"]
        layers = tree_bytes(LLAMA, MeshConfig(data=1), "parameters", 4, layers_only=True)
        sums = (5 * layers / 2 + (4 * LLAMA.num_params - layers)) / 2
        gathered = update.collectives["all-gather"][1] / 2
        assert gathered == pytest.approx(exchanged - sums, rel=0.1)


@pytest.mark.full
def test_all_programs_of_a_run_compile():
    load = workload(LLAMA, dtype="float32", remat=True)
    layout = MeshConfig(data=1, fsdp=4, tensor=2)
    done = compile_programs(
        load, parse_topology("cpu:8"), layout, sampler=MeshConfig(data=4, tensor=2)
    )
    names = [program.name for program in done]
    assert names == ["update", "optimiser", "log-probability", "prefill", "decode"]
    assert all(program.error is None and program.peak > 0 for program in done)
    assert next(p for p in done if p.name == "decode").open_loops >= 1  # ends when rows have ended
