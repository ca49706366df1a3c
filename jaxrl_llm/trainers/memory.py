# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""The largest amount of memory that a step used, as the device or the system counted it."""

from __future__ import annotations

import contextlib
import ctypes
import pathlib

import jax

_RESET = pathlib.Path("/proc/self/clear_refs")
_STATUS = pathlib.Path("/proc/self/status")


def return_memory() -> None:
    """What this process freed goes back to the system, where the C library is glibc: it keeps
    hundreds of MiB in pieces (after compiling) that the next phase's large arrays can't use."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


class PeakMemory:
    """Measures from `begin` to `metrics`.

    Accelerators count their allocations since the process began, so there the figure is the run's
    peak so far. On a CPU it is the process's resident memory since `begin`, where Linux says it.
    """

    def begin(self) -> None:
        """Forget the peak so far, where that is possible."""
        with contextlib.suppress(OSError):
            _RESET.write_text("5")

    def metrics(self) -> dict[str, float]:
        """{"memory/peak_gib": …}; empty where nobody counts."""
        peaks = [
            (device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()
        ]
        known = [peak for peak in peaks if peak]
        if known:
            return {"memory/peak_gib": max(known) / 2**30}
        try:
            lines = _STATUS.read_text(encoding="ascii").splitlines()
        except OSError:
            return {}
        kib = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
        return {"memory/peak_gib": kib[0] / 2**20} if kib else {}
