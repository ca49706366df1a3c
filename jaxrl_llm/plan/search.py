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
from jaxrl_llm.plan.memory import ALONE, Memory, plan_memory
from jaxrl_llm.plan.verdict import ROOM, fits_model
from jaxrl_llm.plan.workload import Workload
from jaxrl_llm.rollout.engines import check_layout
from jaxrl_llm.sharding.mesh import MeshConfig

PLAIN = MeshConfig()
MOST_TENSOR = 16  # beyond which a layer's sums over the links cost more than its products


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A mesh and the sampler's, what they need, and a step's time at the worse efficiency."""

    layout: MeshConfig
    sampler: MeshConfig
    load: Workload
    memory: Memory
    seconds: float
    fits: bool


def sampler_layout(
    given: MeshConfig | None, model: ModelConfig, topology: Topology, name: str = "sampler.mesh"
) -> MeshConfig:
    """The sampler's mesh on each host, `data` filled in; None: one copy, on the first device.

    Raises:
        ConfigError: another axis than data and tensor, or it fits neither the host nor the model.
    """
    if given is None:
        return ALONE
    check_layout(given, name)
    devices = topology.host_devices
    if given.devices is not None:
        first, count = given.devices
        if first + count > devices:
            raise ConfigError(
                f"{name}.devices goes beyond the devices of a host of the topology",
                got=f"{count} from device {first} on, of {devices}",
                hint=f"leave out --{name}.devices",
            )
        devices = count
    data = devices // given.tensor if given.data == -1 else given.data
    whole = given.data != -1 or data * given.tensor == devices
    if data < 1 or data * given.tensor > devices or not whole:
        raise ConfigError(
            f"{name} does not fit the devices of a host of the topology",
            got=f"data {given.data} × tensor {given.tensor} on {devices} devices",
            hint=f"--{name}.data=-1 --{name}.tensor=1",
        )
    check_fit(MeshConfig(data=given.data, tensor=given.tensor), model, devices, name)
    return MeshConfig(data=data, tensor=given.tensor)


def choose_sampler(load: Workload, topology: Topology, layout: MeshConfig) -> MeshConfig:
    """Copies of the sampler on all devices of a host, each over as few as fit; where none fits,
    what needs the least."""
    if load.sampler is None:
        return ALONE
    devices = topology.host_devices
    sizes = [MeshConfig(data=devices // n, tensor=n) for n in _divisors(devices)]
    sizes = [size for size in sizes if fits_model(size, load.model, devices)]
    limit = ROOM * topology.chip.device_memory
    peaks = [plan_memory(load, layout, size).peak for size in sizes]
    return next(
        (size for size, peak in zip(sizes, peaks, strict=True) if peak <= limit),
        sizes[peaks.index(min(peaks))],
    )


def search(
    make_load: Callable[[MeshConfig], Workload],
    model: ModelConfig,
    topology: Topology,
    sampler: MeshConfig | None = None,
    base: MeshConfig = PLAIN,
) -> list[Candidate]:
    """All meshes that fit the model, best first: those that fit the memory, by their time.

    Args:
        make_load: the workload on a mesh, whose rows have to divide it.
        sampler: the sampler's mesh on each host; None: what suits each mesh.
        base: what a mesh has beside data, fsdp and tensor.

    Raises:
        ConfigError: a run is refused on every mesh; says why on the last.
    """
    found, refused = [], None
    for layout in layouts(model, topology.devices, base):
        try:
            load = make_load(layout)
        except ConfigError as error:  # as the run would say
            refused = error
            continue
        own = sampler or choose_sampler(load, topology, layout)
        memory = plan_memory(load, layout, own)
        bill = make_bill(load, topology, layout, own)
        fits = memory.peak <= ROOM * topology.chip.device_memory
        found.append(Candidate(layout, own, load, memory, bill.step_seconds[1], fits))
    if refused is not None and not found:
        raise refused
    return sorted(found, key=_order)


def _order(candidate: Candidate) -> tuple[bool, float, float]:
    """What fits first, by its time; of equals, and of what does not fit, the one with most room."""
    peak = candidate.memory.peak
    return (False, candidate.seconds, peak) if candidate.fits else (True, peak, 0.0)


def layouts(model: ModelConfig, devices: int, base: MeshConfig = PLAIN) -> Iterator[MeshConfig]:
    """Products of data, fsdp and tensor that use all devices and divide the model; the stages of
    its pipeline, and what else `base` sets, stay."""
    if devices % base.pipeline:
        return
    rest = devices // base.pipeline
    for tensor in _divisors(min(rest, MOST_TENSOR)):
        for fsdp in _divisors(rest):
            if rest % (tensor * fsdp):
                continue
            sizes = {"data": rest // (tensor * fsdp), "fsdp": fsdp, "tensor": tensor}
            zero = base.zero if fsdp > 1 else 3  # it says what is split over fsdp
            layout = dataclasses.replace(base, **sizes, zero=zero)
            if fits_model(layout, model, devices):
                yield layout


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
