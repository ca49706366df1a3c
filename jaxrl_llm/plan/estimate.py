# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Time and money, from FLOPs, bytes and the table of chips. Everything here is an estimate.

Passes over whole rows take ``FLOPs / (rate · efficiency)``; decoding takes the time in which the
weights and the cache are read, or that of its FLOPs, whichever is longer. Efficiencies are ranges.
"""

from __future__ import annotations

import dataclasses

from jaxrl_llm.plan.hardware import Chip

Range = tuple[float, float]

# Model FLOPs utilisation of a well-filled training step: 0.38–0.43 for Llama 3 405B
# (https://arxiv.org/abs/2407.21783, Table 4), 0.46 for PaLM 540B (https://arxiv.org/abs/2204.02311).
BEST_MFU: Range = (0.35, 0.50)
# Part of the memory's bandwidth that decoding reaches; its products read weights once a step.
DECODE_BANDWIDTH: Range = (0.5, 0.8)
RETRY = 0.2  # of the money, for starts that fail, preemptions and a second attempt


def accelerator_hours(flops: int | float, rate: int | float, utilisation: float) -> float:
    """Hours of one chip: ``FLOPs / (rate · utilisation) / 3600``; rate in FLOP/s."""
    return flops / (rate * utilisation) / 3600.0


def days(hours: int | float, chips: int) -> float:
    """Days on so many chips, from hours of one."""
    return hours / chips / 24.0


def hours_a_day(chips: int, busy: float) -> float:
    """Chip-hours of work that so many chips do in a day, if they work that part of the time."""
    return chips * 24.0 * busy


def cost(chip_hours: int | float, price: int | float, retry: int | float = RETRY) -> float:
    """USD: ``hours · price · (1 + retry)``."""
    return chip_hours * price * (1.0 + retry)


def mfu_range(
    tokens_per_device: int | float,
    chip: Chip,
    *,
    dtype: str = "bfloat16",
    link: int | float | None = None,
) -> Range:
    """What utilisation to expect of an update with so many tokens a device.

    Up to ``rate / link bandwidth`` tokens a device (one direction), gathering two-byte weights
    takes longer than multiplying with them, and the utilisation falls in proportion; weights of
    four bytes take twice as long.

    Args:
        link: bytes/s in one direction; None: of the links within a host or slice.
    """
    link = chip.device_link_bandwidth / 2.0 if link is None else link
    size = 2.0 if dtype == "float32" else 1.0
    enough = size * chip.rate(dtype) / chip.devices_per_chip / link
    filled = min(1.0, tokens_per_device / enough)
    return BEST_MFU[0] * filled, BEST_MFU[1] * filled


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of a step.

    Attributes:
        seconds: from the better to the worse efficiency.
        efficiency: assumed, of the rate or of the memory's bandwidth, worse to better.
        bound: which of the two decides.
        model_flops: of all devices.
    """

    name: str
    seconds: Range
    efficiency: Range
    bound: str
    model_flops: int | float


def compute_phase(
    name: str,
    *,
    computed: int | float,
    needed: int | float,
    devices: int,
    chip: Chip,
    mfu: Range,
    dtype: str = "bfloat16",
) -> Phase:
    """A pass over rows on all devices; `mfu` is of the FLOPs that are computed."""
    at_peak = computed / (devices * chip.rate(dtype) / chip.devices_per_chip)
    return Phase(name, (at_peak / mfu[1], at_peak / mfu[0]), mfu, "FLOPs", needed)


def sampler_phase(
    name: str,
    *,
    steps: int | float,
    step_bytes: int | float,
    step_flops: int | float,
    needed: int | float,
    chip: Chip,
    dtype: str = "bfloat16",
) -> Phase:
    """Steps of one copy of the sampler: decoding, or chunks of prompts.

    Args:
        step_bytes: read in each, on each device: its part of the weights and of the live cache.
        step_flops: computed in each, on each device.
        needed: model FLOPs of all devices.
    """
    reading = step_bytes / chip.device_memory_bandwidth
    computing = step_flops / (chip.rate(dtype) / chip.devices_per_chip)
    bound = "bandwidth" if reading >= computing else "FLOPs"
    efficiency = DECODE_BANDWIDTH if bound == "bandwidth" else BEST_MFU
    at_peak = steps * max(reading, computing)
    return Phase(
        name, (at_peak / efficiency[1], at_peak / efficiency[0]), efficiency, bound, needed
    )


@dataclasses.dataclass(frozen=True)
class Bill:
    """What a run takes.

    Attributes:
        phases: of one step.
        steps: of the run.
        tokens: useful ones of one step.
        chips: that are rented, and their price for an hour; None: not listed.
        price_source: of the price.
        dtype: whose rate the utilisation is of.
    """

    phases: tuple[Phase, ...]
    steps: int
    tokens: int | float
    chips: int
    chip: Chip
    price: int | float | None
    retry: int | float = RETRY
    price_source: str = ""
    dtype: str = "bfloat16"

    @property
    def step_seconds(self) -> Range:
        return sum(p.seconds[0] for p in self.phases), sum(p.seconds[1] for p in self.phases)

    @property
    def mfu(self) -> Range:
        """Model FLOPs of a whole step over what the chips could do meanwhile, worse to better."""
        needed = sum(p.model_flops for p in self.phases)
        best, worst = (
            needed / (s * self.chips * self.chip.rate(self.dtype)) for s in self.step_seconds
        )
        return worst, best

    @property
    def tokens_per_second(self) -> Range:
        best, worst = (self.tokens / s for s in self.step_seconds)
        return worst, best

    @property
    def hours(self) -> Range:
        """Of the run, on all chips."""
        best, worst = (s * self.steps / 3600.0 for s in self.step_seconds)
        return best, worst

    @property
    def money(self) -> Range | None:
        """USD, the retry budget included."""
        if self.price is None:
            return None
        best, worst = (cost(h * self.chips, self.price, self.retry) for h in self.hours)
        return best, worst
