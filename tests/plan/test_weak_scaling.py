# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Ever more chips by the TPU compiler's accounting (`scripts/weak_scaling.py` asks it)."""

from __future__ import annotations

import dataclasses

import pytest
from golden_files import read_golden
from plan_loads import public, workload

from jaxrl_llm.plan.memory import GRADIENTS, plan_memory
from jaxrl_llm.sharding.mesh import MeshConfig

MEASURED = read_golden("weak_scaling.json")
SIZES = {"dtype": "bfloat16", "width": 128, "targets": 96, "sampler": None}
MODEL = dataclasses.replace(
    public("meta-llama/Llama-3.2-1B"), num_layers=2, vocab_size=32000, tie_word_embeddings=False
)


def load_on(chips: int):
    rows = 16 * chips
    return workload(MODEL, micro=rows, rows=rows, tokens=rows * 128, **SIZES)


def test_four_sizes_are_measured():
    assert list(MEASURED["data"]) == list(MEASURED["fsdp"]) == ["4", "16", "64", "256"]


@pytest.mark.parametrize("key", ["flops", "temporary"])
def test_a_chip_s_share_stays_what_it_is_as_data_parallel_chips_are_added(key):
    first, *others = (size[key] for size in MEASURED["data"].values())
    assert others == pytest.approx([first] * 3, rel=0.1)


@pytest.mark.parametrize("chips", [4, 16, 64, 256])
def test_the_formulas_say_the_same(chips):
    data, fsdp = MEASURED["data"][str(chips)], MEASURED["fsdp"][str(chips)]
    flops = load_on(chips).update_passes[-1].computed_flops() / chips
    assert flops == pytest.approx(data["flops"], rel=0.05)
    whole = plan_memory(load_on(chips), MeshConfig(data=chips))
    peak = whole.resident["parameters"] + max(sum(whole.phases[p].values()) for p in GRADIENTS)
    assert peak == pytest.approx(data["arguments"] + data["temporary"], rel=0.15)
    split = plan_memory(load_on(chips), MeshConfig(data=1, fsdp=chips))
    held = split.resident["parameters"] + split.resident["optimiser"]
    held += split.phases["optimiser"]["gradient sums"]
    assert held == pytest.approx(fsdp["arguments"], rel=0.02)


def test_what_fsdp_splits_falls_as_one_over_n():
    for chips, size in MEASURED["fsdp"].items():
        whole = MEASURED["fsdp"]["4"]["arguments"] * 4
        assert size["arguments"] * int(chips) == pytest.approx(whole, rel=0.02)
