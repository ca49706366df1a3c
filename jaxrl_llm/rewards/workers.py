# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Worker processes for work that may never end: limited in CPU time by the kernel, and replaced.

A worker imports one function, `bytes -> bytes`, and calls it for one request after another. Before
each call it sets a timer on its own CPU time whose signal ends the process, whatever it is doing,
be it in one long C call. So it needs no thread, no signal handler and no event loop of the
caller's, and a busy machine changes nothing. The caller sees the pipe close, and the next call gets
a new worker.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import resource
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

_LENGTH = struct.Struct("<Q")
_READY = b"ready"
_START_S = 300.0
_STARTS = 3


class WorkerFailed(RuntimeError):
    """No worker could be started: nothing is known about the request."""


class WorkerLost(RuntimeError):
    """The worker ended, or was ended, during this request."""


class Workers:
    """A pool of worker processes; safe to call from any thread, and from a fork of this process.

    Args:
        function: what the workers call, as `package.module:name`; takes and returns bytes.
        count: worker processes at most; they start when first needed.
        cpu_s: CPU seconds of one call.
        wall_s: seconds of one call, for calls that wait; None for 60 × `cpu_s`.
        memory_bytes: address space of a worker; None for no limit.
        environment: variables to be set for the workers.
    """

    def __init__(
        self,
        function: str,
        *,
        count: int,
        cpu_s: float,
        wall_s: float | None = None,
        memory_bytes: int | None = None,
        environment: dict[str, str] | None = None,
    ):
        assert count >= 1 and cpu_s > 0
        self._function, self.count = function, count
        self._cpu_s, self._wall_s = cpu_s, wall_s or 60.0 * cpu_s
        self._memory_bytes, self._environment = memory_bytes, environment or {}
        self._process_id, self._idle = 0, queue.LifoQueue()
        self._lock = threading.Lock()
        self.lost = 0

    def call(self, request: bytes) -> bytes:
        """Hands a request to a worker and waits for its answer.

        Raises:
            WorkerLost: the call took more time or memory than it may, or crashed the worker.
            WorkerFailed: no worker could be started.
            Exception: what the function itself raised, as a RuntimeError with its text.
        """
        idle = self._slots()
        worker = idle.get()
        try:
            if worker is None:
                worker = self._start()
            answer = worker.ask(request, self._wall_s)
        except BaseException as error:
            if worker is not None:
                worker.end()
            self.lost += isinstance(error, WorkerLost)
            idle.put(None)
            raise
        idle.put(worker)
        if answer[:1] != b"+":
            raise RuntimeError(answer[1:].decode("utf-8", "replace"))
        return answer[1:]

    def close(self) -> None:
        """Ends all workers that are idle; they start again when they are needed."""
        for _ in range(self.count):
            with contextlib.suppress(queue.Empty):
                worker = self._slots().get_nowait()
                if worker is not None:
                    worker.end()
                self._idle.put(None)

    def _slots(self) -> queue.LifoQueue:
        with self._lock:
            if self._process_id != os.getpid():  # after a fork the workers are the parent's
                self._process_id, self._idle = os.getpid(), queue.LifoQueue()
                for _ in range(self.count):
                    self._idle.put(None)
            return self._idle

    def _start(self) -> _Worker:
        reason = ""
        for _ in range(_STARTS):
            worker = None
            try:
                worker = _Worker(self._function, self._cpu_s, self._memory_bytes, self._environment)
                if worker.receive(_START_S) == _READY:
                    return worker
            except (OSError, WorkerLost) as error:
                reason = (worker and worker.last_words()) or str(error)
            if worker is not None:
                worker.end()
        raise WorkerFailed(f"a worker for {self._function} does not start: {reason}")


class _Worker:
    """One process and the pipes to and from it."""

    def __init__(self, function: str, cpu_s: float, memory_bytes: int | None, environment: dict):
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, function, str(cpu_s), str(memory_bytes or 0)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            env={**os.environ, **environment},
            start_new_session=True,
        )

    def ask(self, request: bytes, wall_s: float) -> bytes:
        # The worker reads a request whole before it works on it, so that this never blocks for
        # long.
        message = memoryview(_LENGTH.pack(len(request)) + request)
        try:
            while message:
                message = message[os.write(self._process.stdin.fileno(), message) :]
        except OSError:
            raise WorkerLost("the worker had ended") from None
        return self.receive(wall_s)

    def receive(self, wall_s: float) -> bytes:
        deadline = time.monotonic() + wall_s
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        return self._read(length, deadline)

    def _read(self, count: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._process.stdout], [], [], left)[0]:
                raise WorkerLost("no answer in time")
            chunk = os.read(self._process.stdout.fileno(), min(1 << 20, count - len(data)))
            if not chunk:
                raise WorkerLost("the worker ended")
            data += chunk
        return bytes(data)

    def last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().split("\n")
        return lines[-1][:300]

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._errors):
            file.close()


# ----------------------------------------------------------------------------
# The worker's side
# ----------------------------------------------------------------------------


def _serve(function: Callable[[bytes], bytes], cpu_s: float, requests: int, answers: int) -> None:
    with os.fdopen(requests, "rb") as source, os.fdopen(answers, "wb") as sink:

        def send(message: bytes) -> None:
            sink.write(_LENGTH.pack(len(message)) + message)
            sink.flush()

        send(_READY)
        while header := source.read(_LENGTH.size):
            request = source.read(_LENGTH.unpack(header)[0])
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            try:
                answer = b"+" + function(request)
            except Exception as error:
                answer = b"-" + f"{type(error).__name__}: {error}".encode("utf-8", "replace")
            signal.setitimer(signal.ITIMER_PROF, 0)
            send(answer)


def main(function: str, cpu_s: str, memory_bytes: str) -> None:
    """Serves requests from standard input until it is closed."""
    # What the function prints must not mix with the answers.
    requests, answers = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the caller, who closes the pipe
    module, _, name = function.partition(":")
    target = getattr(importlib.import_module(module), name)
    if int(memory_bytes):
        resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes),) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _serve(target, float(cpu_s), requests, answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
