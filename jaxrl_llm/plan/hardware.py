# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Chips and topologies: what one can rent, with its rates, memory, list price and sources.

A topology is written ``v5p:4x4x4`` (a slice of a TPU torus), ``h100:8`` (GPUs) or ``cpu:8``.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from typing import Literal

from jaxrl_llm.errors import ConfigError

GB, MIB, GIB = 10**9, 2**20, 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of accelerator, as its maker describes it.

    Attributes:
        name: as in a topology.
        kind: the JAX platform.
        flops: dense bfloat16 rate, FLOP/s; twice as much "with sparsity" is not counted.
        memory: bytes of device memory.
        memory_bandwidth: bytes/s between the chip and its memory.
        link_bandwidth: bytes/s of a chip's links to its neighbours, both directions together.
        chips_per_host: in the largest machine type; a smaller topology has one host.
        sliced_host: chips of a host in a topology of several.
        price: list price on demand in a US region, USD for one chip and hour; None: not listed.
        source: where rate, memory and bandwidths come from.
        price_source: where the price comes from, and when it was read.
        devices_per_chip: what JAX calls a device is this part of a chip.
        shape: dimensions of a topology; 1 is a plain count.
        most: chips of the largest slice, or that are planned for; None: no limit.
        network: bytes/s between hosts, a chip's part, both directions together; None: the links
            reach all chips of a topology.
        float32: rate of float32 products by JAX's default, as a part of `flops`: TF32 on a GPU,
            passes in bfloat16 on a TPU.
    """

    name: str
    kind: Literal["tpu", "cuda", "cpu"]
    flops: float
    memory: int
    memory_bandwidth: int | float
    link_bandwidth: int | float
    chips_per_host: int
    price: float | None
    source: str
    price_source: str
    devices_per_chip: int = 1
    shape: int = 1
    most: int | None = None
    network: int | float | None = None
    float32: float = 1.0
    sliced_host: int | None = None

    def rate(self, dtype: str) -> float:
        """FLOP/s of the chip in a dtype."""
        return self.flops * (self.float32 if dtype == "float32" else 1.0)

    def rate_words(self, dtype: str) -> str:
        """The rate of one JAX device, and what stands behind it."""
        words = f"{self.rate(dtype) / self.devices_per_chip / 1e12:g} TFLOP/s {dtype}"
        if dtype != "float32" or self.kind == "cpu":
            return words
        return words + (" (as TF32)" if self.kind == "cuda" else " (by default in bfloat16 passes)")

    @property
    def device_flops(self) -> float:
        """FLOP/s of one JAX device."""
        return self.flops / self.devices_per_chip

    @property
    def device_memory(self) -> int:
        """Bytes of one JAX device."""
        return self.memory // self.devices_per_chip

    @property
    def device_memory_bandwidth(self) -> float:
        """Bytes/s of one JAX device."""
        return self.memory_bandwidth / self.devices_per_chip

    @property
    def device_link_bandwidth(self) -> float:
        """Bytes/s of one JAX device's share of the links, both directions together."""
        return self.link_bandwidth / self.devices_per_chip


@dataclasses.dataclass(frozen=True)
class Topology:
    """Chips that are rented together.

    Attributes:
        shape: chips along each dimension.
    """

    chip: Chip
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def chips(self) -> int:
        return math.prod(self.shape)

    @property
    def devices(self) -> int:
        """What `jax.devices()` would list."""
        return self.chips * self.chip.devices_per_chip

    @property
    def host_devices(self) -> int:
        """What `jax.local_devices()` would list."""
        return self.devices // self.hosts

    @property
    def hosts(self) -> int:
        if self.chips <= self.chip.chips_per_host:
            return 1
        return self.chips // (self.chip.sliced_host or self.chip.chips_per_host)


