# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Which devices a command uses, chosen before the backend starts."""

from __future__ import annotations

import os
from collections import Counter

import jax

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.sharding.joining import start
from jaxrl_llm.sharding.processes import ProcessConfig

_DEVICES = ("cpu", "cuda", "tpu")


def choose_devices(devices: str | None, processes: ProcessConfig | None = None) -> None:
    """Pick platform and compilation cache before the backend starts; `cpu:8` makes 8 devices.

    Args:
        processes: to join; None: this one works alone. With others the devices are not looked for:
            who is lost then would be waited for, if no `Watchdog` watches `check_devices`.
    """
    from jaxrl_llm.checkpoint.pretrained import cache_folder

    if jax.config.jax_compilation_cache_dir is None:
        # A resumed run, and the next run of the same shapes, start without compiling.
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
    if devices is not None:
        _set_platform(devices)
    if processes is not None:
        start(processes)
    elif devices is not None:
        check_devices(devices)


def _set_platform(devices: str) -> None:
    kind, _, count = devices.partition(":")
    good_count = count == "" or (kind == "cpu" and count.isdecimal() and count.isascii())
    if kind not in _DEVICES or not good_count or count == "0":
        raise ConfigError("unknown --devices", got=devices, expected="cpu, cpu:8, cuda or tpu")
    jax.config.update("jax_platforms", kind)
    if count:
        jax.config.update("jax_num_cpu_devices", int(count))
        if int(count) > 1:
            # A device's part in a collective holds a thread until all others have come. XLA makes
            # as many threads as devices: two collectives under way at once would wait for good.
            os.environ.setdefault("PJRT_NPROC", str(4 * int(count)))


def check_devices(devices: str) -> None:
    """Raises ConfigError if no device of the kind can be used; starts the backend."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"no {devices.partition(':')[0]} device can be used",
            got=(str(error).splitlines() or ["none found"])[0],
            hint="--devices=cpu",
        ) from error


def check_shares() -> None:
    """Raises ConfigError, in all processes, if not all have as many devices: arrays are laid out by
    that, and what processes tell each other, too. Starts the backend."""
    counts = Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        raise ConfigError(
            "the processes of a run have as many devices each",
            got=", ".join(f"process {i}: {count}" for i, count in sorted(counts.items())),
            hint="the same --devices on all hosts, and hosts of one kind",
        )
