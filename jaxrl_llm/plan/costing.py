# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The bill of a workload on a topology: phases of a step with their times."""

from __future__ import annotations

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
from jaxrl_llm.plan.flops import Pass
from jaxrl_llm.plan.hardware import Topology
from jaxrl_llm.plan.memory import sampler_copies, tree_bytes
from jaxrl_llm.plan.workload import Workload
from jaxrl_llm.sharding.mesh import MeshConfig

FEWEST_SLOTS = 16  # of a copy of the sampler


def make_bill(
    load: Workload,
    topology: Topology,
    layout: MeshConfig,
    sampler_tensor: int = 1,
    *,
    price: int | float | None = None,
    retry: int | float = RETRY,
) -> Bill:
    """Phases of a step, hours and money.

    Args:
        layout: with `data` filled in.
        price: USD for a chip and hour; None: the table's.
    """
    chip, devices = topology.chip, topology.devices
    mfu = mfu_range(load.micro * load.width / devices, chip)
    phases = []
    if load.sampler is not None:
        phases += sampling_phases(load, topology, layout, sampler_tensor)
    phases += [row_phase(part, load, topology, layout, mfu) for part in load.update_passes]
    tokens = load.tokens if load.sampler is None else load.sequences * load.new_tokens
    price = chip.price if price is None else price
    return Bill(tuple(phases), load.steps, tokens, topology.chips, chip, price, retry)


def row_phase(
    part: Pass, load: Workload, topology: Topology, layout: MeshConfig, mfu: Range
) -> Phase:
    """A pass over rows, and at least the time in which the chips exchange what it needs."""
    phase = compute_phase(
        part.name,
        computed=part.computed_flops,
        needed=part.model_flops,
        devices=topology.devices,
        chip=topology.chip,
        mfu=mfu,
    )
    calls = part.places / (load.micro * load.width)
    exchanged = calls * exchanged_bytes(load, layout, learns=part.kind == "update")
    seconds = exchanged / (topology.chip.device_link_bandwidth / 2.0)
    if seconds <= phase.seconds[0]:
        return phase
    times = (seconds, max(seconds, phase.seconds[1]))
    return Phase(part.name, times, mfu, "links", part.model_flops)


def exchanged_bytes(load: Workload, layout: MeshConfig, *, learns: bool) -> float:
    """Bytes that a device receives during a micro-batch.

    Weights split over `fsdp` are gathered once forward and once backward, gradients summed over
    `data` and `fsdp`; `tensor` sums the residual stream twice a layer, and twice again backward.
    """
    size, model = load.itemsize, load.model
    split = tree_bytes(model, MeshConfig(data=1, tensor=layout.tensor), "parameters", size)
    total = 0.0
    if layout.fsdp > 1:
        total += split * (3 if learns else 1) * (layout.fsdp - 1) / layout.fsdp
    if layout.data > 1 and learns:
        total += 2 * split / layout.fsdp * (layout.data - 1) / layout.data
    if layout.tensor > 1:
        tokens = load.micro * load.width / (layout.data * layout.fsdp)
        sums = 2 * model.num_layers / layout.pipeline * (3 if learns and load.remat else 1 + learns)
        share = 2 * (layout.tensor - 1) / layout.tensor
        total += sums * share * tokens * model.hidden_size * size
    return total


def sampling_phases(
    load: Workload, topology: Topology, layout: MeshConfig, tensor: int
) -> list[Phase]:
    """Prefill of every prompt once, and the decode loop of every copy of the sampler."""
    model, chip = load.model, topology.chip
    copies = sampler_copies(layout, tensor)
    weights = tree_bytes(model, MeshConfig(data=1, tensor=tensor), "parameters", load.itemsize)
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
    )
    slots = max(math.ceil(load.sampler.slots / copies), FEWEST_SLOTS)
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
    )
    return [prefill, decode]
