# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import math

import pytest
from plan_loads import LLAMA, public, workload

from jaxrl_llm.cli.plan import main as plan
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.plan.compile import Compiled
from jaxrl_llm.plan.costing import axis_rate, exchanged_by_axis, exchanged_bytes, make_bill
from jaxrl_llm.plan.hardware import parse_topology
from jaxrl_llm.plan.memory import ALONE, MAY_WAIT, Memory, plan_memory, tree_bytes
from jaxrl_llm.plan.search import choose_sampler, layouts, sampler_layout, search
from jaxrl_llm.plan.verdict import ROOM, judge
from jaxrl_llm.sharding.mesh import MeshConfig

LARGE = public("meta-llama/Llama-3.1-8B")
SPLIT = MeshConfig(data=1, tensor=8)


def large_load(layout: MeshConfig):
    rows = 8 * layout.data * layout.fsdp
    sizes = dict(rows=rows, micro=layout.data * layout.fsdp, width=2048, targets=1024)
    return workload(LARGE, remat=True, prompt_tokens=1024, new_tokens=1024, **sizes)


def test_every_mesh_uses_all_devices_and_divides_the_model():
    found = list(layouts(LARGE, 64))
    assert all(x.data * x.fsdp * x.tensor == 64 for x in found)
    assert all(LARGE.num_heads % x.tensor == 0 for x in found)
    assert len(found) == len({(x.data, x.fsdp, x.tensor) for x in found}) > 15
    odd = dataclasses.replace(LLAMA, num_heads=6, num_kv_heads=2, head_dim=8, hidden_size=48)
    assert {x.tensor for x in layouts(odd, 8)} == {1, 2}


def test_a_search_puts_what_fits_first_and_the_fastest_of_that():
    topology = parse_topology("v5p:4x4x4")
    found = search(large_load, LARGE, topology)
    fits = [c.fits for c in found]
    assert fits[0] and fits == sorted(fits, reverse=True)
    good = [c.seconds for c in found if c.fits]
    assert good == sorted(good)
    limit = ROOM * topology.chip.device_memory
    assert all((c.memory.peak <= limit) == c.fits for c in found)


