# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Arrays that wait in the host's memory while the devices are needed for something else."""

from __future__ import annotations

from typing import Any

import jax

from jaxrl_llm.errors import ConfigError


def to_host(tree: Any) -> Any:
    """The same arrays, split over devices as before, in the memory of their hosts."""
    return _moved(tree, "pinned_host")


def to_devices(tree: Any) -> Any:
    """The inverse of `to_host`."""
    return _moved(tree, "device")


def check_offload(platform: str) -> None:
    """That devices have a memory of their own.

    Raises:
        ConfigError: they have not.
    """
    if platform == "cpu":
        raise ConfigError(
            "train.offload has no effect on a CPU: its memory is the host's",
            hint="leave out --train.offload",
        )


def _moved(tree: Any, kind: str) -> Any:
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind(kind)), tree)
