# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The meshes that a topology allows, by what the model of memory and time says of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.placement import check_fit
from jaxrl_llm.plan.costing import make_bill
from jaxrl_llm.plan.hardware import Topology
from jaxrl_llm.plan.memory import Memory, plan_memory
from jaxrl_llm.plan.verdict import ROOM
from jaxrl_llm.plan.workload import Workload
from jaxrl_llm.sharding.mesh import MeshConfig

MOST_TENSOR = 16  # beyond which a layer's sums over the links cost more than its products


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A mesh, what it needs, and how long a step takes at the worse efficiency."""

    layout: MeshConfig
    sampler_tensor: int
    load: Workload
    memory: Memory
    seconds: float
    fits: bool


def choose_sampler(
    load: Workload, topology: Topology, layout: MeshConfig, given: int | None = None
) -> int:
    """Devices of one copy of the sampler: as few as fit, at most as many as divide the heads; where
    none fits, what needs the least."""
    if load.sampler is None or given is not None:
        return given or 1
    sizes = [
        n
        for n in range(1, min(topology.devices, MOST_TENSOR) + 1)
        if topology.devices % n == 0
        and load.model.num_heads % n == 0
        and load.model.intermediate_size % n == 0
    ]
    limit = ROOM * topology.chip.device_memory
    peaks = {size: plan_memory(load, layout, size).peak for size in sizes}
    return next((n for n in sizes if peaks[n] <= limit), min(sizes, key=peaks.__getitem__))


def search(
    make_load: Callable[[MeshConfig], Workload],
    model: ModelConfig,
    topology: Topology,
    sampler_tensor: int | None = None,
) -> list[Candidate]:
    """All meshes that fit the model, best first: those that fit the memory, by their time.

    Args:
        make_load: the workload on a mesh, whose rows have to divide it.

    Raises:
        ConfigError: a run is refused on every mesh; says why on the last.
    """
    found, refused = [], None
    for layout in layouts(model, topology.devices):
        try:
            load = make_load(layout)
        except ConfigError as error:  # as the run would say
            refused = error
            continue
        tensor = choose_sampler(load, topology, layout, sampler_tensor)
        memory = plan_memory(load, layout, tensor)
        bill = make_bill(load, topology, layout, tensor)
        fits = memory.peak <= ROOM * topology.chip.device_memory
        found.append(Candidate(layout, tensor, load, memory, bill.step_seconds[1], fits))
    if refused is not None and not found:
        raise refused
    return sorted(found, key=_order)


def _order(candidate: Candidate) -> tuple[bool, float, float]:
    """What fits first, by its time; of equals, and of what does not fit, the one with most room."""
    peak = candidate.memory.peak
    return (False, candidate.seconds, peak) if candidate.fits else (True, peak, 0.0)


def layouts(model: ModelConfig, devices: int) -> Iterator[MeshConfig]:
    """Products of data, fsdp and tensor that use all devices and divide the model."""
    for tensor in _divisors(min(devices, MOST_TENSOR)):
        for fsdp in _divisors(devices):
            if devices % (tensor * fsdp):
                continue
            layout = MeshConfig(data=devices // (tensor * fsdp), fsdp=fsdp, tensor=tensor)
            try:
                check_fit(layout, model, devices)
            except ConfigError:
                continue
            yield layout


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
