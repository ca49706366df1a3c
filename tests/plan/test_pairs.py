# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Our formulas against what the TPU compiler said (`scripts/plan_pairs.py` asks it)."""

from __future__ import annotations

import pytest
from golden_files import read_golden
from plan_loads import public, workload

from jaxrl_llm.plan.memory import GRADIENTS, plan_memory
from jaxrl_llm.sharding.mesh import MeshConfig

PAIRS = read_golden("plan_pairs.json")["pairs"]


@pytest.mark.parametrize("name", PAIRS)
def test_an_update_s_peak_and_flops_are_the_compiler_s(name):
    pair = PAIRS[name]
    sizes, layout = pair["sizes"], MeshConfig(**pair["mesh"])
    rows = {"rows": sizes["micro"], "tokens": sizes["micro"] * sizes["width"]}
    load = workload(public(pair["model"]), sampler=None, **sizes, **rows)
    memory = plan_memory(load, layout)
    added = max(sum(memory.phases[phase].values()) for phase in GRADIENTS)
    assert memory.resident["parameters"] + added == pytest.approx(pair["peak"], rel=0.15)
    flops = load.update_passes[-1].computed_flops(layout) / (layout.data * layout.copy_devices)
    assert flops == pytest.approx(pair["flops"], rel=0.05)


def test_five_pairs_of_two_families_and_a_third():
    families = [public(pair["model"]).family for pair in PAIRS.values()]
    assert families.count("llama") + families.count("qwen3") >= 5
    assert {"llama", "qwen3", "gemma2"} <= set(families)
