# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What does not fit by the compiler's figures, and fits once its knob is turned."""

from __future__ import annotations

import dataclasses

from plan_loads import LLAMA, public, workload

from jaxrl_llm.plan.compile import compile_programs
from jaxrl_llm.plan.hardware import parse_topology
from jaxrl_llm.plan.memory import ALONE, plan_memory
from jaxrl_llm.plan.verdict import Run, judge, term_knob
from jaxrl_llm.sharding.mesh import MeshConfig


def test_a_knob_turned_makes_a_compiled_update_fit():
    model = dataclasses.replace(LLAMA, num_layers=12)
    load = workload(model, dtype="float32", sampler=None, width=128, targets=32, micro=32, rows=32)
    layout, topology = MeshConfig(data=2), parse_topology("cpu:2")
    chip = dataclasses.replace(topology.chip, memory=64 * 2**20)
    small = dataclasses.replace(topology, chip=chip)

    def verdict(load):
        programs = compile_programs(load, topology, layout, only=("update",))
        return judge(load, small, layout, plan_memory(load, layout), ALONE, programs)

    full = verdict(load)
    assert full.tag == "compiled" and not full.fits
    assert (full.term, full.knob) == ("activations", "--model.remat=True")
    turned = verdict(dataclasses.replace(load, remat=True))
    assert turned.tag == "compiled" and turned.fits and turned.knob is None


def test_a_knob_is_offered_only_where_less_is_needed_with_it():
    """Beyond the heads of keys and values pages are whole on every device, and copies fewer."""
    topology, layout = parse_topology("h100:8"), MeshConfig(data=1, fsdp=8)
    model = dataclasses.replace(LLAMA, num_heads=8, num_kv_heads=2)
    load = workload(model)
    two, four = (MeshConfig(data=8 // n, tensor=n) for n in (2, 4))
    before, after = (plan_memory(load, layout, x).totals["sampling"] for x in (two, four))
    assert after > before
    knob = term_knob("sampler's weights", Run(load, layout, two), topology, ("sampling",))
    assert knob is None
    alone = term_knob("KV pages", Run(load, layout, ALONE), topology, ("sampling",))
    assert alone == "--sampler.mesh.data=8 --sampler.mesh.tensor=1"


def test_a_set_number_of_pages_is_halved():
    load = workload(LLAMA)
    load = dataclasses.replace(load, sampler=dataclasses.replace(load.sampler, num_pages=4096))
    topology, layout = parse_topology("h100:8"), MeshConfig(data=8)
    run = Run(load, layout, MeshConfig(data=8))
    assert term_knob("KV pages", run, topology, ("sampling",)) == "--sampler.num_pages=2048"


def test_more_chips_come_after_half_the_bytes_of_a_number():
    topology, layout = parse_topology("h100:1"), MeshConfig(data=1)
    load = workload(LLAMA, dtype="float32")
    load = dataclasses.replace(load, sampler=dataclasses.replace(load.sampler, slots=2))
    for term in ("KV pages", "sampler's weights", "decoding"):
        knob = term_knob(term, Run(load, layout, ALONE), topology, ("sampling",))
        assert knob == "--model.dtype=bfloat16"


def test_a_mesh_that_is_proposed_divides_the_model():
    topology, layout = parse_topology("h100:7"), MeshConfig(data=7)
    load = workload(public("meta-llama/Llama-3.1-8B"), remat=True, sampler=None, micro=7, rows=7)
    verdict = judge(load, topology, layout, plan_memory(load, layout), ALONE)
    assert not verdict.fits and "fsdp=7" not in verdict.knob
    topology, layout = parse_topology("h100:24"), MeshConfig(data=24)
    load = dataclasses.replace(load, micro=24, rows=24)
    verdict = judge(load, topology, layout, plan_memory(load, layout), ALONE)
    assert verdict.knob == "--mesh.fsdp=8 --mesh.data=3"