def parse_topology(text: str) -> Topology:
    """``v5p:4x4x4`` → a topology.

    Raises:
        ConfigError: no such chip, or not a shape that it comes in; names the nearest that is.
    """
    name, colon, rest = text.strip().lower().partition(":")
    name = ALIASES.get(name, name)
    if name not in CHIPS:
        near = difflib.get_close_matches(name, [*CHIPS, *ALIASES], n=1, cutoff=0.4)
        raise ConfigError(
            f"no chip '{name}' is known" + (f". Did you mean {near[0]}?" if near else ""),
            expected="one of " + ", ".join(CHIPS),
            hint="v5p:4x4x4, v5e:4x4, h100:8 or cpu:8",
        )
    chip = CHIPS[name]
    example = {1: "8", 2: "4x4", 3: "4x4x4"}[chip.shape]
    parts = rest.split("x")
    if not colon or not all(part.isascii() and part.isdecimal() for part in parts):
        raise ConfigError(
            f"a topology of {name} needs its shape", got=text, expected=f"{name}:{example}"
        )
    if max(map(len, parts)) > _DIGITS:
        raise ConfigError(f"{name} does not come in this size", expected=f"{name}:{example}")
    shape = tuple(int(part) for part in parts)
    allowed = _SHAPES[chip.shape]
    if not allowed(shape):
        raise ConfigError(
            f"{name} does not come in this shape",
            got=f"{text} ({math.prod(shape)} chips)",
            expected=_SHAPE_WORDS[chip.shape],
            hint=f"{name}:{_nearest(math.prod(shape), chip.shape)}",
        )
    if chip.most is not None and math.prod(shape) > chip.most:
        raise ConfigError(
            f"beyond the most of {name} that are planned for",
            got=f"{text} ({math.prod(shape)} chips)",
            expected=f"at most {chip.most} chips",
            hint=f"{name}:{_nearest(chip.most, chip.shape)}",
        )
    whole = chip.sliced_host or chip.chips_per_host
    if math.prod(shape) > chip.chips_per_host and math.prod(shape) % whole:
        raise ConfigError(
            f"several hosts of {name} are whole hosts",
            got=f"{text} ({math.prod(shape)} chips)",
            expected=f"at most {chip.chips_per_host}, or a multiple of {whole}",
            hint=f"{name}:{math.prod(shape) // whole * whole}",
        )
    return Topology(chip, shape)


def _is_count(shape: tuple[int, ...]) -> bool:
    return len(shape) == 1 and shape[0] >= 1


def _is_2d(shape: tuple[int, ...]) -> bool:
    return shape in _SLICES_2D


def _is_3d(shape: tuple[int, ...]) -> bool:
    """Less than a cube of 4×4×4 as listed by the maker; from there on multiples of 4, ascending."""
    if shape in _SMALL_3D:
        return True
    whole = len(shape) == 3 and all(n >= 4 and n % 4 == 0 for n in shape)
    return whole and list(shape) == sorted(shape)


def _nearest(chips: int, dimensions: int) -> str:
    """The shape whose number of chips is nearest."""
    if dimensions == 1:
        return str(max(chips, 1))
    shapes = _SLICES_2D if dimensions == 2 else (*_SMALL_3D, *_CUBES_3D)
    best = min(shapes, key=lambda s: abs(math.log(math.prod(s)) - math.log(max(chips, 1))))
    return "x".join(map(str, best))


_DIGITS = 6  # of a count, at most
_SLICES_2D = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_SMALL_3D = ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_CUBES_3D = ((4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8), (8, 8, 16), (8, 16, 16), (16, 16, 16),
             (16, 16, 24))  # fmt: skip
_SHAPES = {1: _is_count, 2: _is_2d, 3: _is_3d}
_SHAPE_WORDS = {
    1: "a number of devices, at least 1",
    2: "one of " + ", ".join(f"{a}x{b}" for a, b in _SLICES_2D),
    3: "2x2x1, 2x2x2, 2x2x4, 2x4x4, or multiples of 4 in ascending order such as 4x4x8",
}

_TPU_DOCS = "https://cloud.google.com/tpu/docs/"
_TPU_PRICE = "https://cloud.google.com/tpu/pricing (on demand, US), 2026-11"
_AWS_PRICE = "https://aws.amazon.com/ec2/pricing/on-demand/ (us-east-1, an eighth of {}), 2026-11"


