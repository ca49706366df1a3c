# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The bill of a workload on a topology: phases of a step with their times."""

from __future__ import annotations

import dataclasses
import math

from jaxrl_llm.plan.estimate import (
    RETRY,
    Bill,
    Phase,
    Range,
    compute_phase,
    mfu_range,
    sampler_phase,
)
from jaxrl_llm.plan.flops import Pass, held_layers
from jaxrl_llm.plan.hardware import Topology
from jaxrl_llm.plan.memory import ALONE, sampler_share, sampler_weights, tree_bytes
from jaxrl_llm.plan.workload import Workload
from jaxrl_llm.sharding.mesh import AXES, ROW_AXES, MeshConfig
from jaxrl_llm.sharding.pipeline import ticks


def make_bill(
    load: Workload,
    topology: Topology,
    layout: MeshConfig,
    sampler: MeshConfig = ALONE,
    *,
    price: int | float | None = None,
    retry: int | float = RETRY,
) -> Bill:
    """Phases of a step, hours and money.

    Args:
        layout: with `data` filled in.
        sampler: the sampler's mesh on each host, `data` filled in.
        price: USD for a chip and hour; None: the table's.
    """
    chip, devices = topology.chip, topology.devices
    used = [axis for axis in ROW_AXES if getattr(layout, axis) > 1]
    link = min((axis_rate(axis, topology, layout) for axis in used), default=None)
    mfu = mfu_range(load.micro * load.width / devices, chip, dtype=load.dtype, link=link)
    phases = []
    if load.sampler is not None:
        phases += sampling_phases(load, topology, sampler)
    phases += [row_phase(part, load, topology, layout, mfu) for part in load.update_passes]
    tokens = load.tokens if load.sampler is None else load.sequences * load.new_tokens
    source = chip.price_source if price is None else "as given"
    price = chip.price if price is None else price
    chips = topology.chips
    return Bill(tuple(phases), load.steps, tokens, chips, chip, price, retry, source, load.dtype)


def row_phase(
    part: Pass, load: Workload, topology: Topology, layout: MeshConfig, mfu: Range
) -> Phase:
    """A pass over rows, and at least the time in which the chips exchange what it needs."""
    phase = compute_phase(
        part.name,
        computed=part.computed_flops(layout),
        needed=part.model_flops,
        devices=topology.devices,
        chip=topology.chip,
        mfu=mfu,
        dtype=load.dtype,
    )
    calls = part.places / (load.micro * load.width)
    exchanged = exchanged_by_axis(load, layout, learns=part.kind == "update")
    seconds = calls * sum(
        size / axis_rate(axis, topology, layout) for axis, size in exchanged.items()
    )
    if seconds <= phase.seconds[0]:
        return phase
    times = (seconds, max(seconds, phase.seconds[1]))
    return Phase(part.name, times, mfu, "links", part.model_flops)