def test_the_sampler_is_split_until_it_fits():
    layout = MeshConfig(data=1, fsdp=16)
    load = large_load(layout)
    small, large = parse_topology("v5e:4x4"), parse_topology("h100:16")
    assert choose_sampler(load, large, layout) == MeshConfig(data=8)
    split = choose_sampler(load, small, layout)
    limit = ROOM * small.chip.device_memory
    assert split.tensor > 1 and split.data * split.tensor == small.host_devices
    assert plan_memory(load, layout, split).peak <= limit
    assert (
        plan_memory(
            load, layout, MeshConfig(data=8 * 2 // split.tensor, tensor=split.tensor // 2)
        ).peak
        > limit
    )


def test_what_does_not_fit_names_a_knob_that_helps():
    topology = parse_topology("v5e:4x4")
    layout = MeshConfig(data=16)
    load = large_load(layout)
    verdict = judge(load, topology, layout, plan_memory(load, layout, SPLIT), SPLIT)
    assert not verdict.fits and verdict.tag == "estimated"
    assert verdict.knob == "--mesh.fsdp=16 --mesh.data=1"
    better = MeshConfig(data=1, fsdp=16)
    load = large_load(better)
    assert (
        judge(load, topology, better, plan_memory(load, better, SPLIT), SPLIT).peak
        < verdict.peak / 3
    )


def test_a_sampler_that_lacks_room_sends_others_to_the_host():
    topology, layout, load = parse_topology("v5e:2x2"), MeshConfig(data=4), workload(LLAMA)
    small = dataclasses.replace(topology, chip=dataclasses.replace(topology.chip, memory=12))
    resident = {"parameters": 1.0, "optimiser": 6.0, "KV pages": 2.0}
    phases = {"layers": {"activations": 1.0}, "sampling": {"decoding": 4.0}}
    full = judge(load, small, layout, Memory(resident, phases), ALONE)
    assert (full.phase, full.knob, full.fits) == ("sampling", "--train.offload=True", False)
    turned = dataclasses.replace(load, offload=True)
    assert judge(turned, small, layout, Memory(resident, phases, MAY_WAIT), ALONE).fits


def test_the_compiler_s_word_counts_where_there_is_one():
    topology, layout = parse_topology("v5e:2x2"), MeshConfig(data=4)
    load = workload(LLAMA)
    memory = plan_memory(load, layout)
    sizes = dict(arguments=2**30, temporary=2**30, outputs=2**29, aliased=2**29)
    programs = [Compiled("update", **sizes), Compiled("decode", arguments=2**20)]
    verdict = judge(load, topology, layout, memory, ALONE, programs)
    beside = sum(v for k, v in memory.resident.items() if k != "parameters")
    assert verdict.tag == "compiled" and verdict.fits and verdict.phase == "update"
    assert verdict.peak == pytest.approx(2 * 2**30 + beside)
    full = [dataclasses.replace(programs[0], used=20.0 * 2**30, error="too large"), programs[1]]
    assert not judge(load, topology, layout, memory, ALONE, full).fits
    partial = judge(load, topology, layout, memory, ALONE, programs[:1])
    assert partial.tag == "estimated"  # decode is missing


def test_a_bill_has_the_phases_of_the_run():
    topology, layout = parse_topology("v5p:4x4x4"), MeshConfig(data=1, fsdp=64)
    load = dataclasses.replace(large_load(layout), forwards=("reference",), frozen=1)
    bill = make_bill(load, topology, layout, MeshConfig(data=4))
    assert [p.name for p in bill.phases] == ["prefill", "decode", "reference", "update"]
    decode = bill.phases[1]
    # 32 completions over 64 copies: one slot each, so every step reads all weights.
    assert decode.bound == "bandwidth"
    step = 2 * LARGE.num_params + 1536 * LARGE.kv_bytes_per_token(2)
    assert decode.seconds[1] == pytest.approx(1024 * step / 2765e9 / 0.5, rel=1e-6)
    assert bill.price == topology.chip.price
    assert make_bill(load, topology, layout, MeshConfig(data=4), price=1.0).money[0] < bill.money[0]


def test_bytes_on_the_links():
    load = dataclasses.replace(workload(LLAMA), remat=False)
    params = 2.0 * LLAMA.num_params
    assert exchanged_bytes(load, MeshConfig(data=1), learns=True) == 0
    fsdp = exchanged_bytes(load, MeshConfig(data=1, fsdp=4), learns=True)
    assert fsdp == pytest.approx(3 * params * 3 / 4)
    assert exchanged_bytes(load, MeshConfig(data=4), learns=False) == 0
    tensor = exchanged_bytes(load, MeshConfig(data=1, tensor=4), learns=False)
    tokens = load.micro * load.width
    assert math.isclose(tensor, 2 * 4 * 2 * 3 / 4 * tokens * LLAMA.hidden_size * 2)


def test_an_axis_that_leaves_the_host_has_the_network_of_its_devices_there():
    two, one = parse_topology("h100:16"), parse_topology("h100:8")
    inside, host = 450e9, 400e9  # NVLink each way; 3200 Gbit/s
    assert axis_rate("fsdp", one, MeshConfig(data=1, fsdp=8)) == inside
    assert axis_rate("fsdp", two, MeshConfig(data=1, fsdp=16)) == host
    split = MeshConfig(data=1, fsdp=2, tensor=8)
    assert axis_rate("tensor", two, split) == inside
    assert axis_rate("fsdp", two, split) == host / 8
    cube = parse_topology("v5p:4x4x4")
    assert axis_rate("fsdp", cube, MeshConfig(data=1, fsdp=64)) == 600e9


def test_a_pipeline_waits_for_its_first_and_last_micro_batches():
    topology, model = parse_topology("v5p:2x2x1"), dataclasses.replace(LLAMA, num_layers=8)
    load = workload(model, sampler=None, micro=4096, rows=4096, tokens=4096 * 64)
    load = dataclasses.replace(load, forwards=("reference",))
    (reference, _) = load.update_passes
    head = 4096 * load.targets * 2 * model.vocab_size * model.hidden_size

    def layers(**pipeline):
        layout = MeshConfig(data=1, **pipeline)
        assert make_bill(load, topology, layout).phases[0].seconds[1] > 0
        return reference.computed_flops(layout) - head

    whole = layers(fsdp=4)
    assert layers(pipeline=4, microbatches=4) == pytest.approx(whole * 7 / 4)
    assert layers(pipeline=4, microbatches=4, rounds=2) == pytest.approx(whole * 11 / 8)


def test_a_pipeline_gathers_and_sums_in_every_tick():
    load = workload(LLAMA, sampler=None)
    plain = exchanged_by_axis(load, MeshConfig(data=1, fsdp=2), learns=True)["fsdp"]
    layers = tree_bytes(LLAMA, MeshConfig(data=1), "parameters", 2, layers_only=True)
    staged = exchanged_by_axis(load, MeshConfig(data=1, fsdp=2, pipeline=2), learns=True)
    # Five ticks of two of four layers: gathered thrice, summed once.
    assert staged["fsdp"] - plain == pytest.approx((5 * 4 / 2 - 3) * layers / 2)
    assert staged["pipeline"] > 0


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ("--train.offload=True", "no effect on a CPU"),
        ("--rollouts.read=store", "not planned"),
        ("--mesh.pipeline=2 --mesh.microbatches=200", "more micro-batches than"),
        ("--sampler.mesh.devices=4,8", "try: leave out --sampler.mesh.devices"),
        ("--sampler.mesh.devices=8,1", "goes beyond the devices of a host"),
        ("--sampler.mesh.tensor=8", "try: --sampler.mesh.tensor=4"),
        ("--search --mesh.pipeline=3", "with --mesh.pipeline=3"),
    ],
)
def test_a_plan_refuses_what_training_would(capsys, overrides, told):
    words = ["--config=tiny_grpo.py", "--topology=cpu:8", "--estimate", *overrides.split()]
    assert plan(words) == 2
    assert told in capsys.readouterr().err


