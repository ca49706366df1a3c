# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""GPUs as XLA's compiler wants them described: what it would otherwise ask the card.

The text is that of XLA's `GpuTargetConfigProto`; sizes of a streaming multiprocessor (SM), limits
of a block: the table "Technical Specifications per Compute Capability" of
https://docs.nvidia.com/cuda/cuda-c-programming-guide/, counts of SMs, L2 and clocks from NVIDIA's
architecture papers (A100, H100, H200, B200; SXM cards).
"""

from __future__ import annotations

import dataclasses

from jaxrl_llm.plan.hardware import Chip, Topology

KIB, MIB = 2**10, 2**20


@dataclasses.dataclass(frozen=True)
class Silicon:
    """What a program is compiled for.

    Attributes:
        name: as the driver calls it.
        capability: compute capability.
        processors: SMs.
        lanes: float32 lanes of an SM.
        shared: bytes of shared memory of an SM; a block may have all but 1 KiB of it.
        l2: bytes of the second-level cache.
        clock: GHz, boosted.
    """

    name: str
    capability: tuple[int, int]
    processors: int
    lanes: int
    shared: int
    l2: int
    clock: float


_A100 = Silicon("NVIDIA A100-SXM4", (8, 0), 108, 64, 164 * KIB, 40 * MIB, 1.41)
_H100 = Silicon("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 228 * KIB, 50 * MIB, 1.98)
SILICON = {
    "a100-40": _A100,
    "a100-80": _A100,
    "h100": _H100,
    "h200": dataclasses.replace(_H100, name="NVIDIA H200"),
    "b200": Silicon("NVIDIA B200", (10, 0), 148, 128, 228 * KIB, 126 * MIB, 1.965),
}
CUDA, CUDNN = (12, 9, 0), (9, 10, 2)  # versions that are assumed to be there


def target_config(chip: Chip) -> str:
    """The text of a `GpuTargetConfigProto`."""
    silicon = SILICON[chip.name]
    numbers = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * KIB,
        "shared_memory_per_core": silicon.shared,
        "shared_memory_per_block_optin": silicon.shared - KIB,
        "threads_per_core_limit": 2048,
        "core_count": silicon.processors,
        "fpus_per_core": silicon.lanes,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "registers_per_core_limit": 2**16,
        "registers_per_block_limit": 2**16,
        "memory_bandwidth": int(chip.memory_bandwidth),
        "device_memory_size": chip.memory,
        "l2_cache_size": silicon.l2,
        "clock_rate_ghz": silicon.clock,
    }
    lines = [f"  {name}: {value}" for name, value in numbers.items()]
    major, minor = silicon.capability
    return "\n".join(
        [
            "gpu_device_info {",
            *lines,
            f"  cuda_compute_capability {{ major: {major} minor: {minor} }}",
            "}",
            'platform_name: "CUDA"',
            f"dnn_version_info {{ {_version(CUDNN)} }}",
            f"runtime_version {{ {_version(CUDA)} }}",
            f'device_description_str: "{silicon.name}"',
        ]
    )


def grid(topology: Topology) -> str:
    """The topology as XLA names it: partitions × hosts × cards of a host."""
    return f"1x{topology.hosts}x{topology.host_devices}"


def _version(numbers: tuple[int, int, int]) -> str:
    return " ".join(
        f"{name}: {n}" for name, n in zip(("major", "minor", "patch"), numbers, strict=True)
    )
