# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""One plan: a config on a mesh of a topology, estimated and, where that is possible, compiled."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.plan.compile import Compiled, NotCompiled, compile_programs
from jaxrl_llm.plan.costing import make_bill
from jaxrl_llm.plan.estimate import RETRY, Bill
from jaxrl_llm.plan.hardware import Topology
from jaxrl_llm.plan.memory import Memory, plan_memory
from jaxrl_llm.plan.search import Candidate, sampler_layout, search
from jaxrl_llm.plan.verdict import Verdict, judge
from jaxrl_llm.plan.workload import Workload, check_whole, layout_of, make_workload
from jaxrl_llm.sharding.mesh import MeshConfig
from jaxrl_llm.trainers.offload import check_offload
from jaxrl_llm.trainers.settings import RLConfig

BEST_FEW = 3  # meshes of a search that the compiler looks at


@dataclasses.dataclass(frozen=True)
class Options:
    """What a plan may be told beside the config.

    Attributes:
        sampler_tensor: short for a sampler.mesh of copies over so many devices on all of a host.
        compiles: whether the compiler is asked.
        timeout: seconds for it.
        price: USD for a chip and hour; None: the list's.
        retry: part of the money for second attempts.
    """

    sampler_tensor: int | None = None
    compiles: bool = True
    timeout: float = 1200.0
    price: float | None = None
    retry: float = RETRY


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is known of a run before it is started.

    Attributes:
        not_compiled: why nothing was compiled, or None.
    """

    load: Workload
    topology: Topology
    layout: MeshConfig
    sampler: MeshConfig
    memory: Memory
    bill: Bill
    verdict: Verdict
    programs: tuple[Compiled, ...]
    not_compiled: str | None


def make_plan(
    config: Any,
    model: ModelConfig,
    topology: Topology,
    options: Options,
    layout: MeshConfig | None = None,
    sampler: MeshConfig | None = None,
) -> Plan:
    """The plan of a config on its own mesh, or on another.

    Raises:
        ConfigError: the mesh fits neither the chips nor the model.
    """
    _check_chip(config, topology)
    if layout is None:
        layout = layout_of(config, model, topology.devices)
    if sampler is None:
        sampler = sampler_layout(wanted_sampler(config, topology, options), model, topology)
    load = make_workload(config, model, layout)
    memory = plan_memory(load, layout, sampler)
    programs, reason = (), "as asked"
    if options.compiles:
        try:
            programs = tuple(
                compile_programs(load, topology, layout, sampler=sampler, timeout=options.timeout)
            )
            reason = None
        except NotCompiled as error:
            reason = str(error)
    return Plan(
        load=load,
        topology=topology,
        layout=layout,
        sampler=sampler,
        memory=memory,
        bill=make_bill(load, topology, layout, sampler, price=options.price, retry=options.retry),
        verdict=judge(load, topology, layout, memory, sampler, programs),
        programs=programs,
        not_compiled=reason,
    )


def wanted_sampler(config: Any, topology: Topology, options: Options) -> MeshConfig | None:
    """The sampler's mesh as the config and the options have it.

    Raises:
        ConfigError: copies over so many devices do not fill a host.
    """
    tensor = options.sampler_tensor
    if tensor is None:
        return config.sampler.mesh if isinstance(config, RLConfig) else None
    if tensor < 1 or topology.host_devices % tensor:
        raise ConfigError(
            "--sampler-tensor does not divide the devices of a host",
            got=f"{tensor} of {topology.host_devices}",
            hint="--sampler-tensor=1",
        )
    return MeshConfig(tensor=tensor)


def find_meshes(
    config: Any, model: ModelConfig, topology: Topology, options: Options
) -> list[Candidate]:
    """All meshes of a topology, best first, by the model of memory and time.

    Raises:
        ConfigError: none divides the model.
    """
    check_whole(config)
    _check_chip(config, topology)
    make, given = functools.partial(make_workload, config, model), None
    wanted = wanted_sampler(config, topology, options)
    if wanted is not None:
        given = sampler_layout(wanted, model, topology)
    found = search(make, model, topology, given, config.mesh)
    if not found:
        stages = config.mesh.pipeline
        raise ConfigError(
            "no mesh of these chips divides the model",
            got=f"{topology}" + (f" with --mesh.pipeline={stages}" if stages > 1 else ""),
            hint="leave out --mesh.pipeline" if stages > 1 else "other chips",
        )
    return found


def _check_chip(config: Any, topology: Topology) -> None:
    """Raises ConfigError where training would refuse the config on such chips."""
    if isinstance(config, RLConfig) and config.train.offload:
        check_offload(topology.chip.kind)


def plan_best(
    config: Any,
    model: ModelConfig,
    topology: Topology,
    options: Options,
    found: list[Candidate],
) -> Iterator[Plan]:
    """Plans of the best few meshes, up to the first that fits by the compiler's figures."""
    for candidate in found[:BEST_FEW]:
        plan = make_plan(config, model, topology, options, candidate.layout, candidate.sampler)
        yield plan
        if plan.verdict.fits or plan.not_compiled:
            return