def test_a_copy_of_the_sampler_decodes_its_share_of_the_slots_and_the_greedy_completions():
    topology, layout = parse_topology("h100:8"), MeshConfig(data=8)

    def phases(**changes):
        bill = make_bill(workload(LLAMA, **changes), topology, layout, MeshConfig(data=8))
        return {p.name: p for p in bill.phases}

    plain = phases(sequences=64)
    # 32 slots over 8 copies: 4 each, so that 64 completions take two waves.
    assert plain["decode"].seconds[0] > 1.9 * phases(sequences=32)["decode"].seconds[0]
    both = phases(sequences=64, greedy=8)
    assert both["decode"] == plain["decode"]
    assert both["greedy decode"].seconds == phases(sequences=8, group_size=1)["decode"].seconds


def test_a_search_keeps_what_the_config_s_mesh_has_beside_its_sizes():
    base = MeshConfig(data=1, fsdp=2, zero=1, pipeline=2, microbatches=6)
    found = list(layouts(LARGE, 16, base))
    assert {x.pipeline for x in found} == {2} and {x.microbatches for x in found} == {6}
    assert all(x.data * x.fsdp * x.tensor * 2 == 16 for x in found)
    assert all(x.zero == (1 if x.fsdp > 1 else 3) for x in found)


def test_a_sampler_without_a_mesh_is_one_copy_a_host():
    topology = parse_topology("v5e:4x4")
    assert sampler_layout(None, LARGE, topology) == MeshConfig(data=1)
    filled = sampler_layout(MeshConfig(tensor=2), LARGE, topology)
    assert filled == MeshConfig(data=topology.host_devices // 2, tensor=2)
    for wrong in (MeshConfig(tensor=16), MeshConfig(data=9), MeshConfig(fsdp=2)):
        with pytest.raises(ConfigError, match=r"sampler\.mesh"):
            sampler_layout(wrong, LARGE, topology)


def test_copies_have_the_slots_that_engines_give_them():
    topology, layout = parse_topology("h100:8"), MeshConfig(data=1, fsdp=8)
    load = dataclasses.replace(large_load(layout), sequences=4096)

    def seconds(slots: int) -> float:
        engine = dataclasses.replace(load.sampler, slots=slots)
        run = dataclasses.replace(load, sampler=engine)
        return make_bill(run, topology, layout, MeshConfig(data=8)).phases[1].seconds[1]

    assert seconds(16) == seconds(8) > 1.5 * seconds(32)  # two slots a copy at least
