# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Compile a run's programs for a topology that need not be there, in a process of its own."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pickle
import subprocess
import sys
from typing import Any

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.plan.gpu import grid, target_config
from jaxrl_llm.plan.hardware import Topology
from jaxrl_llm.plan.memory import ALONE
from jaxrl_llm.plan.workload import Workload
from jaxrl_llm.sharding.mesh import MeshConfig


class NotCompiled(ConfigError):
    """This machine can't compile for the topology; says what to install."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What the child process compiles.

    Attributes:
        kind: "tpu", "cuda" or "cpu".
        topology: as the compiler names it.
        devices: how many.
        layout: the mesh, `data` filled in.
        sampler: the sampler's mesh on each host, `data` filled in.
        only: names of programs; empty: all.
        target: of a GPU, its description (`gpu.target_config`).
    """

    kind: str
    topology: str
    devices: int
    load: Workload
    layout: MeshConfig
    sampler: MeshConfig = ALONE
    only: tuple[str, ...] = ()
    target: str = ""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says of one program, per device.

    Attributes:
        name: which program.
        arguments, outputs, aliased, temporary: bytes, by the compiler's statistics; a TPU's count
            temporaries more than once, and those that its cores keep in their own memory.
        at_peak: bytes of the device's memory in use when most are, the gaps between buffers (1–6 %
            where they were looked at) not counted; 0: the compiler does not say.
        flops: of one run, loops as often as they run.
        collectives: kind → (how many, bytes).
        kernels: custom calls → how many.
        bytes_accessed: as the compiler counts it, a loop's body once.
        open_loops: loops that end by what they compute; their body is counted once.
        seconds: that compiling took.
        error: why there is nothing else, or None.
        used: bytes that it would have needed, if that is why.
    """

    name: str
    arguments: int = 0
    outputs: int = 0
    aliased: int = 0
    temporary: int = 0
    at_peak: int = 0
    flops: float = 0.0
    collectives: dict[str, Any] = dataclasses.field(default_factory=dict)
    kernels: dict[str, Any] = dataclasses.field(default_factory=dict)
    bytes_accessed: float = 0.0
    open_loops: int = 0
    seconds: float = 0.0
    error: str | None = None
    used: float | None = None

    @property
    def peak(self) -> int | float:
        """Bytes while it runs: arguments, results that are not arguments' buffers, temporaries."""
        if self.used is not None or self.at_peak:
            return self.used or self.at_peak
        return self.arguments + self.outputs - self.aliased + self.temporary


def check_compiler(topology: Topology) -> None:
    """Whether a compiler for the topology is installed.

    Raises:
        NotCompiled: it is not; names the extra to install.
    """
    kind = topology.chip.kind
    plugins = {"tpu": ("libtpu",), "cuda": ("jax_cuda12_plugin", "jax_cuda13_plugin"), "cpu": ()}
    extra = {"tpu": "tpu", "cuda": "cuda13"}.get(kind, "")
    if plugins[kind] and not any(importlib.util.find_spec(name) for name in plugins[kind]):
        raise NotCompiled(
            f"no compiler for {topology.chip.name} is installed: every figure is estimated",
            hint=f'pip install "jaxrl_llm[{extra}]"',
        )


def compile_programs(
    load: Workload,
    topology: Topology,
    layout: MeshConfig,
    *,
    sampler: MeshConfig = ALONE,
    only: tuple[str, ...] = (),
    timeout: float = 1200.0,
) -> list[Compiled]:
    """Compile for a topology; programs that the time did not suffice for carry an error.

    Raises:
        NotCompiled: no compiler for it is installed, or it failed before the first program.
    """
    check_compiler(topology)
    name, kind, target = str(topology), topology.chip.kind, ""
    if kind == "cuda":
        name, target = grid(topology), target_config(topology.chip)
    job = Job(kind, name, topology.devices, load, layout, sampler, only, target)
    command = [sys.executable, "-m", "jaxrl_llm.plan.compile_child"]
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_environment(topology),
    )
    late = False
    try:
        out, err = child.communicate(pickle.dumps(job), timeout=timeout)
    except subprocess.TimeoutExpired:
        child.kill()
        out, err = child.communicate()
        late = True
    finally:  # an interrupted plan leaves no compiler behind
        child.kill()
        child.wait()
    lines = [line[5:] for line in out.decode().splitlines() if line.startswith("PLAN ")]
    done = [_compiled(json.loads(line)) for line in lines]
    if late:
        return [*done, Compiled("the rest", error=f"did not finish within {timeout:.0f} s")]
    if child.returncode != 0:
        said = [line for line in err.decode(errors="replace").splitlines() if line.strip()]
        raise NotCompiled(
            "the programs could not be compiled", got=said[-1][:300] if said else "no reason given"
        )
    return done


def _compiled(values: dict[str, Any]) -> Compiled:
    names = {field.name for field in dataclasses.fields(Compiled)}
    return Compiled(values["program"], **{k: v for k, v in values.items() if k in names})


def _environment(topology: Topology) -> dict[str, str]:
    """The child starts no accelerator: it runs on the CPU and only describes the others."""
    env = dict(os.environ) | {"JAX_PLATFORMS": "cpu"}
    if topology.chip.kind == "cpu":
        env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={topology.devices}"
    if topology.chip.kind == "cuda":
        # There is nothing to time alternatives on. Log lines of a missing driver would be all that
        # is said when something fails.
        env |= {"XLA_FLAGS": "--xla_gpu_autotune_level=0", "TF_CPP_MIN_LOG_LEVEL": "2"}
    if topology.chip.kind == "tpu":
        # Without these the TPU library asks the network who it is.
        env |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
        env["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # it locks a chip that is not there
        env["TPU_ACCELERATOR_TYPE"] = f"{topology.chip.name}-{topology.chips}"
    return env