def axis_rate(axis: str, topology: Topology, layout: MeshConfig) -> float:
    """Bytes/s that a device receives along an axis of the mesh.

    Devices are laid out in the order of `AXES`. A ring that leaves its host enters each host once:
    those of the ring that are in one host share it, with their part of the host's network.
    """
    chip = topology.chip
    link = chip.device_link_bandwidth / 2.0
    inner = math.prod(getattr(layout, name) for name in AXES[AXES.index(axis) + 1 :])
    in_host = topology.host_devices
    leaves = topology.hosts > 1 and in_host % (inner * getattr(layout, axis)) != 0
    if chip.network is None or not leaves:
        return link
    together = min(max(in_host // inner, 1), getattr(layout, axis))
    return min(link, together * chip.network / chip.devices_per_chip / 2.0)


def exchanged_bytes(load: Workload, layout: MeshConfig, *, learns: bool) -> float:
    """Bytes that a device receives during a micro-batch, along all axes."""
    return sum(exchanged_by_axis(load, layout, learns=learns).values(), 0.0)


def exchanged_by_axis(load: Workload, layout: MeshConfig, *, learns: bool) -> dict[str, float]:
    """Bytes that a device receives during a micro-batch, along each axis.

    Weights split over `fsdp` are gathered once forward and once backward, gradients summed over
    `data` and `fsdp`; `tensor` sums the residual stream twice a layer, and twice again backward. A
    stage of a pipeline does that in each of its ticks, and is computed forward once more; what it
    hands on goes over the links, and at the end the sum over stages of what all have.
    """
    size, model = load.itemsize, load.model
    alone = MeshConfig(data=1, tensor=layout.tensor)
    layers = tree_bytes(model, alone, "parameters", size, layers_only=True)
    others = tree_bytes(model, alone, "parameters", size) - layers
    often, depth, forwards = 1, model.num_layers, 1 + (learns and load.remat)
    if layout.pipeline > 1:
        often = ticks(layout.in_flight, layout.pipeline, layout.rounds)
        depth = held_layers(model, layout) // layout.rounds  # of one round
        layers *= depth / model.num_layers
        forwards += learns
    tokens = load.micro * load.width / (layout.data * layout.fsdp)
    stream = tokens * model.hidden_size * size
    total = {}
    if layout.fsdp > 1:
        again = layout.pipeline > 1  # once for the tick, once for its layers
        whole = (3 + again if learns else 1) * often * layers + (3 if learns else 1) * others
        total["fsdp"] = whole * (layout.fsdp - 1) / layout.fsdp
    if layout.data > 1 and learns:
        whole = 2 * (often * layers + others) / layout.fsdp
        total["data"] = whole * (layout.data - 1) / layout.data
    if layout.tensor > 1:
        share = 2 * (layout.tensor - 1) / layout.tensor
        sums = 2 * depth * often * (forwards + learns)
        total["tensor"] = sums * share * stream / layout.in_flight
    if layout.pipeline > 1:
        handed = often * (3 if learns else 1) / layout.in_flight
        total["pipeline"] = stream * (handed + 2 * (layout.pipeline - 1) / layout.pipeline)
    return total


def sampling_phases(load: Workload, topology: Topology, sampler: MeshConfig) -> list[Phase]:
    """Prefill of every prompt once, and the decode loop of every copy of the sampler; then the same
    of the greedy completions, where they are the baseline."""
    if load.greedy:
        alone = dataclasses.replace(load, sequences=load.greedy, group_size=1, greedy=0)
        load = dataclasses.replace(load, greedy=0)
        again = sampling_phases(alone, topology, sampler)
        named = [dataclasses.replace(p, name=f"greedy {p.name}") for p in again]
        return sampling_phases(load, topology, sampler) + named
    model, chip = load.model, topology.chip
    tensor, copies = sampler.tensor, sampler.data * topology.hosts
    weights = sampler_weights(load, sampler)
    tokens = load.sequences / load.group_size * load.prompt_tokens
    # The prompts' logits are not computed.
    head = 2.0 * model.vocab_size * model.hidden_size
    each = model.flops_per_token(load.prompt_tokens / 2.0) - head
    chunk = load.sampler.prefill_tokens
    prefill = sampler_phase(
        "prefill",
        steps=math.ceil(tokens / copies / chunk),
        step_bytes=weights,
        step_flops=chunk * each / tensor,
        needed=tokens * each,
        chip=chip,
        dtype=load.dtype,
    )
    slots = sampler_share(load, sampler).slots
    slots = min(slots, max(math.ceil(load.sequences / copies), 1))
    waves = math.ceil(load.sequences / (copies * slots))
    context = load.prompt_tokens + load.new_tokens / 2.0
    parts = tensor if model.num_kv_heads % tensor == 0 else 1
    cache = slots * context * model.kv_bytes_per_token(load.itemsize) / parts
    flops = model.flops_per_token(context)
    decode = sampler_phase(
        "decode",
        steps=waves * load.new_tokens,
        step_bytes=weights + cache,
        step_flops=slots * flops / tensor,
        needed=load.sequences * load.new_tokens * flops,
        chip=chip,
        dtype=load.dtype,
    )
    return [prefill, decode]