def _tpu(name: str, tflops: int, memory: int, bandwidth: int, links: int, **rest) -> Chip:
    sizes = {"flops": tflops * 1e12, "memory": memory, "memory_bandwidth": bandwidth * GB}
    source = f"{_TPU_DOCS}{name}, 2026-11" + rest.pop("and_source", "")
    return Chip(name, "tpu", **sizes, link_bandwidth=links * GB, source=source, **rest)


def _gpu(
    name: str, tflops: int, memory: int, bandwidth: int, links: int, host_gbits: int, **rest
) -> Chip:
    """Args: host_gbits: Gbit/s of the price's machine of eight to others, each direction."""
    sizes = {"flops": tflops * 1e12, "memory": memory, "memory_bandwidth": bandwidth * GB}
    sizes |= {"link_bandwidth": links * GB, "network": 2 * host_gbits * GB / 8 / 8}
    return Chip(name, "cuda", **sizes, chips_per_host=8, float32=0.5, most=1 << 14, **rest)


# Networks of the prices' machines (EFA), Gbit/s: unlike the prices, not read again in 2026-11.
_NVIDIA = "https://www.nvidia.com/en-us/data-center/"

# The one table of chips. TPU memory is counted as the compiler does, GPU memory as it is sold.
CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        _tpu("v4", 275, 32 * GIB, 1200, 600, chips_per_host=4, price=3.22,
             price_source=_TPU_PRICE, shape=3, most=4096,
             and_source="; links: not on that page, assumed half of v5p's"),
        _tpu("v5e", 197, 16 * GIB, 819, 400, chips_per_host=8, sliced_host=4, price=1.20,
             price_source=_TPU_PRICE, shape=2),
        _tpu("v5p", 459, 95 * GIB, 2765, 1200, chips_per_host=4, price=4.20,
             price_source=_TPU_PRICE, shape=3, most=6144),
        _tpu("v6e", 918, 32 * GIB, 1638, 800, chips_per_host=8, sliced_host=4, price=2.70,
             price_source=_TPU_PRICE, shape=2),
        _tpu("tpu7x", 2307, 192 * GIB, 7380, 1200, chips_per_host=4, price=None,
             price_source="no list price was found", shape=3, devices_per_chip=2,
             most=9216),
        _gpu("a100-40", 312, 40 * GB, 1555, 600, 400, price=2.745,
             source=_NVIDIA + "a100/ (SXM)", price_source=_AWS_PRICE.format("p4d.24xlarge")),
        _gpu("a100-80", 312, 80 * GB, 2039, 600, 400, price=3.431,
             source=_NVIDIA + "a100/ (SXM)", price_source=_AWS_PRICE.format("p4de.24xlarge")),
        _gpu("h100", 989, 80 * GB, 3350, 900, 3200, price=6.88,
             source=_NVIDIA + "h100/ (SXM; half of the figure with sparsity)",
             price_source=_AWS_PRICE.format("p5.48xlarge")),
        _gpu("h200", 989, 141 * GB, 4800, 900, 3200, price=7.912,
             source=_NVIDIA + "h200/ (SXM; half of the figure with sparsity)",
             price_source=_AWS_PRICE.format("p5en.48xlarge")),
        _gpu("b200", 2250, 180 * GB, 7700, 1800, 3200, price=14.242,
             source=_NVIDIA + "hgx/ (HGX B200; half of the figure with sparsity)",
             price_source=_AWS_PRICE.format("p6-b200.48xlarge")),
        # A stand-in for tests and laptops: rates of two cores of a server, measured once.
        Chip("cpu", "cpu", 0.15e12, 8 * GIB, 20 * GB, 20 * GB, 1 << 20, 0.0,
             "measured: bfloat16 products and memory reads of two AVX-512 cores", "own machine",
             most=1024),
    )
}  # fmt: skip

ALIASES = {"a100": "a100-80", "v5litepod": "v5e", "v5lite": "v5e", "v6": "v6e", "v7x": "tpu7x"}
