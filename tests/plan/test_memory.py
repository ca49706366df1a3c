# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from plan_loads import FAMILIES, LLAMA, public, workload

from jaxrl_llm.models.placement import Placement
from jaxrl_llm.models.transformer import abstract_params
from jaxrl_llm.plan.hardware import CHIPS, parse_topology
from jaxrl_llm.plan.memory import (
    ALONE,
    plan_memory,
    sampler_share,
    state_bytes_per_param,
    tree_bytes,
)
from jaxrl_llm.plan.verdict import judge
from jaxrl_llm.rollout.engines import engine_share
from jaxrl_llm.rollout.settings import EngineConfig, default_pool
from jaxrl_llm.sharding.mesh import MeshConfig

ONE = MeshConfig(data=1)


def test_a_full_fine_tune_of_7b_needs_112_gb_before_activations():
    assert state_bytes_per_param("float32") * 7e9 == 112e9
    assert state_bytes_per_param("bfloat16") * 7e9 == 70e9
    load = workload(public("meta-llama/Llama-2-7b-hf"), dtype="float32", sampler=None, remat=True)
    memory = plan_memory(load, ONE)
    states = memory.resident["parameters"] + memory.resident["optimiser"]
    states += memory.phases["optimiser"]["gradient sums"]
    assert states == pytest.approx(16 * 6_738_415_616)
    verdict = judge(load, parse_topology("h100:1"), ONE, memory, ALONE)
    assert not verdict.fits and states > CHIPS["h100"].memory
    assert verdict.knob == "--model.dtype=bfloat16"


@pytest.mark.parametrize("kind", ["parameters", "gradients", "optimizer"])
def test_what_fsdp_splits_falls_as_one_over_n(kind):
    model = public("meta-llama/Llama-3.1-8B")
    whole = tree_bytes(model, ONE, kind, 2)
    assert whole == 2 * model.num_params
    for parts in (4, 16, 64, 256):
        split = tree_bytes(model, MeshConfig(data=1, fsdp=parts), kind, 2)
        assert split == pytest.approx(whole / parts)


def test_zero_2_keeps_parameters_whole():
    model = FAMILIES["llama"]
    layout = MeshConfig(data=1, fsdp=4, zero=2)
    assert tree_bytes(model, layout, "parameters", 4) == 4 * model.num_params
    assert tree_bytes(model, layout, "gradients", 4) == pytest.approx(model.num_params)


def test_tensor_splits_matrices_and_not_norms():
    model = FAMILIES["llama"]
    norms = (2 * model.num_layers + 1) * model.hidden_size
    split = tree_bytes(model, MeshConfig(data=1, tensor=4), "parameters", 1)
    assert split == pytest.approx((model.num_params - norms) / 4 + norms)


def test_layers_that_are_computed_again_keep_their_input_alone():
    load = workload(LLAMA, remat=True, sampler=None)
    memory = plan_memory(load, ONE)
    tokens = load.micro * load.width
    assert (
        memory.phases["layers"]["activations"] == tokens * 2 * LLAMA.hidden_size * LLAMA.num_layers
    )
    more = plan_memory(workload(LLAMA, sampler=None), ONE)
    assert more.phases["layers"]["activations"] > 10 * memory.phases["layers"]["activations"]


@pytest.mark.parametrize("kind", ["parameters", "optimizer"])
@pytest.mark.parametrize(
    "mesh",
    [
        {"data": 4, "pipeline": 2},
        {"data": 2, "pipeline": 4},  # 7 layers: the last stage is filled up
        {"data": 1, "fsdp": 2, "pipeline": 2, "rounds": 2, "tensor": 2},
        {"data": 1, "fsdp": 2, "zero": 1, "pipeline": 4},
    ],
    ids=str,
)
def test_a_device_holds_what_the_trainer_puts_there(kind, mesh):
    model, layout = dataclasses.replace(LLAMA, num_layers=7), MeshConfig(**mesh)
    devices = jax.devices()[: layout.data * layout.copy_devices]
    place = Placement.make(layout, model, devices)
    held = place.device_bytes(abstract_params(model, jnp.float32), kind)
    assert tree_bytes(model, layout, kind, 4) == pytest.approx(held)


def test_rows_are_split_over_data_and_fsdp():
    load = workload(LLAMA, sampler=None)
    whole = plan_memory(load, ONE).phases["layers"]["activations"]
    parts = plan_memory(load, MeshConfig(data=2, fsdp=4)).phases["layers"]["activations"]
    assert parts == pytest.approx(whole / 8)


def test_the_cache_has_the_engine_s_pages():
    load = workload(LLAMA)
    memory = plan_memory(load, ONE)
    whole = memory.phases["sampling"]
    tokens = default_pool(load.sampler) * load.sampler.page_size
    assert whole["KV pages"] == tokens * LLAMA.kv_bytes_per_token(2)
    split = plan_memory(load, ONE, MeshConfig(data=1, tensor=4)).phases["sampling"]
    assert split["KV pages"] == pytest.approx(whole["KV pages"] / 4)
    assert split["sampler's weights"] < 0.3 * whole["sampler's weights"]


def test_copies_of_the_sampler_share_slots_and_have_each_the_pages_that_are_set():
    load = workload(LLAMA)
    eight = MeshConfig(data=8)
    share = sampler_share(load, eight)
    assert share == dataclasses.replace(engine_share(load.sampler, 8), num_pages=share.num_pages)
    assert (share.slots, share.num_pages) == (4, default_pool(engine_share(load.sampler, 8)))
    set_pages = dataclasses.replace(load, sampler=dataclasses.replace(load.sampler, num_pages=99))
    each = 99 * load.sampler.page_size * LLAMA.kv_bytes_per_token(2)
    assert plan_memory(set_pages, ONE, eight).phases["sampling"]["KV pages"] == each


def test_the_sampler_has_made_room_when_the_update_comes():
    few, many = (
        workload(LLAMA, sampler=EngineConfig(max_prompt_tokens=16, max_new_tokens=48, slots=n))
        for n in (2, 4096)
    )
    few, many = plan_memory(few, ONE).totals, plan_memory(many, ONE).totals
    assert many.pop("sampling") > 10 * few.pop("sampling")
    assert few == many == plan_memory(workload(LLAMA, sampler=None), ONE).totals


def test_a_reference_and_a_critic_are_more_models():
    plain = plan_memory(workload(LLAMA), ONE).resident
    both = plan_memory(workload(LLAMA, frozen=1, critic=True), ONE).resident
    assert both["reference"] == plain["parameters"]
    assert both["critic"] == plain["parameters"] + plain["optimiser"]


def test_what_waits_in_the_host_s_memory_leaves_room_for_the_sampler():
    roles = {"frozen": 1, "critic": True}
    here, away = (plan_memory(workload(LLAMA, offload=x, **roles), ONE) for x in (False, True))
    gone = sum(here.resident[name] for name in ("optimiser", "critic", "reference"))
    assert here.totals["sampling"] - away.totals["sampling"] == pytest.approx(gone)
    assert away.totals["layers"] == here.totals["layers"]
