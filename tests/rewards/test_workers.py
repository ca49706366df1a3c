# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time
from concurrent import futures

import pytest

from jaxrl_llm.rewards.workers import WorkerFailed, WorkerLost, Workers

_PATH = {"PYTHONPATH": str(pathlib.Path(__file__).parent)}


def _workers(function="act", **options):
    options = {"count": 1, "cpu_s": 0.5, "environment": _PATH, **options}
    return Workers(f"worker_functions:{function}", **options)


def test_requests_and_answers_of_all_sizes():
    workers = _workers("echo", count=2, cpu_s=5.0)
    requests = [os.urandom(size) for size in (0, 1, 7, 65536, 3 * 10**6)]
    with futures.ThreadPoolExecutor(5) as pool:
        assert list(pool.map(workers.call, requests)) == requests
    workers.close()


def test_a_worker_is_used_again_and_replaced_after_it_was_lost():
    workers = _workers()
    first = workers.call(b"pid")
    assert workers.call(b"pid") == first
    for fatal in (b"spin 30", b"big_power 999999999", b"exit 0", b"exit 1"):
        begin = time.monotonic()
        with pytest.raises(WorkerLost):
            workers.call(fatal)
        assert time.monotonic() - begin < 20.0
        following = workers.call(b"pid")
        assert following != first
        with pytest.raises(ProcessLookupError):
            os.kill(int(first), 0)
        first = following
    assert workers.lost == 4
    workers.close()


def test_a_call_that_waits_is_ended_by_the_clock():
    workers = _workers(wall_s=0.3)
    with pytest.raises(WorkerLost, match="in time"):
        workers.call(b"sleep 60")
    assert workers.call(b"sleep 0.01") == b"sleep 0.01"
    workers.close()


def test_time_is_counted_per_call_and_in_cpu_seconds():
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        workers = _workers(cpu_s=0.5)
        for _ in range(4):  # more than the limit together, and several times it on the clock
            assert workers.call(b"spin 0.25") == b"spin 0.25"
    finally:
        for process in busy:
            process.kill()
            process.wait()
    workers.close()


def test_memory_is_limited_and_the_worker_lives_on():
    workers = _workers(memory_bytes=1 << 30)
    first = workers.call(b"pid")
    with pytest.raises(RuntimeError, match="MemoryError"):
        workers.call(b"allocate 2000000000")
    assert workers.call(b"pid") == first
    workers.close()


def test_what_the_function_raises_and_prints():
    workers = _workers()
    with pytest.raises(RuntimeError, match="ValueError: wrong"):
        workers.call(b"raise wrong")
    assert workers.call(b"print loud") == b"print loud"
    workers.close()


def test_a_function_that_can_not_be_imported():
    for name in ("no_such_function", ""):
        with pytest.raises(WorkerFailed, match="AttributeError"):
            _workers(name).call(b"")


def test_workers_end_with_their_parent():
    text = (
        "import os, sys\n"
        "from jaxrl_llm.rewards.workers import Workers\n"
        "workers = Workers('worker_functions:act', count=1, cpu_s=1.0)\n"
        "print(workers.call(b'pid').decode(), flush=True)\n"
        "os._exit(0)\n"
    )
    command = [sys.executable, "-c", text]
    done = subprocess.run(
        command, env={**os.environ, **_PATH}, capture_output=True, text=True, check=True
    )
    for _ in range(100):
        if not pathlib.Path(f"/proc/{int(done.stdout)}").exists():
            return
        time.sleep(0.05)
    raise AssertionError("the worker is still there")
