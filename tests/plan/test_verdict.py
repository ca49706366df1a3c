# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""What does not fit by the compiler's figures, and fits once its knob is turned."""

from __future__ import annotations

import dataclasses

from plan_loads import LLAMA, workload

from jaxrl_llm.plan.compile import compile_programs
from jaxrl_llm.plan.hardware import parse_topology
from jaxrl_llm.plan.memory import plan_memory
from jaxrl_llm.plan.verdict import judge
from jaxrl_llm.sharding.mesh import MeshConfig


def test_a_knob_turned_makes_a_compiled_update_fit():
    model = dataclasses.replace(LLAMA, num_layers=12)
    load = workload(model, dtype="float32", sampler=None, width=128, targets=32, micro=32, rows=32)
    layout, topology = MeshConfig(data=2), parse_topology("cpu:2")
    chip = dataclasses.replace(topology.chip, memory=64 * 2**20)
    small = dataclasses.replace(topology, chip=chip)

    def verdict(load):
        programs = compile_programs(load, topology, layout, only=("update",))
        return judge(load, small, layout, plan_memory(load, layout), 1, programs)

    full = verdict(load)
    assert full.tag == "compiled" and not full.fits
    assert (full.term, full.knob) == ("activations", "--model.remat=True")
    turned = verdict(dataclasses.replace(load, remat=True))
    assert turned.tag == "compiled" and turned.fits and turned.knob is None
