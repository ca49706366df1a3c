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
    nothing of it ran or waited for a CPU (or had lowered its own priority and waited). Whatever
    happens, the process group is killed at the end. `inner` is a process descriptor of the first
    process of a PID namespace: all in it dies with it.
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
    """CPU seconds that a process and its descendants used, and seconds in which they were idle.

    Between two looks the tree was idle for as long as none of its threads ran or waited for a CPU.
    The kernel books a wait when it is over, so nothing counts as idle while a thread is runnable.
    Who lowered their own priority wait because of that: their waiting counts as idle.
    """

    def __init__(self, root: int):
        self._root = root
        self._priority = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)
        self._seen: dict[tuple[int, int], tuple[float, float]] = {}
        self._last = _Times()
        self._checked = 0.0
        self._stepped_back = False
        self._idle_s = self.cpu_s = 0.0

    def verdict(self, elapsed: float, cpu_s: float, idle_s: float) -> tuple[str, str] | None:
        times = self._look()
        busy = max(times.cpu_s - self._last.cpu_s, times.ran_s - self._last.ran_s)
        if not self._stepped_back:
            busy += times.waited_s - self._last.waited_s
        if self._stepped_back or not times.runnable:
            self._idle_s += max(0.0, elapsed - self._checked - max(0.0, busy))
        self._last, self._checked = times, elapsed
        self.cpu_s = max(self.cpu_s, times.cpu_s)
        if self.cpu_s >= cpu_s:
            return "timeout", f"used {self.cpu_s:.1f} of {cpu_s:g} CPU seconds"
        if self._idle_s >= idle_s:
            lowered = ", having lowered its own priority" if self._stepped_back else ""
            return "timeout", f"idle for {self._idle_s:.1f} of {idle_s:g} seconds{lowered}"
        if elapsed >= _STARVED * (cpu_s + idle_s):
            return "starved", f"got {self.cpu_s:.1f} CPU seconds in {elapsed:.0f} seconds"
        return None

    def _look(self) -> _Times:
        times, todo = _Times(), [self._root]
        while todo:
            folder = f"/proc/{todo.pop()}"
            try:
                fields = _stat(folder)
                threads = os.listdir(f"{folder}/task")
            except OSError:  # it ended meanwhile; its parent has its CPU time
                continue
            self._stepped_back |= _session_priority(folder) > 0
            # User and system time, its own and that of the children it has waited for.
            times.cpu_s += sum(map(int, fields[11:15])) / _CLOCK_TICKS
            for thread in threads:
                with contextlib.suppress(OSError):
                    todo += self._look_at_thread(f"{folder}/task/{thread}", int(thread), times)
        times.ran_s = sum(ran for ran, _ in self._seen.values())
        times.waited_s = sum(waited for _, waited in self._seen.values())
        return times

    def _look_at_thread(self, folder: str, thread: int, times: _Times) -> list[int]:
        """Adds a thread to the times; gives back the processes that it started."""
        fields = _stat(folder)
        times.runnable |= fields[0] == b"R"
        nice, policy = int(fields[16]), int(fields[38])
        self._stepped_back |= nice > self._priority[0] or policy != self._priority[1]
        with open(f"{folder}/schedstat", "rb") as file:
            ran, waited = file.read().split()[:2]
        # A thread that ended keeps its share, and the number of another may be its own again.
        self._seen[thread, int(fields[19])] = int(ran) * 1e-9, int(waited) * 1e-9
        with open(f"{folder}/children", "rb") as file:
            return list(map(int, file.read().split()))


@dataclasses.dataclass
class _Times:
    """Sums over the tree: CPU seconds as processes have them (ended children included) and as
    threads have them, seconds that threads waited for a CPU, and whether one can run now.
    """

    cpu_s: float = 0.0
    ran_s: float = 0.0
    waited_s: float = 0.0
    runnable: bool = False


def _stat(folder: str) -> list[bytes]:
    """The fields of a process or thread after its name, beginning with its state."""
    with open(f"{folder}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def _session_priority(folder: str) -> int:
    """The nice value of a process's whole session, on kernels that schedule these as groups."""
    try:
        with open(f"{folder}/autogroup", "rb") as file:
            return int(file.read().split()[-1])
    except (OSError, ValueError, IndexError):
        return 0
