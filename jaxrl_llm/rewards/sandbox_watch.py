# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Watches a process tree: drains what it writes, and ends it when it has used up what it may
use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping
from typing import IO, Literal

_TICK_S = 0.1
_STARVED = 20.0
_AFTERMATH_S = 2.0
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass
class Seen:
    """What a watched process tree did.

    Attributes:
        ended: "exited"; "timeout" or "overflow" where it was ended; "starved" where the machine
            gave it too little CPU time for a verdict.
        written: what came from each stream, up to the limit.
        cpu_s: CPU seconds of all its processes, as last seen.
        reason: for people.
    """

    ended: Literal["exited", "timeout", "overflow", "starved"]
    written: dict[str, bytes]
    cpu_s: float
    reason: str = ""


def watch(
    process: subprocess.Popen,
    streams: Mapping[str, IO[bytes]],
    *,
    cpu_s: float,
    idle_s: float,
    most_bytes: int,
    inner: int | None = None,
) -> Seen:
    """Waits for a process, started as the leader of its own session, and for all that it started.

    Time is up after `cpu_s` CPU seconds of the whole tree, or after `idle_s` seconds in which
    nothing of it ran or waited for a CPU. Whatever happens, the process group is killed at the end.
    `inner` is a process descriptor of the first process of a PID namespace: all in it dies with it.
    """
    written = {name: bytearray() for name in streams}
    tree = _Tree(process.pid)
    begin = time.monotonic()
    verdict: tuple[str, str] | None = None
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        for name, stream in streams.items():
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ, name)
        exit_notice = os.pidfd_open(process.pid)
        stack.callback(os.close, exit_notice)
        selector.register(exit_notice, selectors.EVENT_READ, None)
        stack.callback(_kill, process, inner)
        checked = begin
        while verdict is None:
            ready = selector.select(_TICK_S)
            if any(key.data is None for key, _ in ready):
                verdict = ("exited", "")
            verdict = _drain(selector, ready, written, most_bytes) or verdict
            now = time.monotonic()
            if verdict is None and now - checked >= _TICK_S:
                checked = now
                verdict = tree.verdict(now - begin, cpu_s, idle_s)
        _kill(process, inner)
        if verdict[0] == "exited":  # what is still in the pipes; nothing can write any more
            selector.unregister(exit_notice)
            end = time.monotonic() + _AFTERMATH_S
            while selector.get_map() and time.monotonic() < end:
                ready = selector.select(_TICK_S)
                verdict = _drain(selector, ready, written, most_bytes) or verdict
    ended, reason = verdict
    return Seen(ended, {name: bytes(data) for name, data in written.items()}, tree.cpu_s, reason)


def _drain(selector, ready, written, most_bytes) -> tuple[str, str] | None:
    for key, _ in ready:
        if key.data is None:
            continue
        try:
            data = os.read(key.fd, 65536)
        except BlockingIOError:
            continue
        if not data:
            selector.unregister(key.fileobj)
        buffer = written[key.data]
        buffer += data[: most_bytes - len(buffer) + 1]
        if len(buffer) > most_bytes:
            del buffer[most_bytes:]
            return "overflow", f"more than {most_bytes:,} bytes of {key.data}"
    return None


def _kill(process: subprocess.Popen, inner: int | None) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    if inner is not None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(inner, signal.SIGKILL)
        select.select([inner], [], [], _AFTERMATH_S)  # ends after everything in its namespace has
    process.wait()


class _Tree:
    """CPU seconds used, and seconds spent waiting for a CPU, by a process and its descendants."""

    def __init__(self, root: int):
        self._root = root
        self._waited: dict[int, float] = {}
        self.cpu_s = 0.0

    def verdict(self, elapsed: float, cpu_s: float, idle_s: float) -> tuple[str, str] | None:
        self._look()
        if self.cpu_s >= cpu_s:
            return "timeout", f"used {self.cpu_s:.1f} of {cpu_s:g} CPU seconds"
        idle = elapsed - self.cpu_s - sum(self._waited.values())
        if idle >= idle_s:
            return "timeout", f"idle for {idle:.1f} of {idle_s:g} seconds"
        if elapsed >= _STARVED * (cpu_s + idle_s):
            return "starved", f"got {self.cpu_s:.1f} CPU seconds in {elapsed:.0f} seconds"
        return None

    def _look(self) -> None:
        total, todo = 0.0, [self._root]
        while todo:
            pid = todo.pop()
            try:
                with open(f"/proc/{pid}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
                with open(f"/proc/{pid}/schedstat", "rb") as file:
                    self._waited[pid] = int(file.read().split()[1]) * 1e-9
                for thread in os.listdir(f"/proc/{pid}/task"):
                    with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                        todo += map(int, file.read().split())
            except OSError:  # it ended meanwhile; its parent has its CPU time
                continue
            # User and system time, its own and that of the children it has waited for.
            total += sum(map(int, fields[11:15])) / _CLOCK_TICKS
        self.cpu_s = max(self.cpu_s, total)
